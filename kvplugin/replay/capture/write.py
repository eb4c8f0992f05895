"""Writing a capture folder: ``manifest.json`` and one safetensors file, bounded in size."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from kvplugin import __version__
from kvplugin.replay.capture.manifest import (
    MANIFEST_NAME,
    NAMES,
    FloorEntry,
    Manifest,
    RecordEntry,
    Role,
    TensorEntry,
    label,
)
from kvplugin.replay.capture.records import Capture, Record
from kvplugin.replay.capture.tensors import own_pages, prefix_entry, rope_entry, tensors_of
from kvplugin.replay.errors import CaptureFileError, MissingExtra
from kvplugin.replay.fingerprint import content_digest, digest, tensor_bytes

TENSOR_FILE = "tensors.safetensors"
DEFAULT_LIMIT = 1 << 30
"""Bytes of tensors in one capture."""


class CaptureWriter:
    """Collects records and writes them when it closes; a context manager.

    Only a request's own pages are kept, and equal tensors are written once. A record that would take the capture past
    its limit is left out and counted, so that capturing never fills a disk.

    Args:
        folder: made if missing; must not hold a capture.
        engine, model, policy: names for the report.
        limit: bytes of tensors.
        dropped: records that were left out before they came here.

    Raises:
        CaptureFileError: the folder already holds a capture.
        MissingExtra: safetensors is not installed.
    """

    def __init__(
        self,
        folder: Path,
        engine: str,
        model: str,
        limit: int = DEFAULT_LIMIT,
        dropped: int = 0,
        policy: str = "",
    ) -> None:
        safetensors_torch()
        if (folder / MANIFEST_NAME).exists():
            raise CaptureFileError(str(folder), "already holds a capture", "choose an empty folder")
        self._folder, self._engine, self._model, self._policy = folder, engine, model, policy
        self._limit = limit
        self._tensors: dict[str, Tensor] = {}
        self._entries: list[RecordEntry] = []
        self._bytes, self._dropped = 0, dropped

    def add(self, record: Record) -> bool:
        """Keep a record; False if it was left out at the limit. Fingerprints are taken now."""
        record = own_pages(record)
        named = {}
        for role, tensor in tensors_of(record).items():
            host = tensor.detach().cpu().contiguous()
            named[role] = (digest([str(host.dtype), str(list(host.shape)), bytes(tensor_bytes(host))]), host)
        fresh = {name: host for name, host in named.values() if name not in self._tensors}
        size = sum(host.nbytes for host in fresh.values())
        if self._bytes + size > self._limit:
            self._dropped += 1
            return False
        self._bytes += size
        # Cloned: the engine goes on writing to its own tensors, and a view would drag its whole storage along.
        self._tensors |= {name: host.clone() for name, host in fresh.items()}
        self._entries.append(
            _entry(
                record,
                {
                    role: TensorEntry(file=TENSOR_FILE, name=name, dtype=NAMES[host.dtype], shape=list(host.shape))
                    for role, (name, host) in named.items()
                },
            )
        )
        return True

    def close(self) -> None:
        """Write both files; the manifest last, so that a capture cut short is no capture."""
        self._folder.mkdir(parents=True, exist_ok=True)
        target, partial = self._folder / TENSOR_FILE, self._folder / f".{TENSOR_FILE}.partial"
        safetensors_torch().save_file(self._tensors, partial)
        os.replace(partial, target)
        manifest = Manifest(
            kvplugin=__version__,
            engine=label(self._engine),
            model=label(self._model),
            policy=label(self._policy),
            dropped=self._dropped,
            records=self._entries,
        )
        partial = self._folder / f".{MANIFEST_NAME}.partial"
        partial.write_text(manifest.model_dump_json(indent=1, exclude_defaults=False), encoding="utf-8")
        os.replace(partial, self._folder / MANIFEST_NAME)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()


def _entry(record: Record, tensors: dict[Role, TensorEntry]) -> RecordEntry:
    """The manifest's entry of a record that has its own pages; content that has no fingerprint yet gets one."""
    inputs, parallel, indexer = record.inputs, record.inputs.context_parallel, record.indexer
    found = content_digest(inputs, 0)
    return RecordEntry(
        request=label(record.request),
        layer=record.layer,
        step=record.step,
        tensors=tensors,
        page_format=inputs.pool.format,
        latent_dim=inputs.pool.latent_dim,
        scale=inputs.scale,
        rope=rope_entry(inputs.rope),
        indexer_rope=rope_entry(indexer.rope) if indexer else None,
        lse_base=record.observed.lse_base,
        cp_world_size=parallel.world_size if parallel else None,
        index_group=record.index_group,
        out_dtype=NAMES[inputs.out_dtype] if inputs.out_dtype else None,
        prefix=prefix_entry(record),
        hidden_size=record.hidden_size,
        backend=label(record.backend),
        content=record.content or found.content(),
        chunks=list(record.chunks) or found.chunks,
        floor=FloorEntry(**vars(record.floor)),
    )


def write_capture(capture: Capture, folder: Path, limit: int = DEFAULT_LIMIT) -> int:
    """Write a capture that is whole in memory; returns the number of records left out at the limit."""
    with CaptureWriter(folder, capture.engine, capture.model, limit, capture.dropped, capture.policy) as writer:
        return sum(not writer.add(record) for record in capture.records)


def safetensors_torch() -> Any:
    """The ``safetensors.torch`` module.

    Raises:
        MissingExtra: it is not installed.
    """
    try:
        import safetensors.torch
    except ImportError:
        raise MissingExtra("safetensors", "a capture file") from None
    return safetensors.torch
