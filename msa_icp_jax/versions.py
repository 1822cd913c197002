"""The JAX releases that this package runs on.

Importing this module checks the installed one, so the package imports it first: another release
would fail later, somewhere in the middle, or compile kernels that nobody has tested there.
"""

from __future__ import annotations

import jax

OLDEST = (0, 11, 2)
BEFORE = (0, 13)


def check_jax(version: str, numbers: tuple[int, ...]) -> None:
    """Raises ImportError, saying what is needed, unless this release of JAX is supported."""
    if not OLDEST <= numbers < BEFORE:
        oldest, before = (".".join(map(str, release)) for release in (OLDEST, BEFORE))
        raise ImportError(
            f"msa_icp_jax needs jax >= {oldest}, < {before}, found {version} in {jax.__file__}; "
            f"pip install 'jax>={oldest},<{before}'"
        )


check_jax(jax.__version__, jax.__version_info__)
