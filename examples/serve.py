"""Serves a tiny MiniMax-M3-style model with msa_icp_jax, and checks every token it makes.

    python examples/serve.py --steps 200 --json

The parts are in `examples/serve/`; docs/serving.md walks through them.
"""

import os
import sys
from pathlib import Path

import jax

# The example's parts, and the package where it is not installed but lies beside the example.
sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from serve.cli import MAX_RANKS, main

if __name__ == "__main__":
    # As many CPU devices as ranks, unless the caller has chosen; no effect on GPUs.
    chosen = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if not chosen and "JAX_NUM_CPU_DEVICES" not in os.environ:
        jax.config.update("jax_num_cpu_devices", MAX_RANKS)
    sys.exit(main())
