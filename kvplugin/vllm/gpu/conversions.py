"""One conversion for an index group where vLLM converts in each layer: followers read what their leader left."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from torch import Tensor

from kvplugin.remap.paths import RemapPath
from kvplugin.vllm.log import warn_once

T = TypeVar("T")


class _Left(NamedTuple):
    """What a leader left in one batch: each of its conversions, by what it was asked for."""

    batch: object
    results: dict[Any, Any]


class _Layer(NamedTuple):
    """The layer whose attention is under way in this thread."""

    owner: SharedConversions
    leads: bool
    left: _Left | None
    """Where a leader leaves its results, or a follower finds them; None for a layer that converts for itself."""
    alone: RemapPath
    """The path of a conversion that is not shared."""


_under_way = threading.local()
"""Owner: :meth:`SharedConversions.of_layer`. Micro-batches run in threads of their own."""


class SharedConversions:
    """The conversions of one engine.

    Args:
        grouped: False converts for each layer alone.
        paths: int64 ``[len(RemapPath)]`` in host memory, added to. Under a replayed graph nothing is added.
    """

    def __init__(self, *, grouped: bool, paths: Tensor) -> None:
        self._grouped = grouped
        self._paths = paths
        self._left: WeakKeyDictionary[_Identified, _Left] = WeakKeyDictionary()

    @contextmanager
    def of_layer(self, group: Any, place: int, batch: object) -> Iterator[None]:
        """While a layer attends.

        Args:
            group: vLLM's index group of the layer, or None.
            place: of the layer in its group; 0 leads.
            batch: an object that stands for the batch, the same for all layers.
        """
        before = getattr(_under_way, "layer", None)
        _under_way.layer = self._layer(group, place, batch)
        try:
            yield
        finally:
            _under_way.layer = before
            if group is not None and place == group.num_layers - 1:
                self._left.pop(_identified(group), None)

    def count(self, path: RemapPath) -> None:
        """A layer came by its physical indices in this way."""
        self._paths[path] += 1

    def _layer(self, group: Any, place: int, batch: object) -> _Layer:
        if not self._grouped or group is None or group.num_layers < 2:
            return _Layer(self, False, None, RemapPath.PER_LAYER)
        key = _identified(group)
        if place == 0:
            left = self._left[key] = _Left(batch, {})
            return _Layer(self, True, left, RemapPath.GROUPED)
        found = self._left.get(key)
        if found is not None and found.batch is not batch:
            found = None
        return _Layer(self, False, found, RemapPath.FALLBACK)


def converted(convert: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """``convert(*args, **kwargs)``, or what the layer's leader left of the same conversion.

    The first argument, the request of each row, is not compared: the batch decides it, and builders keep copies.
    """
    layer: _Layer | None = getattr(_under_way, "layer", None)
    if layer is None or kwargs.get("out") is not None:
        return convert(*args, **kwargs)
    asked = (
        convert,
        len(args[0]),
        tuple(map(_identity, args[1:])),
        *sorted((k, _identity(v)) for k, v in kwargs.items()),
    )
    if layer.left is not None and not layer.leads and asked in layer.left.results:
        layer.owner.count(RemapPath.MEMO)
        found: T = layer.left.results[asked]
        return found
    if layer.alone is RemapPath.FALLBACK:
        reason = "has left nothing in this batch" if layer.left is None else "was not asked for the same"
        warn_once(f"kvplugin: remap: a layer converts for itself (fallback): its leader {reason}")
    result = convert(*args, **kwargs)
    if layer.leads and layer.left is not None:
        layer.left.results[asked] = result
    layer.owner.count(layer.alone)
    return result


def _identity(value: Any) -> Any:
    """A tensor as far as it is compared: within a batch nobody writes to what conversions read."""
    if isinstance(value, Tensor):
        return value.data_ptr(), value.dtype, tuple(value.shape), value.stride()
    return value


class _Identified:
    """Stands for an index group, which is a data class and cannot be hashed; lives as long as the group."""


def _identified(group: Any) -> _Identified:
    mark: _Identified | None = getattr(group, "kvplugin_mark", None)
    if mark is None:
        mark = group.kvplugin_mark = _Identified()
    return mark
