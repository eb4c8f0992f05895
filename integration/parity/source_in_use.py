"""Which vLLM this process runs: the fetched Python of the CUDA wheel, or the CPU build that is installed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "KVPLUGIN_PARITY_SOURCE"
"""Environment variable that names the fetched tree; set by ``python -m integration.parity`` alone."""


def parity_environment(root: Path, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables under which ``import vllm`` takes the tree at ``root``, and Triton runs kernels without a GPU."""
    paths = filter(None, (str(root), base.get("PYTHONPATH")))
    return {
        **base,
        VARIABLE: str(root),
        # First on the path: modules and metadata. A version without "cpu" is what makes vLLM use Triton.
        "PYTHONPATH": os.pathsep.join(paths),
        "CUDA_VISIBLE_DEVICES": "",
        "TRITON_INTERPRET": "1",
        "VLLM_PLUGINS": "",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }


def is_in_use() -> bool:
    """True in a process that ``parity_environment`` set up."""
    return VARIABLE in os.environ


def require() -> None:
    """Raise RuntimeError unless ``vllm`` is the fetched tree: any other comparison would prove nothing."""
    import vllm

    root = os.environ.get(VARIABLE)
    if root is None or not Path(vllm.__file__).is_relative_to(root):
        raise RuntimeError(f"vllm is {vllm.__file__}, not the fetched source; run 'make parity'")
