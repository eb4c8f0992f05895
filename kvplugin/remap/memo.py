"""One conversion for an index group in each step: the leader's, which its followers read."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from kvplugin.remap.call import Member
from kvplugin.remap.groups import GroupLayout, IndexGroup
from kvplugin.remap.layer_call import LayerCall, SharedInputs
from kvplugin.remap.memory import ReusedMemory
from kvplugin.remap.op import remap_grouped
from kvplugin.remap.paths import RemapPath

logger = logging.getLogger(__name__)


class GroupMemo:
    """Converts for the layers of an engine, once per index group, step and micro-batch.

    A call that does not fit what its leader left is converted on its own, counted, and warned about once; so is a group
    whose common conversion fails. Of each batch, only the last leader's result is kept, in memory that is used again:
    layers run in order, and results of all groups would take gigabytes.

    Args:
        layout: gives the engine's index groups; asked once, at the first conversion.
        grouped: False converts for each layer alone.
        paths: int64 ``[len(RemapPath)]`` in host memory, added to.
        invalid: int64 counters of :func:`kvplugin.remap.remap_grouped`, added to.
        arrange: applied to the learned rows once per conversion.
    """

    def __init__(
        self,
        layout: Callable[[], GroupLayout],
        *,
        grouped: bool,
        paths: Tensor,
        invalid: Tensor | None = None,
        arrange: Callable[[Tensor], Tensor] = lambda topk: topk,
    ) -> None:
        self._read_layout = layout
        self._grouped = grouped
        self._paths = paths
        self._invalid = invalid
        self._arrange = arrange
        self._steps: dict[int, _Step] = {}
        self._last_step = 0
        self._converted = False
        self._memory_of_steps: list[ReusedMemory] = []
        self._memory_of_layers = ReusedMemory()
        self._failed: set[int | None] = set()  # leaders of groups
        self._warned: set[str] = set()

    def begin_step(self, batch: object) -> int:
        """Forget the results of the steps before. To be called whenever the engine describes a batch to some layers.

        The first call after a conversion ends what was before, so that a draft pass is a step of its own. Until then,
        calls with the same object are one step (vLLM describes a batch to leaders and to followers), and other objects
        are micro-batches, which may run by turns.

        Args:
            batch: an object of the engine that stands for the batch.

        Returns:
            The step's number, for its calls.
        """
        if self._converted:
            self._steps.clear()
            self._converted = False
        for number, step in self._steps.items():
            if step.batch is batch:
                return number
        if len(self._steps) == len(self._memory_of_steps):
            self._memory_of_steps.append(ReusedMemory())
        self._last_step += 1
        self._steps[self._last_step] = _Step(batch, self._memory_of_steps[len(self._steps)])
        return self._last_step

    def convert(self, call: LayerCall) -> Tensor:
        """Physical rows of a layer: int32 ``[T, K]``, -1 = none; to be read before the next layer's call.

        Raises:
            ArgumentError: the call cannot be converted at all.
        """
        self._converted = True
        step = self._steps.get(call.step)
        if step is None:
            self._steps.clear()  # a step that should be over may have written to what the present ones read
        group = self._layout.group_of(call.layer) if self._grouped else None
        if group is None or group.inactive is not None:
            if step is not None:
                step.result = None  # this layer's indexer may have written new rows where the last leader's were
            return self._convert_alone(call, RemapPath.PER_LAYER)
        try:
            if step is None:
                raise _Unusable("its step is over")
            if group.leader in self._failed:
                raise _Unusable("the common conversion of its group has failed")
            return self._lead(step, group, call) if call.layer == group.leader else self._follow(step, group, call)
        except _Unusable as reason:
            self._warn(call, str(reason))
            return self._convert_alone(call, RemapPath.FALLBACK)

    @cached_property
    def _layout(self) -> GroupLayout:
        return self._read_layout()

    def _lead(self, step: _Step, group: IndexGroup, call: LayerCall) -> Tensor:
        step.result = None  # its memory is written to
        members = group.members or (call.member,)
        if call.member not in members:
            raise _Unusable("its KV cache has moved")
        try:
            physical = self._remap(call, members, step.memory)
        except Exception as error:
            logger.exception("kvplugin: remap: layers %s convert one by one from now on", list(group.layers))
            self._failed.add(group.leader)
            raise _Unusable("the common conversion of its group has failed") from error
        step.result = _Result(group, call.shared, members, physical)
        self._paths[RemapPath.GROUPED] += 1
        return physical[members.index(call.member)]

    def _follow(self, step: _Step, group: IndexGroup, call: LayerCall) -> Tensor:
        result = step.result
        if result is None or result.group is not group:
            raise _Unusable("its leader has left no result in this step")
        difference = call.shared.first_difference(result.inputs)
        if difference is not None:
            raise _Unusable(f"its {difference} is not its leader's")
        if call.member not in result.members:
            raise _Unusable("its stride is not one that its leader converted for")
        self._paths[RemapPath.MEMO] += 1
        return result.physical[result.members.index(call.member)]

    def _convert_alone(self, call: LayerCall, path: RemapPath) -> Tensor:
        physical = self._remap(call, (call.member,), self._memory_of_layers)[0]
        self._paths[path] += 1
        return physical

    def _remap(self, call: LayerCall, members: tuple[Member, ...], memory: ReusedMemory) -> Tensor:
        return remap_grouped(
            self._arrange(call.topk),
            call.request_of_row,
            call.block_table,
            block_size=call.block_size,
            num_blocks=call.num_blocks,
            members=members,
            out=memory.of_shape((len(members), *call.topk.shape), call.topk.device),
            counters=self._invalid,
        ).physical

    def _warn(self, call: LayerCall, reason: str) -> None:
        """Say why a layer converts for itself, the first time each reason comes up."""
        if reason not in self._warned:
            self._warned.add(reason)
            logger.warning("kvplugin: remap: layer %d converts for itself (fallback): %s", call.layer, reason)


class _Unusable(Exception):
    """Why a layer cannot take part in its group's conversion."""


class _Result(NamedTuple):
    """A leader's conversion: whose, of what, and int32 ``[G, T, K]``, one ``[T, K]`` for each distinct member."""

    group: IndexGroup
    inputs: SharedInputs
    members: tuple[Member, ...]
    physical: Tensor


@dataclass
class _Step:
    """One batch, where the results of its leaders lie, and the last of them."""

    batch: object
    memory: ReusedMemory
    result: _Result | None = None
