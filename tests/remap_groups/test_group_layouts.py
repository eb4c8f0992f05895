from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplugin.errors import ArgumentError
from kvplugin.remap.call import Member
from kvplugin.remap.groups import GroupKind, GroupLayout, Inactive, Placement
from kvplugin.remap.layouts import layout_from_config, layout_from_mask, leader_mask

GLM52 = layout_from_config(78, index_topk_freq=4, index_skip_topk_offset=2)


def layers(layout: GroupLayout) -> list[tuple[int, ...]]:
    return [group.layers for group in layout.groups]


def test_glm52() -> None:
    leaders = [group.leader for group in GLM52.groups]
    assert leaders == [0, 1, *range(5, 78, 4)]
    assert len(leaders) == 21
    assert sum(len(group.layers) - 1 for group in GLM52.groups) == 57
    assert [group.layers for group in GLM52.groups if group.inactive is Inactive.SINGLETON] == [(0,), (77,)]
    assert GLM52.conversions == 21


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        pytest.param({"index_topk_pattern": "FSSFSS"}, [(0, 1, 2), (3, 4, 5)], id="pattern"),
        pytest.param({"index_topk_pattern": list("FFSSFS")}, [(0,), (1, 2, 3), (4, 5)], id="pattern as a list"),
        pytest.param({"index_topk_pattern": "FSSFSSFS"}, [(0, 1, 2), (3, 4, 5)], id="letters beyond the last layer"),
        pytest.param({"index_topk_pattern": "SSFSSF"}, [(0,), (1,), (2, 3, 4), (5,)], id="begins with S"),
        pytest.param({"index_topk_pattern": "FSSFSS", "index_topk_freq": 2}, [(0, 1, 2), (3, 4, 5)], id="pattern wins"),
        pytest.param({}, [(i,) for i in range(6)], id="plain V3.2"),
        pytest.param({"index_topk_freq": 3}, [(0,), (1, 2, 3), (4, 5)], id="every third"),
        pytest.param({"index_topk_freq": 3, "index_skip_topk_offset": 0}, [(0,), (1,), (2, 3, 4), (5,)], id="offset 0"),
        pytest.param({"index_topk_freq": 2, "index_skip_topk_offset": 9}, [(i,) for i in range(6)], id="offset beyond"),
    ],
)
def test_groups_follow_from_the_configuration(config: dict[str, Any], expected: list[tuple[int, ...]]) -> None:
    assert layers(layout_from_config(6, **config)) == expected


def test_a_stage_that_begins_on_a_shared_layer_has_orphans() -> None:
    layout = layout_from_config(6, index_topk_pattern="FSSFSS", stage=range(1, 6))
    assert layers(layout) == [(1,), (2,), (3, 4, 5)]
    assert [group.kind for group in layout.groups] == [GroupKind.ORPHAN, GroupKind.ORPHAN, GroupKind.TARGET]
    assert [group.inactive for group in layout.groups] == [Inactive.ORPHAN, Inactive.ORPHAN, None]
    assert [group.leader for group in layout.groups] == [None, None, 3]
    assert layout.conversions == 3


def test_mtp_layers_never_join_the_target() -> None:
    layout = layout_from_config(3, index_topk_pattern="FSSSS", mtp_layers=2)
    assert layers(layout) == [(0, 1, 2), (3,), (4,)]
    assert [group.kind for group in layout.groups] == [GroupKind.TARGET, GroupKind.MTP, GroupKind.MTP]
    assert [group.leader for group in layout.groups] == [0, 3, 4]


@pytest.mark.parametrize(
    ("layout", "inert"),
    [
        (layout_from_config(5), True),
        (layout_from_config(5, index_topk_pattern="FFFFF", mtp_layers=1), True),
        (layout_from_config(5, index_topk_pattern="SSSSS"), True),
        (layout_from_config(0), True),
        (layout_from_config(5, index_topk_pattern="FFFFS"), False),
    ],
)
def test_only_singletons_make_it_inert(layout: GroupLayout, inert: bool) -> None:
    assert layout.inert is inert
    assert not inert or layout.conversions == sum(map(len, layers(layout)))


NEAR = Placement(Member(64), 64, "table")
PLACEMENTS = {
    "alike": ([NEAR] * 3, None, (Member(64),)),
    "own strides": (
        [NEAR, NEAR._replace(member=Member(192)), NEAR._replace(member=Member(64, row_offset=64))],
        None,
        (Member(64), Member(192), Member(64, 64)),
    ),
    "shared strides": ([NEAR, NEAR._replace(member=Member(192)), NEAR], None, (Member(64), Member(192))),
    "one unknown": ([NEAR, None, NEAR], Inactive.PLACEMENT_UNKNOWN, ()),
    "block sizes": ([NEAR, NEAR, NEAR._replace(block_size=16)], Inactive.BLOCK_SIZES_DIFFER, ()),
    "tables": ([NEAR, NEAR, NEAR._replace(table="other")], Inactive.BLOCK_TABLES_DIFFER, ()),
}


@pytest.mark.parametrize("name", PLACEMENTS)
def test_placements_decide_whether_a_group_is_active(name: str) -> None:
    found, inactive, members = PLACEMENTS[name]
    known = {5 + i: placement for i, placement in enumerate(found) if placement is not None}
    layout = layout_from_mask([True, False, False], layers=range(5, 8)).placed(known)
    assert layout.groups[0].inactive == inactive
    assert layout.groups[0].members == members
    assert layout.conversions == (1 if inactive is None else 3)


def test_placements_do_not_revive_orphans_and_singletons() -> None:
    layout = layout_from_mask([False, True], mtp_layers=[2]).placed(dict.fromkeys(range(3), NEAR))
    assert [group.inactive for group in layout.groups] == [Inactive.ORPHAN, Inactive.SINGLETON, Inactive.SINGLETON]


@given(
    leads=st.lists(st.booleans(), max_size=12),
    gaps=st.lists(st.integers(1, 3), min_size=14, max_size=14),
    drafts=st.integers(0, 2),
)
def test_every_layer_is_in_exactly_one_group(leads: list[bool], gaps: list[int], drafts: int) -> None:
    numbers = [sum(gaps[: i + 1]) for i in range(len(leads) + drafts)]
    target, mtp = numbers[: len(leads)], numbers[len(leads) :]
    layout = layout_from_mask(leads, layers=target, mtp_layers=mtp)
    assert [layer for group in layout.groups for layer in group.layers] == numbers
    for layer, runs_indexer in zip(target, leads, strict=True):
        group = layout.group_of(layer)
        assert group is not None
        assert (group.leader == layer) is runs_indexer
    for group in layout.groups:
        assert (group.inactive is None) == (len(group.layers) > 1)
    assert layout.group_of(-1) is None


@given(freq=st.integers(1, 6), offset=st.integers(0, 8), num_layers=st.integers(0, 20), cut=st.integers(0, 20))
def test_stages_agree_with_the_whole_model(freq: int, offset: int, num_layers: int, cut: int) -> None:
    config = {"index_topk_freq": freq, "index_skip_topk_offset": offset}
    cut = min(cut, num_layers)
    stages = [layout_from_config(num_layers, stage=stage, **config) for stage in (range(cut), range(cut, num_layers))]
    leaders = [group.leader for stage in stages for group in stage.groups if group.leader is not None]
    mask = leader_mask(num_layers, **config)
    assert leaders == [layer for layer, leads in enumerate(mask) if leads]


REFUSED = {
    "short pattern": (
        lambda: layout_from_config(78, index_topk_pattern="FSS"),
        "leader_mask.index_topk_pattern: 3 letters for 78 layers; give one letter a layer",
    ),
    "unknown letter": (
        lambda: layout_from_config(3, index_topk_pattern="FsS"),
        "leader_mask.index_topk_pattern: 's' for layer 1; use F (runs the indexer) or S (shares)",
    ),
    "frequency 0": (
        lambda: layout_from_config(3, index_topk_freq=0),
        "leader_mask.index_topk_freq: 0; must be a whole number of at least 1",
    ),
    "frequency no number": (
        lambda: leader_mask(3, index_topk_freq=True),
        "leader_mask.index_topk_freq: True; must be a whole number of at least 1",
    ),
    "negative offset": (
        lambda: leader_mask(3, index_skip_topk_offset=-1),
        "leader_mask.index_skip_topk_offset: -1; must be a whole number of at least 0",
    ),
    "negative layers": (
        lambda: leader_mask(-1),
        "leader_mask.num_layers: -1; must be a whole number of at least 0",
    ),
    "stage beyond": (
        lambda: layout_from_config(6, stage=range(3, 7)),
        "layout_from_config.stage: range(3, 7); must lie in range(0, 6)",
    ),
    "negative drafts": (
        lambda: layout_from_config(6, mtp_layers=-1),
        "layout_from_config.mtp_layers: -1; must be a whole number of at least 0",
    ),
    "mask of letters": (
        lambda: layout_from_mask("FSS"),  # type: ignore[arg-type]
        "layout_from_mask.leads: 'F' at 0; must be True or False",
    ),
    "mask of another length": (
        lambda: layout_from_mask([True, False], layers=[0]),
        "layout_from_mask.layers: 1 numbers; give 2, one for each of leads",
    ),
    "layers fall": (
        lambda: layout_from_mask([True, False], layers=[3, 3]),
        "layout_from_mask.layers: 3 after 3; numbers must rise, from 0 or more",
    ),
    "draft inside the target": (
        lambda: layout_from_mask([True, False], mtp_layers=[1]),
        "layout_from_mask.mtp_layers: 1 after 1; numbers must rise, from 0 or more",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name: str) -> None:
    build, message = REFUSED[name]
    with pytest.raises(ArgumentError) as refusal:
        build()
    assert str(refusal.value) == message
