"""Reading a capture folder that nobody vouches for: every claim is checked, nothing is executed or written."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from kvplugin.replay.capture.manifest import (
    CONTROLS,
    DTYPES,
    FILE_NAME,
    MANIFEST_NAME,
    REQUIRED,
    Manifest,
    RecordEntry,
    Role,
    TensorEntry,
)
from kvplugin.replay.capture.records import Capture, Record
from kvplugin.replay.capture.tensors import record_from
from kvplugin.replay.capture.write import safetensors_torch
from kvplugin.replay.errors import CaptureFileError

MAX_MANIFEST_BYTES = 64 << 20
DEFAULT_LIMIT = 16 << 30
"""Bytes of tensors, counted once each, that a capture may ask this process to read."""
TOGETHER = (
    (Role.INDEXER_Q, Role.INDEXER_KEYS, Role.INDEXER_WEIGHTS),
    (Role.HEAD_WEIGHT, Role.HEAD_TARGETS, Role.HEAD_MASK),
)
SAFETENSORS_NAMES = {
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
    "F8_E4M3": "float8_e4m3fn",
    "I64": "int64",
    "I32": "int32",
    "U8": "uint8",
    "BOOL": "bool",
}


def read_capture(folder: Path, limit: int = DEFAULT_LIMIT) -> Capture:
    """Read and check a capture.

    Args:
        folder: holds ``manifest.json`` and the safetensors files it names, as plain files.
        limit: bytes of tensors to read at most.

    Raises:
        CaptureFileError: one line about the first thing that is wrong.
        MissingExtra: safetensors is not installed.
    """
    manifest = _manifest(folder)
    entries = {(entry.file, entry.name): entry for record in manifest.records for entry in record.tensors.values()}
    _check_sizes(folder, entries.values(), limit)
    tensors = dict(_tensors(folder, entries))
    records = tuple(
        _record(index, entry, {role: tensors[each.file, each.name] for role, each in entry.tensors.items()})
        for index, entry in enumerate(manifest.records)
    )
    return Capture(manifest.engine, manifest.model, records, manifest.dropped, manifest.policy)


def _manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST_NAME
    size = _plain_file(path).st_size
    if size > MAX_MANIFEST_BYTES:
        raise CaptureFileError(str(path), f"{size} bytes", f"a manifest has at most {MAX_MANIFEST_BYTES}")
    try:
        manifest = Manifest.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        more = error.error_count() - 1
        found = f"{place}: {first['msg']}" + (f" ({more} more)" if more else "")
        raise CaptureFileError(str(path), CONTROLS.sub("?", found)[:300], "see docs/replay-schema.json") from None
    if not manifest.records:
        raise CaptureFileError(str(path), "no records", "a capture has at least one")
    return manifest


def _plain_file(path: Path) -> Any:
    # A link could lead anywhere, and a pipe would never end.
    try:
        if path.is_symlink() or not path.is_file():
            found = "a link" if path.is_symlink() else "not a file" if path.exists() else "missing"
            raise CaptureFileError(str(path), found, "must be a plain file in the capture folder")
        return path.stat()
    except OSError as error:
        raise CaptureFileError(str(path)[:100], error.strerror or "cannot be read", "name a capture folder") from None


def _check_sizes(folder: Path, entries: Iterable[TensorEntry], limit: int) -> None:
    """The claimed sizes, before any tensor is touched."""
    total = 0
    for entry in entries:
        if not FILE_NAME.fullmatch(entry.file):
            raise CaptureFileError(
                str(folder / MANIFEST_NAME),
                f"file {entry.file[:100]!r}",
                "must be the plain name of a .safetensors file in the capture folder",
            )
        total += math.prod(entry.shape) * DTYPES[entry.dtype].itemsize
        if total > limit:
            raise CaptureFileError(
                str(folder / MANIFEST_NAME), f"tensors of more than {limit} bytes", "raise the limit if you trust it"
            )


def _tensors(folder: Path, entries: dict[tuple[str, str], TensorEntry]) -> Iterator[tuple[tuple[str, str], Tensor]]:
    safetensors_torch()
    from safetensors import SafetensorError, safe_open

    with ExitStack() as stack:
        files: dict[str, Any] = {}
        for (file, name), entry in entries.items():
            path = folder / file
            try:
                if file not in files:
                    _plain_file(path)
                    files[file] = stack.enter_context(safe_open(path, framework="pt"))
                yield (file, name), _tensor(path, files[file], entry)
            except (SafetensorError, OSError, ValueError, RuntimeError) as error:
                raise CaptureFileError(str(path), _one_line(error), "must be a whole safetensors file") from None


def _tensor(path: Path, file: Any, entry: TensorEntry) -> Tensor:
    names: list[str] = file.keys()
    if entry.name not in names:
        raise CaptureFileError(str(path), f"has no tensor {entry.name!r}", "the manifest names it")
    view = file.get_slice(entry.name)
    dtype, shape = SAFETENSORS_NAMES.get(view.get_dtype(), view.get_dtype()), list(view.get_shape())
    if dtype != entry.dtype or shape != entry.shape:
        raise CaptureFileError(
            f"{path}: {entry.name}", f"is {dtype} {shape}", f"the manifest says {entry.dtype} {entry.shape}"
        )
    tensor = file.get_tensor(entry.name)
    assert isinstance(tensor, torch.Tensor)
    return tensor


def _record(index: int, entry: RecordEntry, tensors: dict[Role, Tensor]) -> Record:
    where = f"{MANIFEST_NAME}: records.{index} (request {entry.request}, layer {entry.layer}, step {entry.step})"
    missing = [role for role in REQUIRED if role not in tensors]
    for group in TOGETHER:
        present = [role for role in group if role in tensors]
        missing += [role for role in group if present and role not in tensors]
    if missing:
        raise CaptureFileError(where, f"has no {', '.join(missing)}", "these tensors are needed")
    if Role.INDEXER_Q in tensors and entry.indexer_rope is None:
        raise CaptureFileError(where, "has indexer tensors and no indexer_rope", "the indexer's rotation is its own")
    if Role.Q in tensors and tensors[Role.Q].dim() and tensors[Role.Q].shape[0] != 1:
        raise CaptureFileError(where, f"q has {tensors[Role.Q].shape[0]} rows", "a record holds one request")
    return record_from(entry, tensors)


def _one_line(error: Exception) -> str:
    return CONTROLS.sub("?", " ".join(str(error).split()))[:200] or type(error).__name__
