"""Whatever the order of calls, a layer gets what its own conversion would give it."""

from __future__ import annotations

from typing import NamedTuple

from batches import BLOCK, NEAR, Batch, Layers
from hypothesis import given
from hypothesis import strategies as st

from kvplugin.remap import Member
from kvplugin.remap.groups import GroupLayout, Placement
from kvplugin.remap.layouts import layout_from_mask

MEMBERS = (NEAR, Member(3 * BLOCK), Member(3 * BLOCK, row_offset=BLOCK))
LAYERS = 6


class Event(NamedTuple):
    """A layer's call for one of two batches, perhaps of a step that is over; before it, both begin a step, or none."""

    layer: int
    batch: int
    begins_step: bool
    late: bool


SELDOM = st.sampled_from([False] * 4 + [True])
EVENTS = st.lists(
    st.builds(Event, layer=st.integers(0, LAYERS - 1), batch=st.integers(0, 1), begins_step=SELDOM, late=SELDOM),
    max_size=30,
)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[GroupLayout, list[Member]]:
    """Any pattern, with the places of its layers known, or unknown and equal."""
    layout = layout_from_mask(draw(st.lists(st.booleans(), min_size=LAYERS, max_size=LAYERS)))
    if draw(st.booleans()):
        return layout, [NEAR] * LAYERS
    members = draw(st.lists(st.sampled_from(MEMBERS), min_size=LAYERS, max_size=LAYERS))
    return layout.placed({i: Placement(member, BLOCK, 0) for i, member in enumerate(members)}), members


@given(layouts(), EVENTS, st.booleans())
def test_results_are_those_of_an_own_conversion(
    drawn: tuple[GroupLayout, list[Member]], events: list[Event], grouped: bool
) -> None:
    layout, members = drawn
    layers, batches = Layers(layout, grouped=grouped), (Batch(seed=1), Batch(seed=2, rows=3))
    steps = past = [layers.memo.begin_step(batch) for batch in batches]
    for event in events:
        if event.begins_step:
            past, steps = steps, [layers.memo.begin_step(batch) for batch in batches]
            for batch in batches:
                batch.refill()
        batch = batches[event.batch]
        group = layout.group_of(event.layer)
        assert group is not None
        if group.leader == event.layer:  # its indexer has just written a new selection
            batch.refill()
        step = (past if event.late else steps)[event.batch]
        layers.run(batch.call(step, event.layer, members[event.layer]))
    counted = layers.paths()
    assert sum(counted.values()) == len(events)
    assert grouped or set(counted) <= {"per_layer"}


@given(layouts(), st.integers(1, 3))
def test_steps_in_order_convert_as_often_as_the_layout_says(
    drawn: tuple[GroupLayout, list[Member]], steps: int
) -> None:
    layout, members = drawn
    layers, batch = Layers(layout), Batch()
    for _ in range(steps):
        step = layers.memo.begin_step(batch)
        for layer in range(LAYERS):
            layers.run(batch.call(step, layer, members[layer]))
    counted = layers.paths()
    assert "fallback" not in counted
    assert counted.get("grouped", 0) + counted.get("per_layer", 0) == steps * layout.conversions
