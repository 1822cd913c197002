"""Decode in CUDA graphs: two ranks that share one GPU, with the one-sided exchange between them.

    python examples/torch_graph.py

needs a Hopper GPU. Every rank has a stream and a graph of all its layers; a replay costs the host
a few microseconds. With a GPU for each rank the only difference is where the receive storage lies:
see "One-sided exchange" in docs/torch.md.
"""

# First: it keeps JAX from taking the GPU's memory before torch asks for any.
import msa_icp_torch  # isort: skip

import sys

import torch

WORLD_SIZE, PAGE_SIZE, CONTEXT, PAGES, REQUESTS, LAYERS, STEPS = 2, 128, 8192, 256, 4, 6, 5
ROWS = PAGE_SIZE // WORLD_SIZE
FLOAT8 = torch.float8_e4m3fn


class Rank:
    """One rank's plan, caches and buffers; queries, tables and lengths are the same on all."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self.plan = msa_icp_torch.prepare_msa_icp_indexer(
            world_size=WORLD_SIZE,
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
            route="direct",
        )
        self.comm = self.plan.init_comm()
        self.caches = [
            torch.randn(PAGES, ROWS, 128, device=device).to(FLOAT8) for _ in range(LAYERS)
        ]
        self.scores = torch.empty(
            self.plan.decode_score_shape(), dtype=torch.float32, device=device
        )
        heads = self.plan.geometry.heads_per_rank
        self.outputs = torch.empty(LAYERS, REQUESTS, heads, 16, dtype=torch.int32, device=device)
        self.stream = torch.cuda.Stream()
        self.graph = torch.cuda.CUDAGraph()

    def step(self, query: torch.Tensor, table: torch.Tensor, lens: torch.Tensor) -> None:
        """All layers of a decode step; LAYERS is a multiple of 3, so slots go round."""
        num_valid_pages = (lens + 127) // 128  # visible blocks, despite the name
        for layer, index_k in enumerate(self.caches):
            self.plan.decode(
                query[layer],
                index_k,
                table,
                lens,
                num_valid_pages,
                self.scores,
                self.outputs[layer],
                comm=self.comm,
                slot=layer,
                tagged=True,
                decode_query_len=1,
            )


def main() -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        print("skipped: CUDA graphs of the kernels need a Hopper GPU, and torch sees none")
        return
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    ranks = [Rank(rank, device) for rank in range(WORLD_SIZE)]
    for rank in ranks:
        rank.comm.connect([peer.comm.storage.data_ptr() for peer in ranks])
        rank.plan.check_comm(rank.comm)  # reads the addresses back: before the capture

    # What changes from step to step is written into these tensors, where the graphs read it.
    query = torch.empty(LAYERS, REQUESTS, 4, 128, device=device).to(FLOAT8)
    table = torch.randperm(PAGES, device=device).to(torch.int32).view(REQUESTS, -1)
    seq_lens = torch.tensor([8000, 0, 130, 4096], dtype=torch.int32, device=device)

    for rank in ranks:
        width = table.shape[1]
        rank.plan.warmup(rank.caches[0], table_width=width, batch_sizes=[REQUESTS], prefill=False)
    torch.cuda.synchronize()
    for rank in ranks:
        with torch.cuda.graph(rank.graph, stream=rank.stream):
            rank.step(query, table, seq_lens)

    for step in range(STEPS):
        seq_lens += seq_lens > 0  # a new token for every request; 0 is graph padding
        query.copy_(torch.randn(query.shape, device=device).to(FLOAT8))
        for replayed in (True, False):
            for rank in ranks:  # all ranks at once: each waits for the others' rows
                rank.stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(rank.stream):
                    rank.graph.replay() if replayed else rank.step(query, table, seq_lens)
            for rank in ranks:
                torch.cuda.current_stream().wait_stream(rank.stream)
            found = torch.cat([rank.outputs for rank in ranks], dim=2)
            if replayed:
                from_graph = found
        if not torch.equal(found, from_graph):
            sys.exit(f"step {step}: the graphs and eager calls differ")
        print(f"step {step}: request 0, head 0: blocks {found[0, 0, 0].tolist()}")
    faults = sum(rank.comm.errors.item() for rank in ranks)
    if faults:
        sys.exit(f"{faults} protocol faults")
    print("graphs and eager calls agree")


if __name__ == "__main__":
    main()
