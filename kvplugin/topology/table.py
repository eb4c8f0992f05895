"""Policies of several arms on a device, where kernels read them: they can change under graphs already captured."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from functools import cache, lru_cache
from typing import Any, get_type_hints

import torch
from torch import Tensor

from kvplugin.config import MOST_ARMS, Eviction, Mode, Witness
from kvplugin.errors import ArgumentError
from kvplugin.topology.params import PolicyParams

FIELDS = tuple(get_type_hints(PolicyParams).items())
"""Name and type of each column of a table, in order."""


class PolicyTable:
    """Policies of up to ``capacity`` arms and a switch, at fixed addresses.

    Changing an arm or the switch reaches the kernels that are launched, or replayed, after it on the same stream.

    Attributes:
        width: K, the one width all arms are lowered for.
        rows: int64 ``[capacity, len(FIELDS)]``, one encoded :class:`PolicyParams` an arm; arms not set are disabled.
        enabled: int32 ``[1]``; 0 switches every arm off, as if its mode were ``disabled``.
        listed_witnesses: most witnesses a row's kernel can hold in a list; 0 = only those with a closed form.
    """

    def __init__(
        self,
        arms: Sequence[PolicyParams],
        device: torch.device | str = "cpu",
        *,
        capacity: int | None = None,
        listed_witnesses: int | None = None,
    ) -> None:
        """Encode the arms; ``capacity`` and ``listed_witnesses`` default to what they need, and stay as they are.

        Raises:
            ArgumentError: no arms, too many, or arms of different widths.
        """
        where = "PolicyTable"
        if not arms:
            raise ArgumentError(f"{where}.arms", "no arm", "give at least one policy")
        capacity = len(arms) if capacity is None else capacity
        if not len(arms) <= capacity <= MOST_ARMS:
            found = f"{len(arms)} arms in a table of {capacity}"
            raise ArgumentError(f"{where}.capacity", found, f"use 1 to {MOST_ARMS}, and no fewer than there are arms")
        self.width = arms[0].width
        self.listed_witnesses = max(map(witnesses_to_list, arms)) if listed_witnesses is None else listed_witnesses
        self._arms: dict[int, PolicyParams] = {}
        with torch.inference_mode(False):  # tensors made in it could not be changed outside of it
            self.rows = torch.zeros(capacity, len(FIELDS), dtype=torch.int64, device=device)
            self.enabled = torch.ones(1, dtype=torch.int32, device=device)
        for arm, params in enumerate(arms):
            self.set_arm(arm, params)

    def set_arm(self, arm: int, params: PolicyParams) -> None:
        """Give an arm another policy. Not for the hot path: it copies from host memory.

        Raises:
            ArgumentError: no such arm, another width, or more listed witnesses than the table was made for.
        """
        if not 0 <= arm < len(self.rows):
            raise ArgumentError("PolicyTable.set_arm.arm", f"got {arm}", f"use 0 to {len(self.rows) - 1}")
        self.check([params])
        self._arms[arm] = params
        self.rows[arm] = torch.tensor(encode(params), dtype=torch.int64)

    def check(self, arms: Sequence[PolicyParams]) -> None:
        """See that the table can hold these policies.

        Raises:
            ArgumentError: another width, or more listed witnesses than the table was made for.
        """
        where = "PolicyTable.set_arm.params"
        for params in arms:
            if params.width != self.width:
                raise ArgumentError(where, f"lowered for width {params.width}", f"lower it for {self.width}")
            needed = witnesses_to_list(params)
            if needed > self.listed_witnesses:
                found = f"needs a list of {needed} witnesses, the table holds {self.listed_witnesses}"
                raise ArgumentError(where, found, "make the table with a larger listed_witnesses")

    @property
    def can_lift(self) -> bool:
        """True where a lift expresses what every arm that merges would select."""
        merging = [params for params in self._arms.values() if params.mode.merges]
        return all(p.eviction is Eviction.LOWEST_SCORE and p.witness is Witness.UNIFORM for p in merging)

    def switch(self, *, on: bool) -> None:
        """Switch all arms on or off."""
        self.enabled.fill_(int(on))


@cache
def table_of(params: PolicyParams, device: torch.device) -> PolicyTable:
    """The table that holds this policy alone, kept as long as the process: captured graphs hold its addresses.

    Not to be changed, because other callers share it.
    """
    return PolicyTable([params], device)


def encode(params: PolicyParams) -> list[int]:
    """A policy as one row of a table: enums by their position, all else as it is."""
    return [_number(kind, value) for (_, kind), value in zip(FIELDS, params, strict=True)]


@lru_cache(maxsize=256)
def decode(row: tuple[int, ...]) -> PolicyParams:
    """The policy that a row of a table encodes."""
    return PolicyParams(*(_value(kind, number) for (_, kind), number in zip(FIELDS, row, strict=True)))


def _number(kind: type[Any], value: Any) -> int:
    return list(kind).index(kind(value)) if issubclass(kind, Enum) else int(value)


def _value(kind: type[Any], number: int) -> Any:
    return list(kind)[number] if issubclass(kind, Enum) else kind(number)


def witnesses_to_list(params: PolicyParams) -> int:
    """Witnesses without a closed form that a row can have."""
    if params.mode is Mode.DISABLED or params.witness is Witness.UNIFORM:
        return 0
    return params.segments if params.witness is Witness.COVERAGE else params.witness_blocks


def tables_arms(rows: Tensor) -> list[PolicyParams]:
    """The policies of all arms of a table; waits for the device."""
    return [decode(tuple(row)) for row in rows.tolist()]
