"""What a type checker finds in calls of both packages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CALLS = ROOT / "tests" / "typed_calls.py"


def test_a_type_checker_finds_the_wrong_calls_and_no_others() -> None:
    """With the project's own settings, whose cache `make types` has filled."""
    answer = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-error-summary", CALLS],
        cwd=ROOT,
        env=os.environ | {"MYPYPATH": str(ROOT / "interop")},
        capture_output=True,
        text=True,
        check=False,
    )
    found: dict[int, set[str]] = {}
    for line in answer.stdout.splitlines():
        error = re.fullmatch(r"(.+):(\d+): error: .* +\[([\w-]+)\]", line)
        if error is None:  # a note to the error before it
            assert ": note: " in line, answer.stdout
            continue
        path, number, code = error.groups()
        assert path == CALLS.relative_to(ROOT).as_posix(), answer.stdout
        found.setdefault(int(number), set()).add(code)
    wrong = {
        number: set(line.partition("# wrong: ")[2].split())
        for number, line in enumerate(CALLS.read_text().splitlines(), 1)
        if "# wrong: " in line
    }
    assert len(wrong) > 20
    assert found == wrong, answer.stdout
