"""The torch plan behind an indexer class as vLLM's MiniMax-M3 has it.

    torchrun --nproc-per-node=2 examples/torch_vllm_indexer.py

runs a server's steps on the CPU over gloo, or with one GPU a process over NCCL, and compares all
ids with those of a rank that holds every key. vLLM is not needed: what the adapter takes from it
(`Metadata` and its parts, whose fields have vLLM's names) is declared here. Steps are as vLLM makes
them: decode tokens first, `decode_query_len` of each request, then the prefill requests' tokens.

To put it into vLLM:

- `IcpIndexer` takes the place of the indexer's kernel class (`MiniMaxM3IndexerImpl`), a layer each;
  `Shared` is made once, and its `begin_step` is called where the indexer's metadata is built.
- The projection of the index queries is replicated: each rank needs all four heads, where vLLM
  gives it those of its KV heads. What comes back are the ids of its own heads, as there.
- The indexer's cache holds a rank's rows of every page, so the spec that asks for its memory counts
  `page_size / W` rows of 128 bytes a page. Tables and slots stay as they are.
- `insert` takes the place of the store that vLLM fuses into the norms and the rotation.
- Keys are float8 here. For bfloat16 keys, vLLM's default: `index_dtype="bfloat16"`, buffers and
  cache of torch.bfloat16, `x.to(torch.bfloat16)` for `msa_icp_quantize_index`, rows of 256 bytes.
- Under full CUDA graphs a slot is fixed when it is captured: the number of sparse layers must be a
  multiple of 3 then (57 in MiniMax-M3).
"""

# First: it keeps JAX from taking the GPU's memory before torch asks for any.
import msa_icp_torch  # isort: skip

import dataclasses
import os
from typing import Any

import torch
import torch.distributed as dist

from msa_icp_torch import msa_icp_quantize_index

HEADS, DIM, BLOCK, TOPK = 4, 128, 128, 16


# ---- what vLLM hands over ----


@dataclasses.dataclass
class Prefill:
    """Requests with more tokens than a decode has, behind the decodes."""

    cu_seqlens_q: torch.Tensor  # int32 [requests + 1], from 0
    seq_lens: torch.Tensor  # int32 [requests], keys with this step's
    context_lens: torch.Tensor  # int32 [requests], keys before this step's
    block_table: torch.Tensor  # int32 [requests, width]


@dataclasses.dataclass
class Decode:
    """Requests with the same few tokens each."""

    seq_lens: torch.Tensor  # int32 [requests], 0 for graph padding
    block_table: torch.Tensor  # int32 [requests, width]
    decode_query_len: int


@dataclasses.dataclass
class Metadata:
    """One step, for all layers."""

    slot_mapping: torch.Tensor  # int64 [tokens], page * page_size + row, -1 for padding
    num_actual_tokens: int
    num_decode_tokens: int
    prefill: Prefill | None = None
    decode: Decode | None = None


# ---- the adapter ----


class Window:
    """A part of a step's prefill tokens, padded to one size: other sizes are other programs."""

    def __init__(self, plan: Any, prefill: Prefill, start: int) -> None:
        """Plans the tokens from `start` on, without a look at device values."""
        sizes = plan.geometry
        rows, segments = plan.prefill_window_tokens(), sizes.max_num_seqs
        end, starts = start + rows, prefill.cu_seqlens_q
        first, last = starts[:-1].clamp(start, end), starts[1:].clamp(start, end)
        offset = prefill.context_lens + first - starts[:-1]
        empty = segments - len(offset)
        lengths = [
            torch.nn.functional.pad(x, (0, empty)) for x in (last - first, prefill.seq_lens, offset)
        ]
        self.tokens = slice(start, end)
        self.block_table = torch.nn.functional.pad(prefill.block_table, (0, 0, 0, empty))
        self.plan = plan.prefill_window_plan(
            *lengths, total_q=rows, max_query_len=rows, max_seq_len=sizes.max_model_len
        )
        row = torch.arange(start, end, device=starts.device)[:, None]
        own = (row >= first) & (row < last)
        position = (row - first + offset).where(own, -1).amax(-1)
        self.num_valid_pages = (position // BLOCK + 1).to(torch.int32)  # blocks, 0 for padding


class Shared:
    """What all layers use: the plan, storage and scratch, and what a step makes once."""

    def __init__(self, plan: Any, device: torch.device, max_num_batched_tokens: int) -> None:
        """Allocates everything, for steps of so many tokens; the other sizes are the plan's."""
        sizes, rows = plan.geometry, plan.prefill_window_tokens()
        heads, ranks = sizes.heads_per_rank, sizes.world_size

        def buffer(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.plan, self.comm, self.calls = plan, plan.init_comm(), 0
        self.scores = buffer(*plan.decode_score_shape(), dtype=torch.float32)
        self.scratch = buffer(*plan.prefill_score_shape(), dtype=torch.float32)
        self.query = buffer(rows, HEADS, DIM, dtype=torch.uint8).view(torch.float8_e4m3fn)
        self.carrier = buffer(HEADS, rows, 33)
        self.received = buffer(ranks, heads, rows, 33)
        self.window_ids = buffer(rows, heads, TOPK)
        # vLLM's topk_indices_buffer: one for all layers, at an address that stays.
        self.ids = buffer(max_num_batched_tokens, heads, TOPK)

    def begin_step(self, metadata: Metadata) -> None:
        """Makes what the step's layers share; call it before the first."""
        self.windows = []
        if metadata.decode is not None:
            decode = metadata.decode
            back = torch.arange(-decode.decode_query_len, 0, device=self.ids.device)
            position = decode.seq_lens[:, None] + back
            blocks = (position.clamp(min=-1) // BLOCK + 1).where(decode.seq_lens[:, None] > 0, 0)
            self.decode_blocks = blocks.flatten().to(torch.int32)
        if metadata.prefill is not None:
            tokens = metadata.num_actual_tokens - metadata.num_decode_tokens
            starts = range(0, tokens, self.plan.prefill_window_tokens())
            self.windows = [Window(self.plan, metadata.prefill, start) for start in starts]


class IcpIndexer(torch.nn.Module):
    """A sparse layer's indexer."""

    def __init__(self, shared: Shared, kv_cache: torch.Tensor) -> None:
        """`kv_cache` is float8 [pages, page_size / W, 128], this rank's rows of every page."""
        super().__init__()
        self.shared, self.kv_cache = shared, kv_cache

    def insert(self, index_key: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Stores the step's index keys [tokens, 128] where their rows are this rank's."""
        sizes, rank = self.shared.plan.geometry, self.shared.plan.rank
        rows = sizes.rows_per_page
        page, row = slot_mapping // sizes.page_size, slot_mapping % sizes.page_size - rank * rows
        own = (slot_mapping >= 0) & (row >= 0) & (row < rows)
        keys = msa_icp_quantize_index(index_key).view(torch.uint8)
        self.kv_cache.view(torch.uint8)[page[own], row[own]] = keys[own]

    def forward(
        self, index_query: torch.Tensor, metadata: Metadata
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The blocks of decode and of prefill tokens, int32 [own heads, tokens, 16] each.

        Args:
          index_query: [tokens, 4 * 128], normed and rotated, the same on every rank.
          metadata: the step, which `Shared.begin_step` has seen.
        """
        shared, decodes = self.shared, metadata.num_decode_tokens
        tokens = metadata.num_actual_tokens
        query = msa_icp_quantize_index(index_query[:tokens].view(-1, HEADS, DIM))
        ids = shared.ids[:tokens]
        if metadata.decode is not None:
            self._decode(query[:decodes], metadata.decode, ids[:decodes])
        for window in shared.windows:
            self._prefill(query[decodes:][window.tokens], window, ids[decodes:][window.tokens])
        found = ids.transpose(0, 1)
        return (
            found[:, :decodes] if metadata.decode is not None else None,
            found[:, decodes:] if metadata.prefill is not None else None,
        )

    def _decode(self, query: torch.Tensor, decode: Decode, ids: torch.Tensor) -> None:
        shared = self.shared
        shared.plan.decode(
            query,
            self.kv_cache,
            decode.block_table,
            decode.seq_lens,
            shared.decode_blocks,
            shared.scores,
            ids,
            comm=shared.comm,
            slot=shared.calls,
            tagged=True,
            decode_query_len=decode.decode_query_len,
        )
        shared.calls += 1

    def _prefill(self, query: torch.Tensor, window: Window, ids: torch.Tensor) -> None:
        shared, plan, blocks = self.shared, self.shared.plan, window.num_valid_pages
        shared.query.view(torch.uint8)[: len(query)] = query.view(torch.uint8)
        plan.prefill_local(
            shared.query,
            self.kv_cache,
            window.block_table,
            window.plan,
            shared.scratch,
            blocks,
            shared.carrier,
        )
        plan.prefill_exchange(shared.carrier, shared.received)
        plan.prefill_merge(shared.received, blocks, shared.window_ids)
        ids.copy_(shared.window_ids[: len(ids)])


# ---- a server in its place ----

PAGE_SIZE, PAGES, LAYERS, WIDTH = 128, 96, 3, 40
MAX_NUM_BATCHED_TOKENS = 512  # of a step; its prefill tokens go in windows of half as many
LIMITS: dict[str, Any] = {  # docs/serving.md, "Choosing sizes"
    "num_index_heads": HEADS,
    "page_size": PAGE_SIZE,
    "init_blocks": 0,
    "local_blocks": 1,
    "max_decode_tokens": 6,
    "max_decode_query_len": 3,
    "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS // 2,
    "max_num_seqs": 3,
    "max_model_len": WIDTH * PAGE_SIZE,
    "num_sparse_layers": LAYERS,
}


class Requests:
    """Made-up requests: pages, lengths, and every index key, as no rank has them."""

    def __init__(self, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)
        self.device, self.generator = device, generator
        pages = torch.randperm(PAGES, generator=generator)
        # Requests 0 and 1 decode, 2 and 3 come in later.
        self.block_table = torch.nn.functional.pad(pages.view(4, -1), (0, WIDTH - PAGES // 4))
        self.lens = torch.tensor([2900, 130, 0, 0])
        self.keys = self.integers(4, LAYERS, PAGES // 4 * PAGE_SIZE, DIM, high=4)

    def integers(self, *shape: int, high: int) -> torch.Tensor:
        """Whole numbers, whose sums are exact: then every way to add gives the same ids."""
        return torch.randint(-high, high + 1, shape, generator=self.generator).float()

    def slots(self, request: int, positions: torch.Tensor) -> torch.Tensor:
        """Where the keys at these positions lie in the cache."""
        page = self.block_table[request, positions // PAGE_SIZE]
        return page * PAGE_SIZE + positions % PAGE_SIZE

    def step(self, query_len: int, chunks: dict[int, int]) -> tuple[Metadata, list[Any], Any]:
        """Metadata, the tokens as (request, position), and queries of every layer."""
        new = {0: query_len, 1: query_len} | chunks
        before = self.lens.clone()
        for request, tokens in new.items():
            self.lens[request] += tokens
        places = [(r, int(before[r]) + i) for r, tokens in new.items() for i in range(tokens)]
        mapping = [self.slots(r, torch.tensor(position)) for r, position in places]

        def on_device(x: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.as_tensor(x).to(self.device, dtype)

        prefill = None
        if chunks:
            late = list(chunks)
            prefill = Prefill(
                on_device([0, *torch.tensor(list(chunks.values())).cumsum(0).tolist()]),
                on_device(self.lens[late]),
                on_device(before[late]),
                on_device(self.block_table[late]),
            )
        decode = Decode(on_device(self.lens[:2]), on_device(self.block_table[:2]), query_len)
        metadata = Metadata(
            on_device(torch.stack(mapping), torch.int64),
            len(places),
            2 * query_len,
            prefill,
            decode,
        )
        return metadata, places, self.integers(LAYERS, len(places), HEADS * DIM, high=3)

    def best_blocks(self, layer: int, place: tuple[int, int], query: torch.Tensor) -> list[int]:
        """The answer of a rank that has every key, for one head [128] of a token."""
        request, position = place
        products = self.keys[request, layer, : position + 1] @ query
        blocks = position // BLOCK + 1
        scores = torch.full((blocks * BLOCK,), -torch.inf)
        scores[: position + 1] = products
        best = scores.view(blocks, BLOCK).amax(-1)
        best[-1] = torch.inf  # local_blocks
        found = best.sort(descending=True, stable=True).indices[:TOPK].sort().values
        return torch.nn.functional.pad(found, (0, TOPK - len(found)), value=-1).tolist()


def main() -> None:
    """Serves three steps and checks every id."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    world_size, rank = dist.get_world_size(), dist.get_rank()
    plan = msa_icp_torch.prepare_msa_icp_indexer(
        world_size=world_size, rank=rank, device=device, **LIMITS
    )
    shared, requests = Shared(plan, device, MAX_NUM_BATCHED_TOKENS), Requests(device)
    shape = (PAGES, plan.geometry.rows_per_page, DIM)
    caches = torch.zeros(LAYERS, *shape, dtype=torch.uint8, device=device)
    layers = [IcpIndexer(shared, cache) for cache in caches.view(torch.float8_e4m3fn)]
    plan.warmup(layers[0].kv_cache, table_width=WIDTH, batch_sizes=[2], query_lens=[1, 3])
    for request in (0, 1):  # their keys from earlier steps
        positions = torch.arange(int(requests.lens[request]))
        slots = requests.slots(request, positions).to(device)
        for number, layer in enumerate(layers):
            layer.insert(requests.keys[request, number, positions].to(device), slots)

    heads = plan.geometry.heads_per_rank
    wrong = checked = 0
    # Decode alone, with two drafts each; beside chunks of two prompts; beside the rest of them.
    for query_len, chunks in ((3, {}), (1, {2: 200, 3: 100}), (1, {2: 150, 3: 1})):
        metadata, places, queries = requests.step(query_len, chunks)
        shared.begin_step(metadata)
        for number, layer in enumerate(layers):
            keys = torch.stack([requests.keys[r, number, position] for r, position in places])
            layer.insert(keys.to(device), metadata.slot_mapping)
            found = layer(queries[number].to(device), metadata)
            ids = torch.cat([x for x in found if x is not None], dim=1).cpu()
            for token, place in enumerate(places):
                query = queries[number, token].view(HEADS, DIM)
                for head in range(heads):
                    want = requests.best_blocks(number, place, query[rank * heads + head])
                    wrong += ids[head, token].tolist() != want
                    checked += 1
    totals = torch.tensor([checked, wrong, int(shared.comm.errors[0])], device=device)
    dist.all_reduce(totals)
    if rank == 0:
        checked, wrong, faults = totals.tolist()
        print(f"{checked} rows of ids, {wrong} wrong, {faults} protocol faults")
    dist.destroy_process_group()
    if totals[1:].any():
        raise SystemExit(1)


if __name__ == "__main__":
    main()
