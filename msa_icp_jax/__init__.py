"""MiniMax-M3 ICP indexer for JAX.

Chooses, for every query token and index head, the 16 key blocks of 128 tokens to attend to, with
the index keys split over 2 or 4 ranks; exact: equal to one rank that sees everything.

Start from `prepare_msa_icp_indexer`. Import does no device work and needs no GPU.
"""

from msa_icp_jax import versions as versions  # first: refuses a JAX that is not supported
from msa_icp_jax.comm import MSAIcpComm, MSAIcpCommLayout, msa_icp_comm_layout
from msa_icp_jax.geometry import IndexerGeometry, msa_icp_decode_score_columns
from msa_icp_jax.ops.decode_score import (
    msa_icp_decode_index_score_sharded,
    msa_icp_decode_pool_bytes,
    msa_icp_decode_score_publish,
)
from msa_icp_jax.ops.index_cache import msa_icp_write_index_k
from msa_icp_jax.ops.merge import MSAIcpMerge, msa_icp_merge_candidates
from msa_icp_jax.ops.prefill_plan import (
    MSAIcpScorePlan,
    msa_icp_index_score_plan_storage,
    msa_icp_index_score_sharded_plan,
    msa_icp_index_score_sharded_plan_device,
)
from msa_icp_jax.ops.prefill_score import (
    msa_icp_index_score_sharded,
    msa_icp_prefill_pool_bytes,
    msa_icp_prefill_score_select,
)
from msa_icp_jax.ops.select import (
    MSAIcpRows,
    msa_icp_topk_select_prefill,
    msa_icp_topk_select_publish,
)
from msa_icp_jax.plan import MSAIcpIndexerPlan, prepare_msa_icp_indexer
from msa_icp_jax.programs import (
    DecodeProgram,
    DecodeProgramWithComm,
    PrefillProgram,
    WriteProgram,
)
from msa_icp_jax.quantize import msa_icp_quantize_index
from msa_icp_jax.typing import Backend, IndexDtype, Precision, Transport

__version__ = "0.1.0"

__all__ = [
    "Backend",
    "DecodeProgram",
    "DecodeProgramWithComm",
    "IndexDtype",
    "IndexerGeometry",
    "MSAIcpComm",
    "MSAIcpCommLayout",
    "MSAIcpIndexerPlan",
    "MSAIcpMerge",
    "MSAIcpRows",
    "MSAIcpScorePlan",
    "Precision",
    "PrefillProgram",
    "Transport",
    "WriteProgram",
    "msa_icp_comm_layout",
    "msa_icp_decode_index_score_sharded",
    "msa_icp_decode_pool_bytes",
    "msa_icp_decode_score_columns",
    "msa_icp_decode_score_publish",
    "msa_icp_index_score_plan_storage",
    "msa_icp_index_score_sharded",
    "msa_icp_index_score_sharded_plan",
    "msa_icp_index_score_sharded_plan_device",
    "msa_icp_merge_candidates",
    "msa_icp_prefill_pool_bytes",
    "msa_icp_prefill_score_select",
    "msa_icp_quantize_index",
    "msa_icp_topk_select_prefill",
    "msa_icp_topk_select_publish",
    "msa_icp_write_index_k",
    "prepare_msa_icp_indexer",
]
