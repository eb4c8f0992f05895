"""What stands in for a GPU: NVML, the compiled half of vLLM, streams and events, ranks. All of it writes to one log."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from integration.parity.source_in_use import VARIABLE

LOG: list[str] = []
"""What happened, in order; cleared for each step by the rig."""
HOPPER, BLACKWELL, WORKSTATION = (9, 0), (10, 0), (12, 0)
COMPILED = (
    "_C",
    "_C_stable_libtorch",
    "_moe_C",
    "_moe_C_stable_libtorch",
    "_flashmla_C",
    "_flashmla_extension_C",
    "vllm_flash_attn._vllm_fa2_C",
    "vllm_flash_attn._vllm_fa3_C",
)
"""vLLM's compiled modules: there to be imported, with no operator in them but those of ``kernels.py``."""
GPU_UNITS = 8


class Card(NamedTuple):
    """The GPU that vLLM believes it has."""

    capability: tuple[int, int]


_card = [Card(HOPPER)]


@cache
def install() -> None:
    """Let vLLM resolve its platform as on a machine with one NVIDIA GPU; before anything of vLLM's is imported."""
    os.environ["VLLM_PLUGINS"] = "kvplugin"
    for name in COMPILED:
        sys.modules.setdefault(f"vllm.{name}", ModuleType(f"vllm.{name}"))
    from kernels import define

    define()
    # Before the package they belong to: vLLM 0.30 looks for GPUs while it is imported.
    third_party: Any = ModuleType("vllm.third_party")
    third_party.__path__ = [str(Path(os.environ[VARIABLE], "vllm", "third_party"))]
    third_party.pynvml = _nvml()
    sys.modules |= {"vllm.third_party": third_party, "vllm.third_party.pynvml": third_party.pynvml}

    from vllm.platforms.cuda import CudaPlatform

    CudaPlatform.is_pin_memory_available = classmethod(lambda cls: False)
    CudaPlatform.num_compute_units = classmethod(lambda cls, device_id=0: GPU_UNITS)
    CudaPlatform.get_device_capability = classmethod(lambda cls, device_id=0: _capability())

    from vllm.platforms import current_platform

    assert type(current_platform).__module__ == "kvplugin.vllm.gpu.platform", f"vLLM chose {type(current_platform)}"
    # Warming up and freeing memory are for a device; the workspace of a test is small.
    torch.accelerator.empty_cache = lambda: None


def _nvml() -> ModuleType:
    nvml: Any = ModuleType("vllm.third_party.pynvml")
    nvml.nvmlInit = nvml.nvmlShutdown = lambda: None
    nvml.nvmlDeviceGetCount = lambda: 1
    nvml.nvmlDeviceGetHandleByIndex = lambda index: index
    nvml.nvmlDeviceGetCudaComputeCapability = lambda handle: _card[0].capability
    nvml.nvmlDeviceGetName = lambda handle: "stand-in"
    nvml.NVMLError = type("NVMLError", (Exception,), {})
    return nvml


def _capability() -> Any:
    from vllm.platforms.interface import DeviceCapability

    return DeviceCapability(*_card[0].capability)


@contextmanager
def card(capability: tuple[int, int]) -> Iterator[None]:
    """Let vLLM believe in another GPU."""
    before, _card[0] = _card[0], Card(capability)
    try:
        yield
    finally:
        _card[0] = before


class RecordingEvent:
    """An event that says when it is recorded."""

    def __init__(self, name: str) -> None:
        self.name = name

    def record(self, stream: RecordingStream) -> None:
        LOG.append(f"{stream.name} records {self.name}")


class RecordingStream:
    """A stream that says what it waits for; what runs under it runs at once."""

    def __init__(self, name: str) -> None:
        self.name = name

    def wait_event(self, event: RecordingEvent) -> None:
        LOG.append(f"{self.name} waits for {event.name}")

    def wait_stream(self, stream: RecordingStream) -> None:
        LOG.append(f"{self.name} waits for all of {stream.name}")

    def __enter__(self) -> RecordingStream:
        return self

    def __exit__(self, *error: object) -> None:
        return None


class Ranks:
    """Stands in for a process group: what this rank sends is kept, and the others send ``others``."""

    def __init__(self, size: int, rank: int) -> None:
        self.world_size, self.rank_in_group, self.sent = size, rank, []
        self.others: list[Tensor | None] = [None] * size

    def all_gatherv(self, local: Tensor, dim: int, sizes: list[int]) -> Tensor:
        """As vLLM's, of ranks that have ``sizes`` rows each; rows that nobody has given are -1."""
        self.sent.append(local.clone())
        parts = [
            local if rank == self.rank_in_group else local.new_full((rows, *local.shape[1:]), -1)
            for rank, rows in enumerate(sizes)
        ]
        return torch.cat([part if given is None else given for part, given in zip(parts, self.others, strict=True)])


@contextmanager
def ranks(*, tensor: Ranks | None = None, context: Ranks | None = None) -> Iterator[None]:
    """Put these groups where vLLM keeps its own."""
    from vllm.distributed import parallel_state

    names = {"_TP": tensor or Ranks(1, 0), "_DCP": context or Ranks(1, 0), "_PCP": Ranks(1, 0)}
    before = {name: getattr(parallel_state, name) for name in names}
    for name, group in names.items():
        setattr(parallel_state, name, group)
    try:
        yield
    finally:
        for name, group in before.items():
            setattr(parallel_state, name, group)
