"""MiniMax-M3 ICP indexer on torch tensors: the plan of `msa_icp_jax`, written in place.

Start from `prepare_msa_icp_indexer`. Import this package before any JAX computation runs: it
keeps JAX from taking most of the GPU's memory when its backend starts, which leaves it to torch.
"""

from msa_icp_torch import memory

memory.leave_room_for_torch()

from msa_icp_jax import MSAIcpScorePlan, msa_icp_comm_layout  # noqa: E402
from msa_icp_jax.typing import Backend, IndexDtype, Precision, Route  # noqa: E402
from msa_icp_torch.comm import MSAIcpComm  # noqa: E402
from msa_icp_torch.plan import MSAIcpIndexerPlan, prepare_msa_icp_indexer  # noqa: E402
from msa_icp_torch.quantize import msa_icp_quantize_index  # noqa: E402

__version__ = "0.1.0"

__all__ = [
    "Backend",
    "IndexDtype",
    "MSAIcpComm",
    "MSAIcpIndexerPlan",
    "MSAIcpScorePlan",
    "Precision",
    "Route",
    "msa_icp_comm_layout",
    "msa_icp_quantize_index",
    "prepare_msa_icp_indexer",
]
