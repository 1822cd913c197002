"""What compiles on the GPU: nothing after warmup, nothing in a second process with a cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import chains
import jax
import numpy as np
from chains import Ranks, random_decode, random_prefill
from inputs import TIME_LIMIT
from test_compilations import compile_log


def test_nothing_compiles_after_warmup():
    """A call after warmup finds its program ready; values, lengths and slots change nothing."""
    plan = chains.make_plan(4, 128, backend="auto", max_num_batched_tokens=160, max_num_seqs=3)
    assert plan.backend == "mosaic"
    ranks = Ranks(plan, None)
    plan.warmup(num_pages=64, table_width=36, batch_sizes=[3], query_lens=[2])
    case = random_decode([2400, 300, 0], 2, 128)
    other = random_decode([1, 2303, 700], 2, 128)
    window = random_prefill([(100, 0, 100), (0, 0, 0), (30, 2500, 2530)], 160, 128)
    decodes = [ranks.decode_arrays(x, spare=0) for x in (case, other)]
    prefill = ranks.prefill_arrays(window, spare=0)
    jax.block_until_ready((decodes, prefill))
    with compile_log() as log:
        for arrays in decodes:
            jax.block_until_ready(plan.decode_program(None, decode_query_len=2)(*arrays))
        jax.block_until_ready(plan.prefill_program(None)(*prefill))
    assert log.compiled == []


_SCRIPT = """
import hashlib, json, sys
import jax
from jax._src import monitoring
import numpy as np
import chains
from chains import Ranks, random_decode

counts = {"hits": 0, "misses": 0}
def count(event, **_):
    if event.endswith("/cache_hits"):
        counts["hits"] += 1
    if event.endswith("/cache_misses"):
        counts["misses"] += 1
monitoring.register_event_listener(count)
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
ranks = Ranks(chains.make_plan(4, 128, backend="auto"), None)
case = random_decode([300, 0, 4000, 1], 2, 128)
arrays = ranks.decode_arrays(case)
jax.block_until_ready(arrays)
counts.update(hits=0, misses=0)
output, scores = ranks.plan.decode_program(None, decode_query_len=2)(*arrays)
digest = hashlib.sha256(np.asarray(output).tobytes() + np.asarray(scores).tobytes())
print(json.dumps({**counts, "digest": digest.hexdigest()}))
"""


def test_second_process_takes_the_kernels_from_the_persistent_cache(tmp_path: Path):
    """A chain of Mosaic kernels is stored, found again, and gives the same bits."""
    runs = []
    for _ in range(2):
        result = subprocess.run(
            [sys.executable, "-c", _SCRIPT, str(tmp_path)],
            cwd=Path(__file__).parents[1],
            env={
                **os.environ,
                "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
                "PYTHONPATH": os.pathsep.join(sys.path),
            },
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        runs.append(json.loads(result.stdout.splitlines()[-1]))
    first, second = runs
    assert first["misses"] >= 1 and first["hits"] == 0
    assert second["misses"] == 0 and second["hits"] == first["misses"]
    assert np.unique([run["digest"] for run in runs]).size == 1
