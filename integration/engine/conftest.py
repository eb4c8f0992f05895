"""One process for all engines: no engine-core process, explicit KV size, no network."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would override the engines' own sizes

from integration.tiny_dsa.checkpoint import write_checkpoint
from integration.tiny_dsa.spec import ModelKind, TinySpec
from kvplugin.vllm.log import info_once, logger, warn_once

Checkpoint = Callable[[str], Path]


@pytest.fixture
def plugin_log() -> Iterator[list[str]]:
    """What the plugin logs from now on, its once-only lines again. vLLM keeps its loggers' records from pytest."""
    lines: list[str] = []

    def note(record: logging.LogRecord) -> bool:
        lines.append(record.getMessage())
        return True

    warn_once.cache_clear()
    info_once.cache_clear()
    logger.addFilter(note)  # a handler would not outlive vLLM's own configuration of logging
    yield lines
    logger.removeFilter(note)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Path of a tiny checkpoint of a kind (v32, glm52, dense, llama), written on first use."""
    folder = tmp_path_factory.mktemp("checkpoints")

    def of_kind(kind: str) -> Path:
        path = folder / kind
        return path if path.exists() else write_checkpoint(TinySpec(ModelKind(kind)), path)

    return of_kind
