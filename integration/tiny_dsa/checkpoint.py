"""Write a tiny checkpoint in the Hugging Face layout."""

from __future__ import annotations

import json
import os
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
    out.mkdir(parents=True, exist_ok=True)
    for name, content in _files(spec).items():
        _put(out / name, content)
    return out


def _files(spec: TinySpec) -> dict[str, bytes]:
    return {
        "model.safetensors": save(model_weights(spec), metadata={"format": "pt"}),
        "tokenizer.json": build_tokenizer().to_str(pretty=True).encode(),
        "tokenizer_config.json": _json(tokenizer_config()),
        "generation_config.json": _json(generation_config()),
        "config.json": _json(model_config(spec)),
    }


def _put(path: Path, content: bytes) -> None:
    """Replace the file as a whole: a server may be reading the old one, and an interrupted write must not be found."""
    if path.exists() and path.read_bytes() == content:
        return
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_bytes(content)
    draft.replace(path)


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()
