"""A vLLM plugin that breaks the CPU engine's indexer while a file exists.

An empty file makes its top-k return what kernels return that meet NaN scores; one that says ``noise`` makes its scores
mean nothing, as a wrong dtype, a stale page or a flipped rope does.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
NAN_INDEX = 2143289344
"""What GPU kernels write for NaN logits."""
SWITCH = "KVPLUGIN_TEST_FAULT"
"""Environment variable: path of the file."""
NOISE = "noise"
NAME = "kvplugin_test_fault"


def entry_point(folder: Path) -> None:
    """Make the plugin known to processes that have ``folder`` on their path."""
    info = folder / "kvplugin_test_fault-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{NAME} = {__name__}:install\n")


def environment(folder: Path, plugins: str) -> dict[str, str]:
    """Variables of a server that has the plugin, beside others; the file is ``fault`` in ``folder``.

    Args:
        folder: that :func:`entry_point` has written to.
        plugins: the value of ``VLLM_PLUGINS`` without this one.
    """
    return {
        "VLLM_PLUGINS": f"{plugins},{NAME}",
        SWITCH: str(folder / "fault"),
        "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]),
    }


def install() -> None:
    """Called by vLLM in each of its processes."""
    import torch

    from kvplugin.vllm.cpu import indexer

    switch, sound = Path(os.environ[SWITCH]), indexer.topk_rows

    def topk_rows(scores: Any, row_lengths: Any, selection: Any) -> None:
        fault = switch.read_text() if switch.exists() else None
        if fault == NOISE:
            scores.copy_(torch.rand_like(scores))
        sound(scores, row_lengths, selection)
        if fault == "":
            selection[:, 0] = torch.where(row_lengths > selection.shape[1], NAN_INDEX, selection[:, 0])

    indexer.topk_rows = topk_rows
