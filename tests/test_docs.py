"""What the documents point at is there: files, headings, code that architecture.md names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(path: Path) -> set[str]:
    """Headings as links name them: lower case, dashes for spaces, no punctuation."""
    headings = re.findall(r"^#+ (.+)$", without_code(path.read_text()), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings
    }


def broken_links(path: Path) -> list[str]:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(path.read_text())):
        if re.match(r"https?://|mailto:", link):
            continue
        place, _, anchor = link.partition("#")
        target = path.parent / place if place else path
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(path: Path) -> None:
    assert not broken_links(path)


def test_a_link_to_nothing_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a.md"
    path.write_text("# One: two\n[a](a.md#one-two) [b](#one) [c](b.md) [d](https://example.org)\n")
    assert broken_links(path) == ["#one", "b.md"]


def test_the_first_page_stays_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 1600


def test_the_files_that_architecture_names_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"`([\w/]+\.py)`", text))
    assert len(named) > 40
    files = [
        path.as_posix()
        for top in ("msa_icp_jax", "interop", "tests", "tools")
        for path in files_in(top)
    ]
    assert not {name for name in named if not any(f"/{f}".endswith(f"/{name}") for f in files)}


def files_in(top: str) -> list[Path]:
    return [path.relative_to(ROOT) for path in (ROOT / top).rglob("*.py")]
