from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from batches import BLOCK, NEAR, PAGES, Batch, Layers, converted
from torch import Tensor

from kvplugin.errors import ArgumentError
from kvplugin.remap import Member, new_remap_counters, remap_grouped
from kvplugin.remap import memo as memo_module
from kvplugin.remap.groups import Placement
from kvplugin.remap.layer_call import LayerCall
from kvplugin.remap.layouts import layout_from_config, layout_from_mask
from kvplugin.remap.memo import GroupMemo
from kvplugin.remap.paths import new_path_counters

LAYOUT = layout_from_config(6, index_topk_pattern="FSSFSS")
FAR, SHIFTED = Member(3 * BLOCK), Member(3 * BLOCK, row_offset=BLOCK)


def run_step(layers: Layers, batch: Batch) -> int:
    """One step of all layers; each leader finds a new selection in the shared buffer."""
    step = layers.memo.begin_step(object())
    for group in LAYOUT.groups:
        batch.refill()
        for layer in group.layers:
            layers.run(batch.call(step, layer))
    return step


def test_one_conversion_for_each_group_in_every_step() -> None:
    layers, batch = Layers(LAYOUT), Batch()
    for _ in range(3):
        run_step(layers, batch)
        assert layers.paths() == {"grouped": 2, "memo": 4}


def test_the_switch_converts_for_each_layer() -> None:
    layers = Layers(LAYOUT, grouped=False)
    run_step(layers, Batch())
    assert layers.paths() == {"per_layer": 6}


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout_from_mask([True] * 3), id="singletons"),
        pytest.param(layout_from_mask([False] * 3), id="orphans"),
        pytest.param(layout_from_mask([], mtp_layers=range(3)), id="drafts"),
        pytest.param(layout_from_mask([True, False, False]).placed({}), id="inactive group"),
        pytest.param(layout_from_mask([]), id="layers without a layout"),
    ],
)
def test_layers_without_an_active_group_convert_for_themselves(layout: Any) -> None:
    layers, batch = Layers(layout), Batch()
    step = layers.memo.begin_step(object())
    for layer in range(3):
        layers.run(batch.call(step, layer))
    assert layers.paths() == {"per_layer": 3}


def test_no_step_reads_the_results_of_another(caplog: pytest.LogCaptureFixture) -> None:
    """Addresses, shapes and numbers are those of the last step; only the contents are new."""
    layers, batch = Layers(LAYOUT), Batch()
    run_step(layers, batch)
    layers.paths()
    step = layers.memo.begin_step(object())
    batch.refill()
    layers.run(batch.call(step, 1))
    layers.run(batch.call(step, 5))
    assert layers.paths() == {"fallback": 2}
    assert [record.message for record in caplog.records] == [
        "kvplugin: remap: layer 1 converts for itself (fallback): its leader has left no result in this step"
    ]


def test_a_draft_pass_is_a_step() -> None:
    """The target's followers do not read what was left before it, nor does the pass read the target's."""
    layers, batch = Layers(layout_from_mask([True, False], mtp_layers=[2])), Batch()
    target = layers.memo.begin_step(object())
    layers.run(batch.call(target, 0))
    draft = layers.memo.begin_step(object())
    batch.refill()
    layers.run(batch.call(draft, 2))
    layers.run(batch.call(draft, 1))
    assert layers.paths() == {"grouped": 1, "per_layer": 1, "fallback": 1}


def test_a_call_of_a_past_step_leaves_nothing() -> None:
    layers, batch = Layers(LAYOUT), Batch()
    past = run_step(layers, batch)
    layers.paths()
    step = layers.memo.begin_step(object())
    layers.run(batch.call(past, 0))
    layers.run(batch.call(past, 1))
    layers.run(batch.call(step, 2))
    assert layers.paths() == {"fallback": 3}


def test_a_call_of_a_past_step_ends_the_results_of_this_one() -> None:
    """It has come with a selection of its own, into the buffer that this step's followers read."""
    layers, batch = Layers(LAYOUT), Batch()
    past = run_step(layers, batch)
    layers.paths()
    step = layers.memo.begin_step(batch)
    layers.run(batch.call(step, 0))
    batch.refill()
    layers.run(batch.call(past, 3))
    layers.run(batch.call(step, 1))
    assert layers.paths() == {"grouped": 1, "fallback": 2}


def test_a_leader_that_cannot_convert_leaves_no_older_result() -> None:
    layers, batch = Layers(placed(NEAR, NEAR)), Batch()
    step = layers.memo.begin_step(batch)
    layers.run(batch.call(step, 0))
    batch.refill()
    layers.run(batch.call(step, 0, FAR))
    layers.run(batch.call(step, 1))
    assert layers.paths() == {"grouped": 1, "fallback": 2}


def test_groups_do_not_meet() -> None:
    """A follower after another group's leader: the buffer already holds that group's selection."""
    layers, batch = Layers(LAYOUT), Batch()
    step = layers.memo.begin_step(object())
    layers.run(batch.call(step, 0))
    batch.refill()
    layers.run(batch.call(step, 3))
    layers.run(batch.call(step, 1))
    layers.run(batch.call(step, 4))
    assert layers.paths() == {"grouped": 2, "fallback": 1, "memo": 1}


def test_an_indexer_outside_the_groups_ends_a_result_too() -> None:
    """A leader without followers writes to the same buffer."""
    layers, batch = Layers(layout_from_mask([True, False, True])), Batch()
    step = layers.memo.begin_step(batch)
    layers.run(batch.call(step, 0))
    batch.refill()
    layers.run(batch.call(step, 2))
    layers.run(batch.call(step, 1))
    assert layers.paths() == {"grouped": 1, "per_layer": 1, "fallback": 1}


def copied(call: LayerCall, name: str) -> LayerCall:
    return call._replace(**{name: getattr(call, name).clone()})


OTHER_INPUTS = {
    "topk": lambda call: copied(call, "topk"),
    "block_table": lambda call: copied(call, "block_table"),
    "topk of fewer rows": lambda call: call._replace(topk=call.topk[:3], request_of_row=call.request_of_row[:3]),
    "topk of fewer slots": lambda call: call._replace(topk=call.topk[:, :6]),
    "block_table of fewer columns": lambda call: call._replace(block_table=call.block_table[:, :4]),
    "block_size": lambda call: call._replace(block_size=2),
    "num_blocks": lambda call: call._replace(num_blocks=PAGES // 2),
    "stride": lambda call: call._replace(member=FAR),
}


@pytest.mark.parametrize("name", OTHER_INPUTS)
def test_a_follower_with_other_inputs_converts_for_itself(name: str, caplog: pytest.LogCaptureFixture) -> None:
    layers, batch = Layers(LAYOUT), Batch()
    step = layers.memo.begin_step(object())
    layers.run(batch.call(step, 0))
    for follower in (1, 2):
        layers.run(OTHER_INPUTS[name](batch.call(step, follower)))
    assert layers.paths() == {"grouped": 1, "fallback": 2}
    (warning,) = [record.message for record in caplog.records]
    assert warning.startswith(f"kvplugin: remap: layer 1 converts for itself (fallback): its {name.split()[0]} is not")
    layers.run(batch.call(step, 2))
    assert layers.paths() == {"memo": 1}, "the leader's result was lost"


def placed(*members: Member) -> Any:
    layout = layout_from_mask([True] + [False] * (len(members) - 1))
    return layout.placed({layer: Placement(member, BLOCK, "table") for layer, member in enumerate(members)})


def test_members_with_known_places_share_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[Member, ...]] = []

    def note(*arguments: Any, members: tuple[Member, ...], **options: Any) -> Any:
        launched.append(members)
        return remap_grouped(*arguments, members=members, **options)

    monkeypatch.setattr(memo_module, "remap_grouped", note)
    places = (NEAR, FAR, NEAR, SHIFTED)
    layers, batch = Layers(placed(*places)), Batch()
    step = layers.memo.begin_step(object())
    found = [layers.run(batch.call(step, layer, member)) for layer, member in enumerate(places)]
    assert launched == [(NEAR, FAR, SHIFTED)], "equal places are computed once"
    assert layers.paths() == {"grouped": 1, "memo": 3}
    assert found[0].data_ptr() == found[2].data_ptr()
    for layer, member in enumerate(places):
        assert torch.equal(found[layer], converted(batch.call(step, layer, member)))


@pytest.mark.parametrize("moved", [0, 1], ids=["leader", "follower"])
def test_a_cache_that_moved_is_not_read_at_its_old_place(moved: int) -> None:
    layers, batch = Layers(placed(NEAR, NEAR, NEAR)), Batch()
    step = layers.memo.begin_step(object())
    for layer in range(3):
        layers.run(batch.call(step, layer, SHIFTED if layer == moved else NEAR))
    assert layers.paths() == ({"fallback": 3} if moved == 0 else {"grouped": 1, "fallback": 1, "memo": 1})


def test_micro_batches_by_turns_do_not_mix() -> None:
    """Leaders and followers are told about each batch apart, as vLLM does, in either order of telling."""
    layers, batches = Layers(LAYOUT), (Batch(seed=1), Batch(seed=2, rows=3))
    for order in ((0, 0, 1, 1), (0, 1, 0, 1)):
        numbers = [layers.memo.begin_step(batches[i]) for i in order]
        steps = dict(zip(order, numbers, strict=True))
        assert len(set(numbers)) == 2
        for layer in range(6):
            for i, batch in enumerate(batches):
                layers.run(batch.call(steps[i], layer))
        assert layers.paths() == {"grouped": 4, "memo": 8}


def test_a_batch_told_to_more_layers_is_the_same_step_until_something_is_converted() -> None:
    layers, batch = Layers(LAYOUT), Batch()
    step = layers.memo.begin_step(batch)
    assert layers.memo.begin_step(batch) == step
    layers.run(batch.call(step, 0))
    batch.refill()
    again = layers.memo.begin_step(batch)
    assert again != step, "the same object in the next step"
    layers.run(batch.call(again, 1))
    assert layers.paths() == {"grouped": 1, "fallback": 1}


def test_copies_of_the_row_map_are_one_batch() -> None:
    layers, batch = Layers(LAYOUT), Batch()
    step = layers.memo.begin_step(batch)
    for layer in range(3):
        layers.run(copied(batch.call(step, layer), "request_of_row"))
    assert layers.paths() == {"grouped": 1, "memo": 2}


def test_the_layout_is_read_once_and_not_before_it_is_needed() -> None:
    reads: list[int] = []

    def read() -> Any:
        reads.append(1)
        return LAYOUT

    batch = Batch()
    for grouped in (False, True):
        memo = GroupMemo(read, grouped=grouped, paths=new_path_counters())
        step = memo.begin_step(batch)
        assert reads == []
        for layer in range(6):
            memo.convert(batch.call(step, layer))
    assert reads == [1]


def test_a_failing_group_falls_back_layer_by_layer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    layers, batch = Layers(placed(NEAR, FAR, NEAR)), Batch()
    attempts = 0

    def fail_for_groups(*arguments: Any, members: tuple[Member, ...], **options: Any) -> Any:
        nonlocal attempts
        if len(members) > 1:
            attempts += 1
            raise RuntimeError("no such kernel")
        return remap_grouped(*arguments, members=members, **options)

    monkeypatch.setattr(memo_module, "remap_grouped", fail_for_groups)
    for _ in range(2):
        step = layers.memo.begin_step(object())
        for layer, member in enumerate((NEAR, FAR, NEAR)):
            layers.run(batch.call(step, layer, member))
    assert layers.paths() == {"fallback": 6}
    assert attempts == 1
    assert "no such kernel" in caplog.text
    assert [record.levelno for record in caplog.records] == [logging.ERROR, logging.WARNING]


def test_what_cannot_be_converted_at_all_is_raised() -> None:
    layers, batch = Layers(LAYOUT), Batch()
    call = batch.call(layers.memo.begin_step(object()), 0)._replace(request_of_row=torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ArgumentError, match="request_of_row"):
        layers.memo.convert(call)
    assert layers.paths() == {}


def test_memory_is_used_again() -> None:
    layers, batch = Layers(LAYOUT), Batch()
    addresses: set[int] = set()
    for _ in range(20):
        step = layers.memo.begin_step(object())
        addresses |= {layers.run(batch.call(step, layer)).data_ptr() for layer in range(6)}
    assert len(addresses) == 1
    batches = [Batch(rows=rows) for rows in range(1, 200)]
    grown = {layers.run(larger.call(layers.memo.begin_step(larger), 0)).data_ptr() for larger in batches}
    assert len(grown) <= 7, "memory moved at each larger batch"


def test_a_conversion_beside_the_group_leaves_its_result() -> None:
    layers, batch = Layers(LAYOUT), Batch()
    step = layers.memo.begin_step(object())
    kept = layers.run(batch.call(step, 0))
    before = kept.clone()
    layers.run(Batch(seed=9).call(step, 1))
    assert torch.equal(kept, before)


def test_rows_are_arranged_and_bad_slots_counted_once_per_conversion() -> None:
    arranged: list[int] = []

    def descending(topk: Tensor) -> Tensor:
        arranged.append(topk.data_ptr())
        return topk.sort(dim=1, descending=True).values

    invalid, batch = new_remap_counters(), Batch()
    memo = GroupMemo(lambda: LAYOUT, grouped=True, paths=new_path_counters(), invalid=invalid, arrange=descending)
    step = memo.begin_step(batch)
    batch.tensors[0][0, 0] = 6 * BLOCK
    for layer in range(3):
        found = memo.convert(batch.call(step, layer))
        assert torch.equal(found, converted(batch.call(step, layer)._replace(topk=descending(batch.tensors[0]))))
    assert len(arranged) == 1 + 3
    assert int(invalid.sum()) == 1


@pytest.mark.parametrize("rows", [0, 1])
def test_empty_and_single_rows(rows: int) -> None:
    layers, batch = Layers(LAYOUT), Batch(rows=rows)
    step = layers.memo.begin_step(object())
    for layer in range(3):
        assert layers.run(batch.call(step, layer)).shape == (rows, batch.width)
    assert layers.paths() == {"grouped": 1, "memo": 2}
