from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvplugin.errors import ArgumentError
from kvplugin.topology import prefix
from kvplugin.topology.prefix import PrefixCounter, count_stable_prefix, new_prefix_counters
from kvplugin.topology.prefix.call import PrefixCall

FORMS = ("torch_ops", "numba_ops")
MODULES = [import_module(f"kvplugin.topology.prefix.{name}") for name in FORMS]
REFERENCE = import_module("kvplugin.topology.prefix.reference")
HAZARDS = (-1, -2, 2143289344, 2**31 - 1, -(2**31))


def test_every_form_is_tested() -> None:
    folder = Path(str(prefix.__file__)).parent
    assert {path.stem for path in folder.glob("*_ops.py")} == set(FORMS)


@st.composite
def calls(draw: st.DrawFn) -> PrefixCall:
    rows, width, arms = draw(st.integers(0, 5)), draw(st.sampled_from([1, 3, 8])), draw(st.integers(1, 3))
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    number = st.one_of(st.integers(-1, 12), st.sampled_from(HAZARDS))

    def column(values: st.SearchStrategy[Any], kind: torch.dtype) -> torch.Tensor:
        return torch.tensor(draw(st.lists(values, min_size=rows, max_size=rows)), dtype=kind)

    def perhaps(values: st.SearchStrategy[Any], kind: torch.dtype) -> torch.Tensor | None:
        return column(values, kind) if draw(st.booleans()) else None

    # Each valid index at most once in a row, at any place; the rest are values that must not count.
    row = st.permutations(range(12)).map(lambda order: list(order[:width]))
    cells = [[draw(number) if token >= 10 else token for token in draw(row)] for _ in range(rows)]
    cells = [[v if cell.index(v) == i or not 0 <= v < 13 else -1 for i, v in enumerate(cell)] for cell in cells]
    wide = torch.full((rows, 2 * width), 3, dtype=dtype)
    selection = wide[:, ::2] if draw(st.booleans()) else wide[:, :width]
    if rows:
        selection.copy_(torch.tensor(cells, dtype=dtype))
    return PrefixCall(
        selection,
        column(number, dtype),
        column(number, torch.int32),
        perhaps(st.booleans(), torch.bool),
        perhaps(st.sampled_from([0, 1, 2, -1]), torch.int8),
        perhaps(st.integers(-1, arms), torch.int32),
        torch.tensor(draw(st.lists(st.integers(0, 1), min_size=arms, max_size=arms)), dtype=torch.int32),
        new_prefix_counters("cpu", arms),
    )


@pytest.mark.parametrize("form", MODULES, ids=FORMS)
@given(call=calls())
def test_matches_reference(form: ModuleType, call: PrefixCall) -> None:
    found, expected = call.counters.clone(), call.counters.clone()
    form.count_into(call._replace(counters=found))
    REFERENCE.count_into(call._replace(counters=expected))
    assert found.tolist() == expected.tolist()


def test_a_row_by_hand() -> None:
    counters = new_prefix_counters("cpu", 2)
    count_stable_prefix(
        torch.tensor([[0, 5, 2, -1], [9, 8, 7, 6], [0, 1, 2, 3]], dtype=torch.int32),
        torch.tensor([6, 10, 2]),
        torch.tensor([4, 4, 4], dtype=torch.int32),
        counting=torch.tensor([1, 0], dtype=torch.int32),
        counters=counters,
        row_phase=torch.tensor([0, 1, 1], dtype=torch.int8),
        row_arm=torch.tensor([0, 1, 0], dtype=torch.int32),
    )
    columns = [PrefixCounter.ROWS, PrefixCounter.VISIBLE, PrefixCounter.UNSELECTED]
    assert counters[0][:, columns].tolist() == [[1, 4, 2], [1, 2, 0]]
    assert counters[1].sum() == 0


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("selection", torch.zeros(2, 3), "count_stable_prefix.selection"),
        ("row_prefix", torch.zeros(2, dtype=torch.int64), "count_stable_prefix.row_prefix"),
        ("row_lengths", torch.zeros(3, dtype=torch.int64), "count_stable_prefix.row_lengths"),
        ("counting", torch.zeros(1), "count_stable_prefix.counting"),
        ("counters", torch.zeros(2, 2, 3, dtype=torch.int64), "count_stable_prefix.counters"),
        ("row_arm", torch.zeros(2, dtype=torch.int64), "count_stable_prefix.row_arm"),
    ],
)
def test_refuses(name: str, value: torch.Tensor, message: str) -> None:
    arguments: dict[str, Any] = {
        "selection": torch.zeros(2, 3, dtype=torch.int32),
        "row_lengths": torch.ones(2, dtype=torch.int32),
        "row_prefix": torch.ones(2, dtype=torch.int32),
        "counting": torch.ones(1, dtype=torch.int32),
        "counters": new_prefix_counters(),
    }
    with pytest.raises(ArgumentError, match=message):
        count_stable_prefix(**(arguments | {name: value}))
