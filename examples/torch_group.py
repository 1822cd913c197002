"""Decode on torch tensors, one process a rank.

    torchrun --nproc-per-node=2 examples/torch_group.py

runs on the CPU over gloo, or with one GPU a process over NCCL.
"""

# First: it keeps JAX from taking the GPU's memory before torch asks for any.
import msa_icp_torch  # isort: skip

import os

import torch
import torch.distributed as dist

PAGE_SIZE, CONTEXT, PAGES, REQUESTS, LAYERS, STEPS = 128, 8192, 256, 4, 3, 2
FLOAT8 = torch.float8_e4m3fn


def main() -> None:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    world_size, rank = dist.get_world_size(), dist.get_rank()

    plan = msa_icp_torch.prepare_msa_icp_indexer(
        world_size=world_size,
        rank=rank,
        num_index_heads=4,
        page_size=PAGE_SIZE,
        init_blocks=0,
        local_blocks=1,
        max_decode_tokens=REQUESTS,
        max_decode_query_len=1,
        max_num_batched_tokens=1024,
        max_num_seqs=REQUESTS,
        max_model_len=CONTEXT,
        num_sparse_layers=LAYERS,
        device=device,
    )
    comm = plan.init_comm()  # once, for all layers and steps
    scores = torch.empty(plan.decode_score_shape(), dtype=torch.float32, device=device)
    output = torch.empty(
        REQUESTS, plan.geometry.heads_per_rank, 16, dtype=torch.int32, device=device
    )

    # Queries, tables and lengths are the same on every rank, the keys are each rank's own rows.
    shared = torch.Generator().manual_seed(0)
    own = torch.Generator().manual_seed(1 + rank)
    rows = plan.geometry.rows_per_page
    caches = [
        torch.randn(PAGES, rows, 128, generator=own).to(device, FLOAT8) for _ in range(LAYERS)
    ]
    plan.warmup(caches[0], table_width=PAGES // REQUESTS, batch_sizes=[REQUESTS], query_lens=[1])
    table = torch.randperm(PAGES, generator=shared).to(device, torch.int32).view(REQUESTS, -1)
    seq_lens = torch.tensor([8000, 0, 130, 4096], dtype=torch.int32, device=device)

    calls = 0
    for _ in range(STEPS):
        seq_lens += seq_lens > 0  # a new token for every request; 0 is graph padding
        num_valid_pages = (seq_lens + 127) // 128  # visible blocks, despite the name
        for index_k in caches:
            query = torch.randn(REQUESTS, 4, 128, generator=shared).to(device, FLOAT8)
            plan.decode(
                query,
                index_k,
                table,
                seq_lens,
                num_valid_pages,
                scores,
                output,
                comm=comm,
                slot=calls,
                tagged=True,
                decode_query_len=1,
            )
            calls += 1

    for turn in range(world_size):
        if turn == rank:
            heads = plan.geometry.heads_per_rank
            for head, ids in enumerate(output[0].tolist(), start=rank * heads):
                print(f"request 0, head {head}: blocks {ids}", flush=True)
        dist.barrier()
    faults = comm.errors[0].clone()
    dist.all_reduce(faults)
    if rank == 0:
        print("no protocol faults" if faults.item() == 0 else f"{faults.item()} protocol faults")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
