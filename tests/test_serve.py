"""The serving example: its tokens, its programs, its pages, and the exported decode step."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_cuda
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from inputs import TIME_LIMIT
from jax import export as jax_export

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.append(str(EXAMPLES))

from serve import aot, check, cli, model  # noqa: E402
from serve.indexers import DenseIndexer, top_blocks  # noqa: E402
from serve.pages import PagePool  # noqa: E402
from serve.server import Request, Server  # noqa: E402
from serve.workload import Workload  # noqa: E402

STEPS = 52
CONFIG = model.Config()
EXACT_IN_FLOAT32 = 2**24  # every integer up to here


# ---- the loop ----


def test_continuous_batching_on_2_and_4_ranks() -> None:
    """One stream through every server; one test, since compiling them is what takes time.

    2 ranks share a device, as on a single GPU, and have a program for few requests besides.
    """
    config = dataclasses.replace(CONFIG, layers=2)
    params = model.init_params(config)
    one_bucket = dataclasses.replace(config, decode_buckets=(config.slots,))
    servers = {
        "2 ranks": Server(config, params, 2),
        "4 ranks": Server(one_bucket, params, 4, cli.device_mesh(4)),
        "reference": Server(one_bucket, params, None),
    }
    assert cli.SERVERS == {"2 ranks": 2, "4 ranks": 4, "reference": None}
    runs = {name: cli.serve(server, Workload(config), STEPS) for name, server in servers.items()}
    result = cli.verdict(config, params, runs)
    requests = runs["2 ranks"].requests
    assert result["identical"]
    assert result["recompilations"] == 0
    assert result["memory_flat"]
    assert_both_lengths_of_context_count(result)
    assert_requests_join_leave_and_share(requests, result)
    assert_wrong_tokens_are_noticed(params, requests)
    for server in servers.values():
        assert_books_balance(server)
        assert_everything_is_donated(server)
        assert_no_host_in_the_step(server)


def assert_both_lengths_of_context_count(result: dict[str, Any]) -> None:
    assert result["tokens_equal_to_dense_attention"] > 100
    assert result["tokens_past_16_blocks"] > 20
    assert result["most_blocks"] > check.DENSE_BLOCKS
    # Or the comparison past 16 blocks would say nothing about the chosen blocks.
    assert result["of_these_dense_attention_would_change"] > 0


def assert_requests_join_leave_and_share(requests: list[Request], result: dict[str, Any]) -> None:
    served = [request for request in requests if request.answer]
    assert len(served) > CONFIG.slots  # some took a slot that another had left
    assert any(request.reused > check.DENSE_BLOCKS * model.BLOCK for request in served)
    assert result["servers"]["2 ranks"]["drafts_accepted"] > 10


def assert_wrong_tokens_are_noticed(params: model.Params, requests: list[Request]) -> None:
    one = next(r for r in requests if r.finished and check.blocks(r) <= check.DENSE_BLOCKS)
    wrong = [(one.answer[0] + 1) % CONFIG.vocab, *one.answer[1:]]
    other = Request(one.prompt, one.max_new, wrong)
    assert check.differs_from_dense(CONFIG, params, other) > 0
    assert not check.same_answers([one], [other])


def assert_books_balance(server: Server) -> None:
    assert not any(request.finished for request in server.running)
    assert len(server.free_slots) == CONFIG.slots - len(server.running)
    users = [0] * CONFIG.pages
    for request in server.running:
        for page in request.pages:
            users[page] += 1
    assert server.pool.users == users
    idle_or_free = {*server.pool.idle, *server.pool.free}
    assert idle_or_free == {page for page, count in enumerate(users) if not count}


def assert_everything_is_donated(server: Server) -> None:
    given = jax.tree.leaves((server.cache, server.state))
    local_bytes = sum(x.addressable_shards[0].data.nbytes for x in given)
    for program in server.compiled.values():
        assert program.memory_analysis().alias_size_in_bytes >= local_bytes
    server.run_step()
    assert all(x.is_deleted() for x in given)
    server.drain()


def assert_no_host_in_the_step(server: Server) -> None:
    for program in server.compiled.values():
        assert not re.search(r"callback|infeed|outfeed|send-done|recv-done", program.as_text())
    shape, program = next(iter(server.compiled.items()))
    on_host = server.programs.idle_schedule(*shape)
    with jax.transfer_guard("disallow"), pytest.raises(Exception, match="Disallowed"):
        program(server.params, server.cache, server.state, on_host)


def test_compilations_are_counted() -> None:
    with check.counting_compilations() as compiled:
        jax.jit(lambda x: x * 3 + 1)(jnp.ones(7)).block_until_ready()
    assert compiled


def test_too_long_a_request_is_refused() -> None:
    config = model.Config(layers=1, pages=2, slots=1, max_len=256)
    server = Server(config, model.init_params(config), None)
    with pytest.raises(ValueError, match="max_len"):
        server.submit(Request(np.zeros(246, np.int32), 10))


def test_a_request_that_could_never_have_its_pages_is_refused() -> None:
    config = model.Config(layers=1, pages=2, slots=1, max_len=1024)
    server = Server(config, model.init_params(config), None)
    with pytest.raises(ValueError, match="needs 3 pages, the cache has 2"):
        server.submit(Request(np.zeros(243, np.int32), 10))
    server.submit(Request(np.zeros(242, np.int32), 10))  # 256 positions with the drafts
    server._join()
    assert not server.waiting


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--seed", "-1"], "--seed: must be at least 0, got -1"),
        (["--seed", "x"], "--seed: invalid seed value: 'x'"),
        (["--steps", "3"], "--steps: must be more than 3, got 3"),
    ],
)
def test_a_wrong_argument_is_named(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2
    assert words in capsys.readouterr().err


# ---- ahead of time ----


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder of an exported step, and what saving it said."""
    folder = tmp_path_factory.mktemp("step")
    params = model.init_params(CONFIG)
    return folder, aot.save(CONFIG, params, cli.device_mesh(aot.WORLD_SIZE), folder)["saved"]


def test_exported_step_runs_in_a_fresh_process_with_the_same_bits(
    exported: tuple[Path, dict[str, Any]],
) -> None:
    folder, saved = exported
    mesh = cli.device_mesh(aot.WORLD_SIZE)
    assert saved["cpu"]["mosaic_kernels"] == 0
    assert saved["cuda"]["mosaic_kernels"] >= 4  # write, score, select, merge
    command = [sys.executable, EXAMPLES / "serve.py", "--load", folder, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT, check=False)
    assert done.returncode == 0, done.stderr
    loaded = json.loads(done.stdout)
    assert loaded["identical"]
    assert loaded["donated"]
    assert loaded["exported_with_jax"] == jax.__version__
    assert loaded["devices"] == (aot.WORLD_SIZE if mesh is not None else 1)


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def without_magic(data: bytes) -> bytes:
    """The program's own bytes no longer begin as MLIR's do."""
    assert data.count(b"ML\xefR") == 1
    return data.replace(b"ML\xefR", b"MLxR")


def changed_arrays(**changes: Any) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        with np.load(io.BytesIO(data)) as run:
            arrays = {**run} | changes
        buffer = io.BytesIO()
        np.savez(buffer, **{name: value for name, value in arrays.items() if value is not None})
        return buffer.getvalue()

    return change


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        (None, cut, "is no exported step"),
        (None, without_magic, "is no exported step"),
        (None, lambda data: b"", "is no exported step"),
        (aot.RUN, cut, "cannot be read as an .npz file"),
        (aot.RUN, lambda data: b"no file of arrays", "cannot be read as an .npz file"),
        (aot.RUN, changed_arrays(in3=None), "must hold the array in3"),
        (aot.RUN, changed_arrays(out1=None), "must hold the array out1"),
        (aot.RUN, changed_arrays(jax=None), "must hold the array jax"),
        (aot.RUN, changed_arrays(in0=np.zeros(3, np.int32)), "in0 must be"),
        (aot.RUN, changed_arrays(in0=np.array([{}])), "cannot be read .*Object arrays"),
        (aot.RUN, changed_arrays(jax=np.array("0.12")), "jax must be a version's bytes"),
    ],
)
def test_a_damaged_export_is_refused_with_its_reason(
    exported: tuple[Path, dict[str, Any]],
    name: str | None,
    damage: Callable[[bytes], bytes],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(exported[0], folder)
    file = folder / (name or aot.file_of(folder, "cpu").name)
    file.write_bytes(damage(file.read_bytes()))
    assert cli.main(["--load", str(folder)]) == cli.UNUSABLE
    said = capsys.readouterr().err
    assert re.search(message, said)
    assert said.count("\n") == 1


def test_an_export_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def compiled(*_: Any) -> Any:
        raise AssertionError("it came to the work")

    monkeypatch.setattr(aot, "write", compiled)
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/none")):
        assert cli.main(["--export", str(folder)]) == cli.UNUSABLE
        said = capsys.readouterr()
        assert said.out == "" and said.err.count("\n") == 1
        assert f"serve.py: --export {folder} cannot be written: " in said.err


def test_a_disk_that_fills_up_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(aot, "write", full)
    assert cli.main(["--export", str(tmp_path)]) == cli.UNUSABLE
    assert "cannot be written: [Errno 28] No space left" in capsys.readouterr().err


def test_a_step_that_cannot_be_run_is_refused(
    exported: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise jax.errors.JaxRuntimeError("INTERNAL: a compiler's\nreport")

    monkeypatch.setattr(jax_export.Exported, "call", broken)
    with pytest.raises(aot.Unloadable, match=r"cannot be run: INTERNAL: a compiler's report$"):
        aot.load(exported[0], cli.device_mesh)


# ---- the parts ----


def test_attention_never_reads_through_a_minus_one() -> None:
    """Of a cache whose other blocks are NaN, the last one included, only the named two are used."""
    rng = np.random.default_rng(0)
    keys, values = (rng.standard_normal((9, 2, 128, 16)).astype(np.float32) for _ in range(2))
    named = [5, 2]  # the physical places of blocks 0 and 1
    for array in (keys, values):
        array[np.setdiff1d(np.arange(9), named)] = np.nan
    q = rng.standard_normal((1, 2, 3, 16)).astype(np.float32)
    ids = np.full((1, 2, 16), -1, np.int32)
    ids[..., :2] = 0, 1
    blocks = np.array([[*named, 1, 3, 8]], np.int32)
    cache = model.Cache(jnp.zeros(0), jnp.asarray(keys), jnp.asarray(values))
    found = model.attend(jnp.asarray(q), cache, blocks, ids, np.array([199], np.int32))

    own_keys, own_values = (
        np.concatenate(list(array[named]), axis=1)[:, :200] for array in (keys, values)
    )
    scores = np.einsum("hgd,hkd->hgk", q[0].astype(np.float64), own_keys) / 4
    weight = np.exp(scores - scores.max(-1, keepdims=True))
    want = np.einsum("hgk,hkd->hgd", weight / weight.sum(-1, keepdims=True), own_values)
    np.testing.assert_allclose(found[0], want, rtol=1e-4, atol=1e-5)


def test_drafts_are_what_followed_the_last_two_tokens_when_last_seen() -> None:
    known = np.zeros((2, 16), np.int32)
    known[0, :10] = 5, 6, 7, 8, 5, 6, 9, 3, 5, 6
    known[1, :3] = 1, 2, 3  # never seen before: any guess will do
    drafts = jax.jit(model.draft, static_argnums=0)(
        CONFIG, jnp.asarray(known), jnp.array([9, 2], jnp.int32)
    )
    assert drafts[0].tolist() == [9, 3, 5]
    assert drafts.shape == (2, CONFIG.query_len - 1)


@pytest.mark.parametrize(
    ("drafts", "room", "kept"),
    [
        ([11, 12, 13], 9, [11, 12, 13, 14]),
        ([11, 99, 13], 9, [11, 12]),  # a right draft after a wrong one does not count
        ([99, 12, 13], 9, [11]),
        ([11, 12, 13], 2, [11, 12]),  # never past the target
    ],
)
def test_accepts_drafts_up_to_the_first_wrong_one(
    drafts: list[int], room: int, kept: list[int]
) -> None:
    config = model.Config(slots=2, max_len=128)
    length = 5
    state = model.State(
        jnp.zeros((2, 128), jnp.int32),
        jnp.array([3, length], jnp.int32),
        jnp.array([3, length + room], jnp.int32),
        jnp.zeros((2, 1), jnp.int32),
    )
    schedule = model.Schedule(jnp.array([1, -1], jnp.int32), *([jnp.zeros(0, jnp.int32)] * 4))
    rows = jax.jit(model.decode_rows, static_argnums=0)(config, state, schedule.decode_slots)
    assert rows.positions.tolist() == [4, 5, 6, 7, -1, -1, -1, -1]
    rows = rows._replace(tokens=jnp.array([10, *drafts, 0, 0, 0, 0], jnp.int32))
    best = jnp.array([11, 12, 13, 14, 1, 1, 1, 1], jnp.int32)
    decoded, after = jax.jit(model.accept, static_argnums=0)(config, state, schedule, rows, best)
    padded = kept + [-1] * (4 - len(kept))
    assert decoded.tolist() == [padded, [-1] * 4]
    assert after.lengths.tolist() == [3, length + len(kept)]
    assert after.tokens[1, length : length + len(kept)].tolist() == kept
    assert int(jnp.count_nonzero(after.tokens)) == len(kept)


def test_window_rows_follow_their_segments() -> None:
    config = model.Config(slots=3, max_len=128, chunk=8)
    tokens = jnp.arange(3 * 128, dtype=jnp.int32).reshape(3, 128)
    state = model.State(tokens, *(jnp.zeros(3, jnp.int32),) * 2, jnp.zeros((3, 1), jnp.int32))
    pair = [jnp.array(values, jnp.int32) for values in ([2, 0], [10, 0], [3, 2], [1, 0])]
    schedule = model.Schedule(jnp.zeros(0, jnp.int32), *pair)
    rows = jax.jit(model.prefill_rows, static_argnums=0)(config, state, schedule)
    assert rows.positions.tolist() == [10, 11, 12, 0, 1, -1, -1, -1]
    assert rows.tokens[:5].tolist() == [266, 267, 268, 0, 1]
    assert rows.slots[:5].tolist() == [2, 2, 2, 0, 0]


def test_quantized_scores_are_exact_in_float32() -> None:
    x = jnp.linspace(-500, 500, 4001)
    values = np.asarray(model.quantize(x)).astype(np.float64)
    np.testing.assert_array_equal(values, np.round(values))
    assert np.abs(values).max() ** 2 * model.INDEX_DIM <= EXACT_IN_FLOAT32


def test_reference_ids_by_hand() -> None:
    """20 blocks, scores by block 0..19 but block 3 the best; the last block is forced."""
    config = model.Config(max_len=2560)
    scores = np.repeat(np.arange(20.0), model.BLOCK).astype(np.float32)
    scores[3 * model.BLOCK + 5] = 100
    scores[19 * model.BLOCK :] = -7
    plane = jnp.broadcast_to(scores, (3, 4, 2560))
    positions = jnp.array([2559, 300, -1], jnp.int32)
    ids = np.asarray(jax.jit(top_blocks, static_argnums=2)(plane, positions, config))
    assert ids[0, 0].tolist() == [3, *range(5, 20)]
    assert ids[1, 2].tolist() == [0, 1, 2] + [-1] * 13
    assert ids[2, 3].tolist() == [-1] * 16


def test_reference_scores_each_window_row_against_its_own_segment() -> None:
    rng = np.random.default_rng(0)
    q = model.quantize(jnp.asarray(rng.standard_normal((6, 4, 128)) * 4))
    keys = model.quantize(jnp.asarray(rng.standard_normal((2, 256, 128)) * 4))
    scores = DenseIndexer(CONFIG)._window_scores(q, keys, jnp.array([4, 2], jnp.int32))
    for row, segment in enumerate([0, 0, 0, 0, 1, 1]):
        wanted = np.asarray(q, np.float64)[row] @ np.asarray(keys, np.float64)[segment].T
        np.testing.assert_array_equal(scores[row], wanted)


# ---- pages ----


def prompt_of(*pages: int, tail: int = 5) -> np.ndarray:
    """A prompt of whole 128-token pages, each of one token, and a tail."""
    return np.array([token for page in pages for token in [page] * 128] + [0] * tail, np.int32)


def test_pages_of_a_common_beginning_are_shared() -> None:
    pool = PagePool(8, 128)
    one = prompt_of(1, 2)
    pages, found = pool.take(one, 300)
    assert (len(set(pages)), found) == (3, 0)
    for number in range(2):
        pool.publish(one, number, pages[number])
    others, found = pool.take(prompt_of(1, 3), 300)
    assert found == 1
    assert others[0] == pages[0]
    assert not set(others[1:]) & set(pages)


def test_the_last_prompt_token_is_never_reused() -> None:
    pool = PagePool(8, 128)
    prompt = prompt_of(1, 2, tail=0)
    pages, _ = pool.take(prompt, 300)
    for number in range(2):
        pool.publish(prompt, number, pages[number])
    assert pool.take(prompt, 300)[1] == 1


def test_idle_pages_are_found_again_and_evicted_oldest_first() -> None:
    pool = PagePool(4, 128)
    old, new = prompt_of(1), prompt_of(2)
    for prompt in (old, new):
        pages, _ = pool.take(prompt, 140)
        pool.publish(prompt, 0, pages[0])
        pool.give_back(pages)
    assert (
        pool.take(prompt_of(3), 300)[1] == 0
    )  # three pages: the two free ones and the oldest idle
    assert pool.take(new, 128)[1] == 1
    assert pool.take(old, 128) is None


def test_pages_in_use_are_never_given_away() -> None:
    pool = PagePool(2, 128)
    pages, _ = pool.take(prompt_of(1), 256)
    pool.publish(prompt_of(1), 0, pages[0])
    assert pool.take(prompt_of(2), 100) is None
    pool.give_back(pages)
    assert sorted(pool.take(prompt_of(2), 256)[0]) == [0, 1]


def test_a_one_sided_step_lowers_with_its_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels take the addresses that the cache brings, and no row goes by a collective."""
    library = fake_cuda.install(monkeypatch)
    config = dataclasses.replace(CONFIG, layers=2)
    params = model.init_params(config)
    server = Server(config, params, 2, cli.device_mesh(2), "mosaic", "one-sided")
    assert len(library.live) == 2 and server.cache.exchange
    schedule = server.programs.put(server.programs.idle_schedule(2, 0))
    step = server.programs.step.trace(server.params, server.cache, server.state, schedule)
    text = step.lower(lowering_platforms=("cuda",)).as_text()
    assert "all_to_all" not in text and "select_and_publish_tagged_rows" in text
