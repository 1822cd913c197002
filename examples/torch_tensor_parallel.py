"""The indexer inside tensor parallelism of 8, one process a rank: two ICP groups of four.

    torchrun --nproc-per-node=8 examples/torch_tensor_parallel.py

runs on the CPU over gloo, or with one GPU a process over NCCL. The model has 4 KV heads, so at TP 8
ranks 2 h and 2 h + 1 share KV head h, each with half of its query heads. They belong to different
ICP groups: ranks 0, 2, 4, 6 are one and 1, 3, 5, 7 the other, and rank r is rank r // 2 of its own.
Then the index head whose blocks a rank is given is that of its KV head; no block id travels.
"""

# First: it keeps JAX from taking the GPU's memory before torch asks for any.
import msa_icp_torch  # isort: skip

import os

import torch
import torch.distributed as dist

from msa_icp_torch import msa_icp_quantize_index

TENSOR_PARALLEL, KV_HEADS = 8, 4
PAGE_SIZE, PAGES, REQUESTS = 128, 24, 2  # pages of a request
CONTEXT, ROWS = PAGES * PAGE_SIZE, PAGE_SIZE // KV_HEADS


def icp_group(rank: int) -> tuple[int, dist.ProcessGroup]:
    """This rank's place in its ICP group, and the group."""
    per_head = TENSOR_PARALLEL // KV_HEADS  # ranks that share a KV head, each of another group
    members = [list(range(first, TENSOR_PARALLEL, per_head)) for first in range(per_head)]
    groups = [dist.new_group(ranks) for ranks in members]  # every rank makes every group
    place, group = divmod(rank, per_head)
    return place, groups[group]


def best_blocks(index_q: torch.Tensor, keys: torch.Tensor, seq_lens: torch.Tensor) -> torch.Tensor:
    """Ids [B, 16] of one rank that holds every key, [B, CONTEXT, 128], for one head [B, 128]."""
    products = torch.einsum("bd,bkd->bk", index_q.double(), keys.double())
    position = torch.arange(CONTEXT, device=keys.device)
    products = products.where(position < seq_lens[:, None], -torch.inf)
    scores = products.view(REQUESTS, -1, 128).amax(-1)
    scores[range(REQUESTS), (seq_lens.long() - 1) // 128] = torch.inf  # the query's own block
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :16].sort(-1).values


def main() -> None:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    if dist.get_world_size() != TENSOR_PARALLEL:
        raise SystemExit(f"needs {TENSOR_PARALLEL} processes, got {dist.get_world_size()}")
    rank = dist.get_rank()
    head, group = icp_group(rank)

    plan = msa_icp_torch.prepare_msa_icp_indexer(
        world_size=KV_HEADS,
        rank=head,
        num_index_heads=KV_HEADS,
        page_size=PAGE_SIZE,
        init_blocks=0,
        local_blocks=1,
        max_decode_tokens=REQUESTS,
        max_decode_query_len=1,
        max_num_batched_tokens=REQUESTS,
        max_num_seqs=REQUESTS,
        max_model_len=CONTEXT,
        num_sparse_layers=57,
        device=device,
        group=group,
    )
    comm = plan.init_comm()  # once, for all layers and steps
    scores = torch.empty(plan.decode_score_shape(), dtype=torch.float32, device=device)
    output = torch.empty(REQUESTS, 1, 16, dtype=torch.int32, device=device)

    # All ranks draw the same vectors; each keeps its own rows of every page.
    torch.manual_seed(0)
    keys = msa_icp_quantize_index(torch.randn(REQUESTS, CONTEXT, 128)).to(device)
    index_q = msa_icp_quantize_index(torch.randn(REQUESTS, KV_HEADS, 128)).to(device)
    block_table = torch.randperm(REQUESTS * PAGES).view(REQUESTS, PAGES).to(device, torch.int32)
    seq_lens = torch.tensor([CONTEXT, CONTEXT - 1000], dtype=torch.int32, device=device)
    num_valid_pages = (seq_lens + 127) // 128  # visible blocks, despite the name
    mine = keys.view(torch.uint8).view(REQUESTS, PAGES, KV_HEADS, ROWS, 128)[:, :, head]
    index_k = torch.empty(REQUESTS * PAGES, ROWS, 128, dtype=keys.dtype, device=device)
    index_k.view(torch.uint8)[block_table.long()] = mine

    plan.warmup(index_k, table_width=PAGES, batch_sizes=[REQUESTS], query_lens=[1], prefill=False)
    plan.decode(
        index_q,
        index_k,
        block_table,
        seq_lens,
        num_valid_pages,
        scores,
        output,
        comm=comm,
        slot=0,
        tagged=True,
        decode_query_len=1,
    )

    differs = (output[:, 0] != best_blocks(index_q[:, head], keys, seq_lens)).any()
    wrong = torch.tensor([int(differs) + comm.errors.item()], device=device)
    dist.all_reduce(wrong)
    if rank == 0:
        print("wrong" if wrong.item() else f"ids of {TENSOR_PARALLEL} ranks equal one rank's")
    dist.destroy_process_group()
    if wrong.item():
        raise SystemExit(1)


if __name__ == "__main__":
    main()
