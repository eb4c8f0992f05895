"""A step of the engine, captured in a CUDA graph and replayed; on the CPU, where tests try it, simply run again."""

from __future__ import annotations

from collections.abc import Callable

import torch


def replayable(step: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Run a step once, which compiles its kernels, capture it, and return what replays it.

    A step that waits for the device, or allocates in a way that a graph cannot repeat, fails here.
    """
    if device.type != "cuda":
        return step
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay
