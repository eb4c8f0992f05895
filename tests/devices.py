"""Where each implementation is tested: GPU kernels on a GPU where there is one, in Triton's interpreter where not."""

from __future__ import annotations

from types import ModuleType

import torch

GPU_FORMS = ("torch_ops", "triton_ops")


def device_of(implementation: ModuleType) -> torch.device:
    """Device for the tensors of an implementation's calls."""
    on_gpu = torch.cuda.is_available() and implementation.__name__.rpartition(".")[2] in GPU_FORMS
    return torch.device("cuda" if on_gpu else "cpu")
