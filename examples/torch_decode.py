"""Decode on torch tensors in one process: a group of two ranks, taken in turn by hand.

A server has one process a rank and calls `plan.decode` (see torch_group.py). Here the prefill parts
are called one after the other, so that the exchange between them is a plain torch copy.

    python examples/torch_decode.py
"""

# First: it keeps JAX from taking the GPU's memory before torch asks for any.
import msa_icp_torch  # isort: skip

import torch

WORLD_SIZE, PAGE_SIZE, CONTEXT, PAGES = 2, 128, 4096, 64
ROWS = PAGE_SIZE // WORLD_SIZE
FLOAT8 = torch.float8_e4m3fn


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    plans = [
        msa_icp_torch.prepare_msa_icp_indexer(
            world_size=WORLD_SIZE,
            rank=rank,
            num_index_heads=4,
            page_size=PAGE_SIZE,
            init_blocks=0,
            local_blocks=1,
            max_decode_tokens=8,
            max_decode_query_len=1,
            max_num_batched_tokens=8,
            max_num_seqs=2,
            max_model_len=CONTEXT,
            num_sparse_layers=2,
            device=device,
        )
        for rank in range(WORLD_SIZE)
    ]

    # Two requests, one new token each, as segments of one query token at the end of a context.
    seq_lens = torch.tensor([4096, 700], dtype=torch.int32, device=device)
    query = torch.randn(2, 4, 128, device=device).to(FLOAT8)
    block_table = torch.randperm(PAGES, device=device).to(torch.int32).view(2, -1)
    num_valid_pages = (seq_lens - 1) // 128 + 1  # visible blocks, despite the name
    caches = [torch.randn(PAGES, ROWS, 128, device=device).to(FLOAT8) for _ in plans]

    carriers = [torch.empty(4, 2, 33, dtype=torch.int32, device=device) for _ in plans]
    for plan, index_k, carrier in zip(plans, caches, carriers, strict=True):
        window = plan.prefill_window_plan(
            torch.ones_like(seq_lens),
            seq_lens,
            seq_lens - 1,
            total_q=2,
            max_query_len=1,
            max_seq_len=CONTEXT,
        )
        scratch = torch.empty(
            2, *plan.prefill_score_shape()[1:], dtype=torch.float32, device=device
        )
        plan.prefill_local(query, index_k, block_table, window, scratch, num_valid_pages, carrier)

    heads = plans[0].geometry.heads_per_rank
    for plan in plans:
        owned = slice(plan.rank * heads, (plan.rank + 1) * heads)
        received = torch.stack([carrier[owned] for carrier in carriers])
        output = torch.empty(2, heads, 16, dtype=torch.int32, device=device)
        plan.prefill_merge(received, num_valid_pages, output)
        for request, ids in enumerate(output[:, 0].tolist()):
            print(f"head {plan.rank * heads}, request {request}: blocks {ids}")


if __name__ == "__main__":
    main()
