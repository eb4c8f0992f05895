"""Which card, driver and versions the results belong to."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import torch
import triton

from integration.gpu.record import Record

REPOSITORY = Path(__file__).resolve().parents[2]
ANSWER_S = 15


def run(record: Record, *, tiny: bool) -> None:
    record.fact("python", platform.python_version())
    record.fact("torch", torch.__version__)
    record.fact("triton", triton.__version__)
    record.fact("commit", _answer("git", "-C", str(REPOSITORY), "describe", "--always", "--dirty", "--abbrev=40"))
    record.fact("cuda", torch.version.cuda)
    if not torch.cuda.is_available():
        record.fact("card", None)
        return
    properties = torch.cuda.get_device_properties(0)
    record.fact("card", properties.name)
    record.fact("capability", f"{properties.major}.{properties.minor}")
    record.fact("multiprocessors", properties.multi_processor_count)
    record.fact("memory_bytes", properties.total_memory)
    record.fact("l2_bytes", properties.L2_cache_size)
    record.fact("driver", _answer("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"))


def _answer(*command: str) -> str | None:
    """First line that a program prints; None where it is missing, fails, or does not answer."""
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=ANSWER_S)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip().partition("\n")[0] or None
