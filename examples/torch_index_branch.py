"""MiniMax-M3's index branch on torch tensors, from hidden states to chosen blocks.

    python examples/torch_index_branch.py

Every sparse layer projects a token's hidden state to four index queries and one index key of 128
dimensions, norms each head (RMSNorm as in Gemma: times 1 + weight), and rotates the first 64
dimensions of each by the token's position. A block's score is the largest q.k over its keys,
without any scale; no block at the start is forced, and one at the end, the query's own.

The projections here are random and small, but alike for queries and keys, so that a token finds the
block whose text is like its own; the rest is as in the model. One process takes two ranks in turn;
a server has a process a rank and calls `plan.decode` (see torch_group.py).
"""

# First: it keeps JAX from taking the GPU's memory before torch asks for any.
import msa_icp_torch  # isort: skip

import torch

from msa_icp_torch import msa_icp_quantize_index

HIDDEN = 256  # the model's is 6,144
HEADS, DIM, ROTARY_DIM = 4, 128, 64
THETA, EPS = 5_000_000.0, 1e-6
WORLD_SIZE, PAGE_SIZE, BLOCKS = 2, 128, 64
ROWS, CONTEXT = PAGE_SIZE // WORLD_SIZE, BLOCKS * 128
ASKS_FOR = 23  # the block that the last token's text is like


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Gemma's: the weight is stored as what is added to 1."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * (1.0 + weight)


def rope(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotates dimensions i and 32 + i of x [T, heads, 128] together, i < 32; 64 to 127 stay."""
    half = ROTARY_DIM // 2
    angle = positions[:, None] * THETA ** (-torch.arange(half, device=x.device) / half)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b, rest = x[..., :half], x[..., half:ROTARY_DIM], x[..., ROTARY_DIM:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


class IndexBranch(torch.nn.Module):
    """A layer's index branch; float32, in the model bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.q = torch.nn.Linear(HIDDEN, HEADS * DIM, bias=False)
        self.k = torch.nn.Linear(HIDDEN, DIM, bias=False)
        self.q_norm = torch.nn.Parameter(0.2 * torch.randn(DIM))  # shared by the four heads
        self.k_norm = torch.nn.Parameter(0.2 * torch.randn(DIM))

    def forward(
        self, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Index queries [T, 4, 128] and index keys [T, 128] of hidden states [T, HIDDEN]."""
        q = rms_norm(self.q(hidden).view(-1, HEADS, DIM), self.q_norm)
        k = rms_norm(self.k(hidden).view(-1, 1, DIM), self.k_norm)
        return rope(q, positions), rope(k, positions)[:, 0]


def made_up_layer(device: torch.device) -> tuple[IndexBranch, torch.Tensor]:
    """A branch, and hidden states [CONTEXT, HIDDEN]: blocks have topics, tokens noise."""
    branch = IndexBranch()
    shared = torch.randn(DIM, HIDDEN) / HIDDEN**0.5
    noise = 0.3 * torch.randn(HEADS * DIM, HIDDEN) / HIDDEN**0.5
    with torch.no_grad():
        branch.k.weight.copy_(shared)
        branch.q.weight.copy_(shared.repeat(HEADS, 1) + noise)
    topics = torch.randn(BLOCKS, HIDDEN)
    topics[-1] = topics[ASKS_FOR]
    hidden = topics.repeat_interleave(128, dim=0) + torch.randn(CONTEXT, HIDDEN)
    return branch.to(device), hidden.to(device)


def best_blocks(q: torch.Tensor, k: torch.Tensor) -> list[set[int]]:
    """What the model chooses for one token [4, 128] at the end of k, without rounding or ranks."""
    scores = (q @ k.T).view(HEADS, BLOCKS, 128).amax(-1)
    scores[:, -1] = torch.inf  # the query's own block
    return [set(ids) for ids in scores.topk(16).indices.tolist()]


def store(index_k: torch.Tensor, keys: torch.Tensor, slots: torch.Tensor, rank: int) -> None:
    """Writes new keys into a rank's rows of the pages."""
    page, row = slots // PAGE_SIZE, slots % PAGE_SIZE - rank * ROWS
    own = (slots >= 0) & (row >= 0) & (row < ROWS)
    index_k.view(torch.uint8)[page[own], row[own]] = keys.view(torch.uint8)[own]


@torch.no_grad()
def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    branch, hidden = made_up_layer(device)
    positions = torch.arange(CONTEXT, device=device)
    q, k = branch(hidden, positions)
    index_q, new_k = msa_icp_quantize_index(q[-1:]), msa_icp_quantize_index(k)

    pages = CONTEXT // PAGE_SIZE
    block_table = torch.randperm(pages, device=device).to(torch.int32)
    slots = block_table[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
    one, context = (torch.tensor([n], dtype=torch.int32, device=device) for n in (1, CONTEXT))
    num_valid_pages = (context - 1) // 128 + 1  # visible blocks, despite the name

    plans, carriers = [], []
    for rank in range(WORLD_SIZE):
        plan = msa_icp_torch.prepare_msa_icp_indexer(
            world_size=WORLD_SIZE,
            rank=rank,
            num_index_heads=HEADS,
            page_size=PAGE_SIZE,
            init_blocks=0,
            local_blocks=1,
            max_decode_tokens=1,
            max_decode_query_len=1,
            max_num_batched_tokens=1,
            max_num_seqs=1,
            max_model_len=CONTEXT,
            num_sparse_layers=57,
            device=device,
        )
        index_k = torch.zeros(pages, ROWS, DIM, device=device).to(torch.float8_e4m3fn)
        store(index_k, new_k, slots, rank)
        # The last token as a window of one query at the end of its context.
        window = plan.prefill_window_plan(
            one, context, context - 1, total_q=1, max_query_len=1, max_seq_len=CONTEXT
        )
        scratch = torch.empty(plan.prefill_score_shape(), dtype=torch.float32, device=device)
        carrier = torch.empty(HEADS, 1, 33, dtype=torch.int32, device=device)
        plan.prefill_local(
            index_q, index_k, block_table[None], window, scratch, num_valid_pages, carrier
        )
        plans.append(plan)
        carriers.append(carrier)

    chosen = []
    for plan in plans:
        heads = plan.geometry.heads_per_rank
        owned = slice(plan.rank * heads, (plan.rank + 1) * heads)
        received = torch.stack([carrier[owned] for carrier in carriers])
        output = torch.empty(1, heads, 16, dtype=torch.int32, device=device)
        plan.prefill_merge(received, num_valid_pages, output)
        chosen += output[0].tolist()
    for head, (ids, unrounded) in enumerate(zip(chosen, best_blocks(q[-1], k), strict=True)):
        found = "found" if ASKS_FOR in ids else "missed"
        print(
            f"head {head}: block {ASKS_FOR} {found}; "
            f"{len(unrounded & set(ids))} of 16 as without rounding: {ids}"
        )


if __name__ == "__main__":
    main()
