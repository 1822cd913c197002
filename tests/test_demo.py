"""The demonstration, run as a person runs it, and the README's example."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import subprocess
import sys
import tomllib
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import oracle
import pytest

from msa_icp_jax import __main__ as command_line
from msa_icp_jax import demo
from msa_icp_jax.demo import NpzError

ROOT = Path(__file__).resolve().parent.parent
# Blocks that answer a question, by someone who read the text.
ANSWERS = {
    "installation information required for a user product": {24, 25, 26},
    "trademarks trade names and service marks of the licensor": {64},
    "the scope of the patent license granted by each contributor": {36, 103},
    "geographical distribution limitation countries patents": {88},
}


def run_python(*arguments, cwd, **env):
    """A fresh interpreter, without the device count of this one."""
    variables = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    variables |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "COLUMNS": "100"} | env
    command = [sys.executable, "-W", "error", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True)


def run_demo(*arguments, cwd, **env):
    return run_python("-m", "msa_icp_jax", "demo", *arguments, cwd=cwd, **env)


def some_bytes(*shape, seed=0):
    """Bytes of float8_e4m3fn: every value, NaN included."""
    return np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)


@pytest.fixture
def index_file(tmp_path):
    path = tmp_path / "mine.npz"
    np.savez(path, q=some_bytes(3, 4, 128), k=some_bytes(2500, 128) & 0xBF)  # no NaN among the keys
    return path


# ---- the texts shipped with the package ----------------------------------------------------------


def test_every_selection_is_the_one_rank_reference_s(tmp_path):
    """With the sizes that it has of itself; an index file is searched with others."""
    # The user's other flags stay, and the ranks still get a device each.
    flags = {"XLA_FLAGS": "--xla_cpu_enable_fast_math=false"}
    done = run_demo("--json", cwd=tmp_path, **flags)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["exact"] is True
    assert found["differences"] == []
    assert found["selections"] == 4 * (16 + 2048)
    assert (found["world_size"], found["page_size"]) == (4, 128)
    assert found["num_devices"] == 4
    assert found["backend"] == "xla"
    assert set(found["stage_ms"]) == {"write", "prefill", "decode"}
    assert min(*found["stage_ms"].values(), found["compile_ms"]) > 0
    assert {"msa_icp_jax", "jax", "jaxlib", "numpy", "python"} == set(found["versions"])
    answers = {answer["question"]: answer for answer in found["questions"]}
    assert len(answers) == 16
    for question, blocks in ANSWERS.items():
        assert answers[question]["best_block"] in blocks
        assert blocks <= set(answers[question]["chosen"][0])
    assert (
        "trademarks"
        in answers["trademarks trade names and service marks of the licensor"]["best_text"]
    )
    for answer in answers.values():
        assert [len(head) for head in answer["chosen"]] == [16] * 4
    # What people read, and the README quotes.
    assert "prefill: done in" in done.stderr
    assert all(f"\n{stage} " in done.stderr for stage in ("compile", "write", "prefill", "decode"))
    (quoted,) = re.findall(r"```text\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    quoted = [line for line in quoted.splitlines() if "jax" not in line and line != "..."]
    assert set(quoted) <= set(done.stderr.splitlines())
    if found["picture"] is not None:  # matplotlib is installed
        assert found["picture"] == "msa-icp-demo.png"
        check_picture(tmp_path / "msa-icp-demo.png")


def check_picture(path):
    picture = path.read_bytes()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = (int.from_bytes(picture[at : at + 4], "big") for at in (16, 20))
    assert width > 1000
    assert height > 1000


def test_the_shipped_arrays_are_what_the_notice_says():
    shipped = demo.shipped_context()
    assert (shipped.q.shape, shipped.q.dtype) == ((16, 4, 128), np.uint8)
    assert (shipped.k.shape, shipped.k.dtype) == ((32768, 128), np.uint8)
    assert len(shipped.questions) == 16
    assert len(shipped.block_text) == 256
    heads = shipped.prefill_q.reshape(2048, 4, 4, 32)
    for head in range(4):
        for quarter in range(4):
            expected = shipped.k[-2048:].reshape(2048, 4, 32)[:, (quarter - head) % 4]
            assert np.array_equal(heads[:, head, quarter], expected)


# ---- a wrong selection ---------------------------------------------------------------------------


@pytest.fixture
def run_tampered(index_file, monkeypatch, capsys):
    """Runs the demonstration with a reference whose answers a function changes."""

    def run(change):
        choose = demo.choose_blocks

        def tampered(q, k, positions):
            ids = choose(q, k, positions)
            change(ids, q, positions)
            return ids

        monkeypatch.setattr(demo, "choose_blocks", tampered)
        monkeypatch.chdir(index_file.parent)
        assert command_line.main(["demo", "--json", "--index-file", str(index_file)]) == 1
        said = capsys.readouterr()
        return json.loads(said.out), said.err

    return run


def test_one_differing_selection_of_prefill_fails_and_is_named(run_tampered):
    def change(ids, q, positions):
        # Row 700 of the prefill is row 188 of the third comparison window of 256.
        if positions[0] == 2500 - 2048 + 512:
            ids[188, 2, 1:15] = ids[188, 2, 1:15] - 1

    found, said = run_tampered(change)
    assert found["exact"] is False
    (difference,) = found["differences"]
    assert (difference["phase"], difference["row"], difference["head"]) == ("prefill", 700, 2)
    assert difference["chosen"] != difference["expected"]
    assert "NOT EXACT: 1 of 8,204 selections" in said
    assert "prefill row 700 head 2: chosen [0, " in said


def test_a_differing_selection_of_decode_fails_too(run_tampered):
    def change(ids, q, positions):
        if len(q) == 3:
            ids[1] = ids[1, :, ::-1]

    differences = run_tampered(change)[0]["differences"]
    assert [(d["phase"], d["row"], d["head"]) for d in differences] == [
        ("decode", 1, head) for head in range(4)
    ]
    assert {d["why"] for d in differences} == {"wrong: the right ids in the wrong order"}


def flat_context(scores):
    """A query and keys whose block g scores exactly scores[g], a small integer."""
    one, values = 0x38, {0: 0x00, 1: 0x38, 2: 0x40, 3: 0x44}
    q, k = np.zeros((1, 1, 128), np.uint8), np.zeros((128 * len(scores), 128), np.uint8)
    q[0, 0, 0] = one
    k[:, 0] = np.repeat([values[score] for score in scores], 128)
    return q, k


def explain(chosen, scores=(0,) * 8 + (1,) * 12 + (2, 3)):
    q, k = flat_context(scores)
    expected = [0, *range(8, 22)][:16]  # not all of 16: what matters is the comparison
    return demo.explain(q, k, len(k) - 1, chosen, expected)


def test_a_difference_is_explained_only_by_what_rounding_can_do(monkeypatch):
    expected = [0, *range(8, 22)]
    lower = [0, 7, *range(9, 22)]
    assert explain(lower).startswith("wrong: the scores differ by 1,")
    assert explain(lower, (0,) * 7 + (1,) * 13 + (2, 3)).startswith("a near tie: ")
    assert "wrong order" in explain(expected[::-1])
    assert "visible" in explain([0, 8, *range(10, 22), 40])
    assert "visible" in explain([*expected[:-2], expected[-1], -1])
    assert explain([1, *range(8, 22)]).startswith("a near tie: ")  # no first block is forced
    with monkeypatch.context() as patch:
        patch.setattr(demo, "INIT_BLOCKS", 1)
        assert "first or last block" in explain([1, *range(8, 22)])
    assert "first or last block" in explain([0, 7, *range(8, 21)])


# ---- the reference -------------------------------------------------------------------------------


def test_e4m3_bytes_have_their_values():
    import jax.numpy as jnp

    data = np.arange(256, dtype=np.uint8)
    expected = data.view(jnp.float8_e4m3fn).astype(np.float64)
    assert np.array_equal(demo.decode_e4m3(data), expected, equal_nan=True)


@pytest.mark.parametrize("num_keys", [1, 128, 700, 3000])
def test_the_reference_agrees_with_the_suite_s_oracle(num_keys):
    """NaN bytes, ties among zero keys and short last blocks included."""
    import jax.numpy as jnp

    q, k = some_bytes(6, 4, 128, seed=1), some_bytes(num_keys, 128, seed=2)
    q[q & 127 == 127] = 0  # a NaN in the query would make every score -inf: only in row 0
    q[0, 0, 0] = 0x7F
    k[::2] &= 0xBF
    k[num_keys // 3 : num_keys // 2] = 0
    positions = np.linspace(0, num_keys - 1, 6).astype(np.int64)
    pages = -(-num_keys // 128)
    cache = np.zeros((pages * 128, 128), np.uint8)
    cache[:num_keys] = k
    lengths = (positions + 1).astype(np.int32)
    plane = oracle.global_decode_plane(
        q.view(jnp.float8_e4m3fn),
        cache.reshape(pages, 128, 128).view(jnp.float8_e4m3fn),
        np.tile(np.arange(pages, dtype=np.int32), (6, 1)),
        lengths,
        pages,
        1,
    )
    visible = (positions // 128 + 1).astype(np.int32)
    expected = oracle.answer(plane.scores, visible, demo.INIT_BLOCKS, demo.LOCAL_BLOCKS)
    assert np.array_equal(demo.choose_blocks(q, k, positions), expected)


# ---- a user's index file -------------------------------------------------------------------------


def test_an_index_file_is_searched(index_file):
    arguments = ["--index-file", index_file, "--world-size", 2, "--page-size", 256]
    if importlib.util.find_spec("matplotlib"):
        arguments += ["--out", "mine.png"]
    done = run_demo(*arguments, cwd=index_file.parent)
    assert done.returncode == 0, done.stderr
    assert "exact: all 8,204 selections" in done.stdout
    assert "query 2" in done.stdout
    assert re.search(r"best block \d+, tokens \d+ to \d+\n", done.stdout)
    made = set(os.listdir(index_file.parent)) - {"mine.npz"}
    assert made == ({"mine.png"} if "--out" in arguments else set())


def test_one_token_is_enough_and_one_device_runs_all_ranks(tmp_path):
    np.savez(tmp_path / "one.npz", q=some_bytes(1, 4, 128), k=some_bytes(1, 128))
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    done = run_demo("--json", "--index-file", "one.npz", cwd=tmp_path, **flags)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["exact"] is True
    assert found["num_devices"] == 1
    assert found["questions"][0]["chosen"] == [[0]] * 4


def saved(**arrays):
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def zipped(compression=zipfile.ZIP_DEFLATED, **members):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(f"{name}.npy", data)
    return buffer.getvalue()


def header(shape, descr="|u1"):
    """An .npy file that states a shape and holds nothing."""
    buffer = io.BytesIO()
    stated = {"descr": descr, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(buffer, stated)
    return buffer.getvalue()


def npy(text, *, version=1, data=b"", size=None):
    """An .npy file whose header is any text, of any stated size."""
    size = (len(text) if size is None else size).to_bytes(2 if version == 1 else 4, "little")
    return b"\x93NUMPY" + bytes([version, 0]) + size + text.encode() + data


def array_file(array):
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


Q, K = some_bytes(2, 4, 128), some_bytes(300, 128)
Q_FILE, K_FILE = array_file(Q), array_file(K)
Q_STATED = "'fortran_order': False, 'shape': (2, 4, 128)}"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "No such file"),
        (b"", "not a zip file"),
        (b"PK\x03\x04 and then nothing", "not a zip file"),
        (saved(q=Q), "must hold the array k, got 'q.npy'"),
        (saved(q=Q, k=K.astype(np.float32)), r"k must be uint8 .* got dtype float32"),
        (saved(q=np.array([{}]), k=K), "cannot be read .*Object arrays"),
        (saved(q=Q[:, :2], k=K), r"shape \[n, 4, 128\], got shape \[2, 2, 128\]"),
        (saved(q=Q, k=K[:, :64]), r"shape \[m, 128\], got shape \[300, 64\]"),
        (saved(q=Q, k=K[0]), r"got shape \[128\]"),
        (saved(q=Q[:0], k=K), "1 to 4096 rows, got 0"),
        (saved(q=Q, k=K[:0]), "1 to 1048576 rows, got 0"),
        (zipped(q=Q_FILE, k=header((1 << 40, 128))), "cannot be read"),
        (saved(q=np.zeros((4097, 4, 128), np.uint8), k=K), "1 to 4096 rows, got 4097"),
        (saved(q=np.zeros((5000, 4, 128), np.uint8), k=K), "at most 2097152 bytes, got 2560128"),
        (zipped(q=header((2, 4, 128)), k=K_FILE), "expected 1024 bytes got 0"),
        (zipped(q=b"no array", k=K_FILE), "q is no array"),
        (saved(q=Q, k=K)[:-200], "not a zip file"),
        # What the parser of headers, which are Python's text, raises for text of other kinds.
        (zipped(q=npy("{'descr':'''"), k=K_FILE), "cannot be read .*multi-line string"),
        (zipped(q=npy("{[]: 1}"), k=K_FILE), "cannot be read .*unhashable"),
        (zipped(q=npy("{1: 2, 'a': 3}"), k=K_FILE), "cannot be read .*not supported"),
        (zipped(q=npy("[" * 300 + "]" * 300), k=K_FILE), "cannot be read .*parentheses"),
        (zipped(q=npy("-" * 8000 + "1"), k=K_FILE), "cannot be read"),
        (zipped(q=npy("{'descr': ('|u1',), " + Q_STATED), k=K_FILE), "cannot be read .*range"),
        (zipped(q=npy("{'descr': '|u1,,', " + Q_STATED), k=K_FILE), "cannot be read"),
        (zipped(q=npy("{'descr': '|u1', " + Q_STATED, version=4), k=K_FILE), "cannot be read"),
        (zipped(q=npy("{", version=2, size=600 << 20), k=K_FILE), "expected 629145600 bytes"),
        (zipped(q=Q_FILE[:-1], k=K_FILE), "expected 1024 bytes got 1023"),
        (zipped(zipfile.ZIP_LZMA, q=Q_FILE, k=K_FILE), "q must be stored or deflated"),
        (zipped(zipfile.ZIP_BZIP2, q=Q_FILE, k=K_FILE), "q must be stored or deflated"),
    ],
)
def test_a_bad_index_file_is_refused_with_its_reason(data, message, tmp_path, capsys):
    path = tmp_path / "bad.npz"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(NpzError, match=message):
        demo.read_context(path)
    assert command_line.main(["demo", "--index-file", str(path)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    # One line, beside the one that says that matplotlib is missing where it is.
    (line,) = [line for line in said.err.splitlines() if not line.startswith("no picture:")]
    assert re.search(message, line)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path, capsys):
    path = tmp_path / "pipe.npz"
    os.mkfifo(path)
    assert command_line.main(["demo", "--index-file", str(path)]) == 2
    assert f"{path} must be a regular file" in capsys.readouterr().err


def test_the_member_whose_header_is_checked_is_the_one_that_is_read(tmp_path):
    path = tmp_path / "double.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("q", array_file(Q.astype(np.float64)))
        archive.writestr("q.npy", array_file(np.asfortranarray(Q)))
        archive.writestr("k", header((1 << 40, 128)))
        archive.writestr("k.npy", K_FILE)
    found = demo.read_context(path)
    assert np.array_equal(found.q, Q)
    assert np.array_equal(found.k, K)


def test_a_header_of_any_stated_length_takes_no_memory(tmp_path):
    path, size = tmp_path / "long.npz", 64 << 20
    path.write_bytes(zipped(q=npy(" " * size, version=2), k=K_FILE))
    tracemalloc.start()
    try:
        with pytest.raises(NpzError, match=f"at most 2097152 bytes, got {size + 12}"):
            demo.read_context(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 << 20


def test_bytes_changed_anywhere_in_a_file_never_escape_as_another_error(tmp_path):
    rng, path = np.random.default_rng(0), tmp_path / "changed.npz"
    whole, refused = zipped(q=Q_FILE, k=K_FILE), 0
    for at in [*range(200), *range(len(whole) - 200, len(whole))]:
        changed = bytearray(whole)
        changed[at] = rng.integers(256)
        path.write_bytes(changed)
        try:
            demo.read_context(path)
        except NpzError:
            refused += 1
    assert refused > 100


# ---- names of files ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [b"a$x_{$.npz", b"\xff.npz", "\u4e2d.npz".encode()])
def test_a_file_of_any_name_is_answered_and_drawn(name, index_file, monkeypatch):
    path = index_file.rename(index_file.with_name(os.fsdecode(name)))
    arguments = ["demo", "--index-file", str(path)]
    drawn = path.with_suffix(".png")
    if importlib.util.find_spec("matplotlib"):
        arguments += ["--out", str(drawn)]
    streams = {n: io.TextIOWrapper(io.BytesIO(), "ascii") for n in ("stdout", "stderr")}
    for stream, ascii_only in streams.items():
        monkeypatch.setattr(sys, stream, ascii_only)
    assert command_line.main(arguments) == 0
    streams["stdout"].flush()
    assert b"exact: all" in streams["stdout"].buffer.getvalue()
    if "--out" in arguments:
        assert drawn.read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_fails_late_does_not_take_the_answers_along(
    index_file, monkeypatch, capsys, tmp_path
):
    pytest.importorskip("matplotlib")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(demo, "draw", full)
    out = ["--out", str(tmp_path / "picture.png")]
    assert command_line.main(["demo", "--json", "--index-file", str(index_file), *out]) == 2
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert (found["exact"], found["picture"]) == (True, None)
    assert "no picture: [Errno 28] No space left on device" in said.err


@pytest.mark.parametrize("late", [False, True])
def test_without_out_a_folder_that_cannot_be_written_costs_the_picture_alone(
    late, index_file, monkeypatch, capsys
):
    """Also where that shows only when the picture is written."""
    pytest.importorskip("matplotlib")

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.chdir(index_file.parent)
    if late:
        monkeypatch.setattr(demo, "draw", refuse)
    else:
        monkeypatch.setattr(demo.os, "access", lambda *_: False)
    assert command_line.main(["demo", "--json", "--index-file", str(index_file)]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert (found["exact"], found["picture"]) == (True, None)
    assert "no picture: " in said.err
    assert os.listdir(index_file.parent) == ["mine.npz"]


def test_a_picture_that_cannot_be_written_is_refused_before_the_work(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    for place in (tmp_path, tmp_path / "missing" / "picture.png"):
        assert command_line.main(["demo", "--out", str(place)]) == 2
        assert f"--out {place} cannot be written" in capsys.readouterr().err


# ---- the command line ----------------------------------------------------------------------------


def test_the_script_is_the_command(capsys, monkeypatch):
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"msa-icp-demo": "msa_icp_jax.demo:command"}
    assert demo.command(["--index-file", "missing.npz"]) == 2
    assert "No such file" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["msa-icp-demo", "--page-size", "64"])
    with pytest.raises(SystemExit):
        demo.command()
    assert "msa-icp-demo: error: argument --page-size" in capsys.readouterr().err


def test_without_a_command_help_is_shown(capsys):
    assert command_line.main([]) == 0
    assert "demo" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--version"], 0, "msa-icp-jax 0.1.0 (jax "),
        (["demo", "--help"], 0, "index file: an .npz with uint8 arrays"),
        (["demo", "--world-size", "3"], 2, "invalid choice: 3"),
        (["demo", "--page-size", "64"], 2, "invalid choice: 64"),
    ],
)
def test_the_command_line_explains_itself(arguments, status, words, capsys):
    with pytest.raises(SystemExit) as stopped:
        command_line.main(arguments)
    assert stopped.value.code == status
    said = capsys.readouterr()
    assert words in said.out + said.err


# ---- the README ----------------------------------------------------------------------------------


def test_the_readme_s_example_runs_and_prints_what_it_says(tmp_path):
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (tmp_path / "example.py").write_text(example)
    done = run_python("example.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    expected = [line.split("  # ")[1] for line in example.splitlines() if line.startswith("print(")]
    assert done.stdout.splitlines() == expected
