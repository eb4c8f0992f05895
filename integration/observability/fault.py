"""A vLLM plugin that breaks the CPU engine's top-k while a file exists, as a kernel does that meets NaN scores."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

NAN_INDEX = 2143289344
"""What GPU kernels write for NaN logits."""
SWITCH = "KVPLUGIN_TEST_FAULT"
"""Environment variable: path of the file."""
NAME = "kvplugin_test_fault"


def entry_point(folder: Path) -> None:
    """Make the plugin known to processes that have ``folder`` on their path."""
    info = folder / "kvplugin_test_fault-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{NAME} = {__name__}:install\n")


def install() -> None:
    """Called by vLLM in each of its processes."""
    import torch

    from kvplugin.vllm.cpu import indexer

    switch, sound = Path(os.environ[SWITCH]), indexer.topk_rows

    def topk_rows(scores: Any, row_lengths: Any, selection: Any) -> None:
        sound(scores, row_lengths, selection)
        if switch.exists():
            selection[:, 0] = torch.where(row_lengths > selection.shape[1], NAN_INDEX, selection[:, 0])

    indexer.topk_rows = topk_rows
