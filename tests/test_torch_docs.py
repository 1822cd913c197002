"""The lines of docs/torch.md that a server copies, and the reference of msa_icp_torch."""

from __future__ import annotations

import re
from pathlib import Path

import docstrings
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (extra torch)")

import msa_icp_torch  # noqa: E402

DOCS = Path(__file__).parent.parent / "docs" / "torch.md"


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("page_size", [128, 256])
def test_new_index_keys_are_stored_by_the_ranks_that_own_their_rows(world_size, page_size):
    snippet = next(x for x in re.findall(r"```py\n(.*?)```", DOCS.read_text(), re.S) if "own" in x)
    rng = np.random.default_rng(0)
    pages, tokens = 5, 300
    slots = rng.permutation(pages * page_size)[:tokens]
    slots[::7] = -1
    keys = rng.integers(0, 256, (tokens, 128), dtype=np.uint8)
    whole = np.full((pages * page_size, 128), 9, np.uint8)
    whole[slots[slots >= 0]] = keys[slots >= 0]
    shards = []
    for rank in range(world_size):
        memory = torch.full((pages, page_size // world_size, 128), 9, dtype=torch.uint8)
        names = {
            "torch": torch,
            "page_size": page_size,
            "world_size": world_size,
            "rank": rank,
            "slots": torch.from_numpy(slots),
            "keys": torch.from_numpy(keys).view(torch.float8_e4m3fn),
            "index_k": memory.view(torch.float8_e4m3fn),
        }
        exec(snippet, names)
        shards.append(memory.numpy())
    np.testing.assert_array_equal(np.concatenate(shards, axis=1).reshape(whole.shape), whole)


def test_the_reference_has_every_public_name(tmp_path):
    said = docstrings.build_reference(tmp_path)
    assert "msa_icp_jax, msa_icp_jax.typing, msa_icp_torch is in" in said
    named = docstrings.named_on(tmp_path / "msa_icp_torch.html")
    public = dict(docstrings.public_names(msa_icp_torch))
    assert set(public) - named == set()
    assert [x for name, member in public.items() for x in docstrings.missing(name, member)] == []
