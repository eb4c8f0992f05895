"""``python -m integration.gpu.stage MODULE RECORD tiny|full``: one stage of the check, as a process of its own.

A kernel that hangs, or a fault that ends CUDA for its process, ends this stage and no other.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

from integration.gpu.record import Record

TINY, FULL = "tiny", "full"


def main(module: str, path: str, size: str) -> None:
    import_module(module).run(Record(Path(path)), tiny=size == TINY)


if __name__ == "__main__":
    main(*sys.argv[1:])
