"""Write a tiny checkpoint in the Hugging Face layout."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save

from integration.tiny_dsa.model_config import generation_config, model_config
from integration.tiny_dsa.spec import TinySpec
from integration.tiny_dsa.tokenizer import build_tokenizer, tokenizer_config
from integration.tiny_dsa.weights import model_weights


def write_checkpoint(spec: TinySpec, out: Path) -> Path:
    """Write weights, tokenizer and configuration into ``out``: the same bytes for the same ``spec``.

    Files that already hold those bytes are left alone, so this is also how to make sure that a checkpoint is there.

    Args:
        spec: what to write.
        out: directory; made where missing, files of the same names are replaced.

    Returns:
        ``out``.

    Raises:
        OSError: ``out`` is a file, or cannot be written.
    """
    return write_files(_files(spec), out)


def write_files(files: Mapping[str, bytes], out: Path) -> Path:
    """Write a checkpoint's files into a directory, made where missing; those that hold the same already are left alone.

    Returns:
        ``out``.
    """
    out.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        _put(out / name, content)
    return out


def as_json(value: Mapping[str, Any]) -> bytes:
    """A configuration file's bytes."""
    return (json.dumps(value, indent=2) + "\n").encode()


def _files(spec: TinySpec) -> dict[str, bytes]:
    return {
        "model.safetensors": save(model_weights(spec), metadata={"format": "pt"}),
        "tokenizer.json": build_tokenizer().to_str(pretty=True).encode(),
        "tokenizer_config.json": as_json(tokenizer_config()),
        "generation_config.json": as_json(generation_config()),
        "config.json": as_json(model_config(spec)),
    }


def _put(path: Path, content: bytes) -> None:
    """Replace the file as a whole: a server may be reading the old one, and an interrupted write must not be found."""
    if path.exists() and path.read_bytes() == content:
        return
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_bytes(content)
    draft.replace(path)
