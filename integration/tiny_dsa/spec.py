"""What a tiny checkpoint is: the few choices a caller has, validated once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from kvplugin.errors import ConfigError, ConfigProblem

MAX_LAYERS = 12
"""More layers would break the promise of a checkpoint under 10 MB."""

DEFAULT_INDEX_TOPK = 64


class ModelKind(StrEnum):
    """Which architecture to write; all but ``llama`` share their main weights, tensor by tensor."""

    V32 = "v32"
    GLM52 = "glm52"
    DENSE = "dense"
    LLAMA = "llama"

    @property
    def is_sparse(self) -> bool:
        """True for the two architectures with an indexer."""
        return self in (ModelKind.V32, ModelKind.GLM52)


class Sparsity(NamedTuple):
    """How a DSA model selects: one letter a layer (``F`` runs the indexer, ``S`` shares), and the top-k budget."""

    pattern: str
    index_topk: int


@dataclass(frozen=True)
class TinySpec:
    """Everything that decides the bytes of a checkpoint.

    Attributes:
        kind: architecture.
        layers: decoder layers, 1 to ``MAX_LAYERS``.
        pattern: one ``F`` or ``S`` a layer, starting with ``F``; ``None`` = ``FSS`` repeated. DSA kinds only.
        index_topk: tokens the indexer selects a row, at least 1; ``None`` = ``DEFAULT_INDEX_TOPK``. DSA kinds only.
        seed: seed of the weights, at least 0.

    Raises:
        ConfigError: listing every wrong field with the values it may have.
    """

    kind: ModelKind
    layers: int = 6
    pattern: str | None = None
    index_topk: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        problems = tuple(_problems(self))
        if problems:
            raise ConfigError(problems)

    @property
    def sparsity(self) -> Sparsity | None:
        """Pattern and budget with the defaults filled in; ``None`` for a model without DSA."""
        if not self.kind.is_sparse:
            return None
        pattern = ("FSS" * MAX_LAYERS)[: self.layers] if self.pattern is None else self.pattern
        return Sparsity(pattern, DEFAULT_INDEX_TOPK if self.index_topk is None else self.index_topk)


def _problems(spec: TinySpec) -> Iterator[ConfigProblem]:
    if not 1 <= spec.layers <= MAX_LAYERS:
        yield ConfigProblem("layers", f"{spec.layers} is out of range", f"use 1 to {MAX_LAYERS}")
    if spec.seed < 0:
        yield ConfigProblem("seed", f"{spec.seed} is negative", "use 0 or more")
    if spec.kind.is_sparse:
        yield from _sparse_problems(spec)
    else:
        for key in ("pattern", "index_topk"):
            if getattr(spec, key) is not None:
                yield ConfigProblem(key, f"given for '{spec.kind}', which has no indexer", "leave it out")


def _sparse_problems(spec: TinySpec) -> Iterator[ConfigProblem]:
    if spec.index_topk is not None and spec.index_topk < 1:
        yield ConfigProblem("index_topk", f"{spec.index_topk} selects no token", "use 1 or more")
    if spec.pattern is None:
        return
    found = f"{spec.pattern!r}"
    if set(spec.pattern) - {"F", "S"}:
        yield ConfigProblem(
            "pattern", f"{found} has letters other than F and S", "use F (runs the indexer) or S (shares)"
        )
    if len(spec.pattern) != spec.layers:
        yield ConfigProblem("pattern", f"{found} has {len(spec.pattern)} letters", f"give {spec.layers}, one a layer")
    if not spec.pattern.startswith("F"):
        yield ConfigProblem("pattern", f"{found} has no indexer before its first layer", "start with F")
