"""Rows of several arms in one call: each follows its own policy, whatever the implementation."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from devices import device_of
from hypothesis import given
from hypothesis import strategies as st
from policy_cases import Case, bits, every_implementation, lift, run, to_device
from strategies import MERGE_MODES, cases, policies

from kvplugin.config import Eviction, Mode, PolicyConfig, Witness
from kvplugin.errors import ArgumentError
from kvplugin.topology import (
    MOST_ARMS,
    PolicyParams,
    PolicyTable,
    apply_topology_policy,
    lift_structural_scores,
    lower,
    new_counters,
    triton_ops,
)
from kvplugin.topology.arms import apply_arms_into, lift_arms_into
from kvplugin.topology.call import ArmsCall, LiftArmsCall
from kvplugin.topology.counters import Counter
from kvplugin.topology.table import FIELDS, decode, encode

OFF = PolicyConfig()
MERGE = PolicyConfig(mode=Mode.SPARSE_MERGE, sink_tokens=1, local_tokens=1, max_structural_fraction=0.5)


def apply_arms(
    implementation: ModuleType, case: Case, arms: list[PolicyParams], row_arm: list[int] | None, *, on: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and counters ``[arms, 2, len(Counter)]`` after a call of several arms; two stripes where there can be."""
    device = device_of(implementation)
    table = PolicyTable(arms, device)
    table.switch(on=on)
    given = {name: to_device(value, device) for name, value in vars(case).items() if name not in ("params", "layout")}
    given["topk"] = given["topk"].clone()
    counters = new_counters(device, 2, len(arms))
    call = ArmsCall(
        **given,
        row_arm=None if row_arm is None else torch.tensor(row_arm, dtype=torch.int32, device=device),
        policies=table.rows,
        enabled=table.enabled,
        listed_witnesses=table.listed_witnesses,
        counters=counters,
        error=torch.zeros(4, dtype=torch.int64, device=device),
    )
    if implementation is triton_ops:
        implementation.apply_arms_into(call)
    else:
        apply_arms_into(implementation, call)
    return call.topk.cpu(), counters.sum(0).cpu()


@every_implementation
@given(case=cases(), data=st.data())
def test_each_row_follows_its_arm(implementation: ModuleType, case: Case, data: st.DataObject) -> None:
    arms = [case.params, data.draw(policies(case.params.width)), lower(OFF, case.params.width)]
    row_arm = data.draw(st.lists(st.integers(0, 2), min_size=len(case.topk), max_size=len(case.topk)))
    topk, counters = apply_arms(implementation, case, arms, row_arm)
    for arm, params in enumerate(arms):
        own = torch.tensor([mine == arm for mine in row_arm])
        live = own if case.row_live is None else own & case.row_live
        alone = run(implementation, Case(**{**vars(case), "row_live": live, "params": params}))
        assert torch.equal(counters[arm], alone.counters), f"counters of arm {arm} with rows {row_arm}"
        assert torch.equal(topk[own].sort(1).values, alone.topk[own].sort(1).values), f"rows of arm {arm}"


@every_implementation
@given(case=cases(), unknown=st.sampled_from((-1, 1, 2**31 - 1, -(2**31))))
def test_rows_of_an_unknown_arm_are_bypassed(implementation: ModuleType, case: Case, unknown: int) -> None:
    topk, counters = apply_arms(implementation, case, [case.params], [unknown] * len(case.topk))
    alive = torch.tensor(case.per_row("row_live", 1), dtype=torch.bool)
    live = (alive & (case.row_lengths >= 0)).tolist()
    assert torch.equal(topk, case.topk)
    assert counters.sum((0, 1)).nonzero().flatten().tolist() == [Counter.SEEN, Counter.BYPASS_UNKNOWN_ARM] * any(live)
    assert int(counters[0, :, Counter.BYPASS_UNKNOWN_ARM].sum()) == sum(live)


@every_implementation
@given(case=cases())
def test_the_switch_leaves_nothing_on(implementation: ModuleType, case: Case) -> None:
    topk, counters = apply_arms(implementation, case, [case.params], None, on=False)
    assert torch.equal(topk, case.topk)
    assert not counters.any()


@every_implementation
@given(case=cases(MERGE_MODES, eviction=Eviction.LOWEST_SCORE, witness=Witness.UNIFORM), data=st.data())
def test_a_lift_follows_each_rows_arm(implementation: ModuleType, case: Case, data: st.DataObject) -> None:
    other = data.draw(policies(case.params.width, (*MERGE_MODES, Mode.OBSERVE), witness=Witness.UNIFORM))
    row_arm = data.draw(st.lists(st.integers(-1, 2), min_size=len(case.topk), max_size=len(case.topk)))
    device = device_of(implementation)
    table = PolicyTable([case.params, other], device)
    scores = case.scores.clone().to(device)
    rows = (case.row_lengths, case.row_live, case.row_phase, torch.tensor(row_arm, dtype=torch.int32), case.score_start)
    call = LiftArmsCall(
        scores, *(to_device(values, device) for values in rows), table.rows, table.enabled, case.params.width
    )
    if implementation is triton_ops:
        implementation.lift_arms_into(call)
    else:
        lift_arms_into(implementation, call)
    expected = case.scores.clone()
    for arm, params in enumerate([case.params, other]):
        own = torch.tensor([mine == arm for mine in row_arm])
        expected[own] = lift(implementation, Case(**{**vars(case), "params": params}))[own]
    assert torch.equal(bits(scores.cpu()), bits(expected))


@given(params=st.sampled_from((1, 7, 64)).flatmap(lambda width: policies(width, tuple(Mode))))
def test_a_table_says_what_it_was_told(params: PolicyParams) -> None:
    assert decode(tuple(encode(params))) == params
    assert PolicyTable([params]).rows.shape == (1, len(FIELDS))


def test_an_arm_changes_and_the_switch_works_under_the_same_addresses() -> None:
    table = PolicyTable([lower(OFF, 4), lower(MERGE, 4)])
    before = table.rows.data_ptr(), table.enabled.data_ptr()
    topk, lengths = torch.tensor([[1, 2, 3, 4]], dtype=torch.int32), torch.tensor([6])
    scores, first = torch.arange(6.0)[None], torch.zeros(1, dtype=torch.int32)

    def selected() -> list[int]:
        rows = topk.clone()
        counters = apply_topology_policy(rows, lengths, config=table, row_arm=first, scores=scores)
        assert counters.shape == (2, 2, len(Counter))
        return sorted(rows[0].tolist())

    assert selected() == [1, 2, 3, 4]
    table.set_arm(0, lower(MERGE, 4))
    assert selected() == [0, 3, 4, 5]
    table.switch(on=False)
    assert selected() == [1, 2, 3, 4]
    assert (table.rows.data_ptr(), table.enabled.data_ptr()) == before


def test_a_table_made_in_inference_mode_changes_outside_of_it() -> None:
    with torch.inference_mode():
        table = PolicyTable([lower(OFF, 4)])
    table.set_arm(0, lower(MERGE, 4))
    table.switch(on=False)
    assert not table.enabled.any()


COVERAGE = MERGE.model_copy(update={"witness": Witness.COVERAGE, "coverage_segments": 1, "local_tokens": 0})
OLDEST = MERGE.model_copy(update={"eviction": Eviction.OLDEST})
REFUSED = [
    (lambda: PolicyTable([]), "PolicyTable.arms: no arm; give at least one policy"),
    (
        lambda: PolicyTable([lower(MERGE, 4)] * 17),
        "PolicyTable.capacity: 17 arms in a table of 17; use 1 to 16, and no fewer than there are arms",
    ),
    (
        lambda: PolicyTable([lower(MERGE, 4)] * 2, capacity=1),
        "PolicyTable.capacity: 2 arms in a table of 1; use 1 to 16, and no fewer than there are arms",
    ),
    (
        lambda: PolicyTable([lower(MERGE, 4), lower(MERGE, 8)]),
        "PolicyTable.set_arm.params: lowered for width 8; lower it for 4",
    ),
    (
        lambda: PolicyTable([lower(MERGE, 4)]).set_arm(1, lower(MERGE, 4)),
        "PolicyTable.set_arm.arm: got 1; use 0 to 0",
    ),
    (
        lambda: PolicyTable([lower(MERGE, 4)]).set_arm(0, lower(COVERAGE, 4)),
        "PolicyTable.set_arm.params: needs a list of 1 witnesses, the table holds 0; "
        "make the table with a larger listed_witnesses",
    ),
    (
        lambda: lift_structural_scores(
            torch.zeros(1, 4), torch.tensor([4]), config=PolicyTable([lower(COVERAGE, 4)]), width=4
        ),
        "lift_structural_scores.config: a merge with another eviction than lowest_score, or with witnesses without a "
        "closed form; use lowest_score and uniform witnesses in all arms",
    ),
    (
        lambda: lift_structural_scores(torch.zeros(1, 4), torch.tensor([4]), config=lower(OLDEST, 4), width=4),
        "lift_structural_scores.config: a merge with another eviction than lowest_score, or with witnesses without a "
        "closed form; use lowest_score and uniform witnesses in all arms",
    ),
    (
        lambda: apply_topology_policy(
            torch.zeros(1, 4, dtype=torch.int32),
            torch.tensor([4]),
            config=PolicyTable([lower(MERGE, 4)] * 2),
            counters=new_counters(),
        ),
        f"apply_topology_policy.counters: got int64 [2, {len(Counter)}] on cpu; "
        f"must be int64 [2, 2, {len(Counter)}] on cpu",
    ),
    (
        lambda: apply_topology_policy(
            torch.zeros(1, 4, dtype=torch.int32),
            torch.tensor([4]),
            config=PolicyTable([lower(MERGE, 4)]),
            row_arm=torch.zeros(1, dtype=torch.int64),
        ),
        "apply_topology_policy.row_arm: got int64 [1] on cpu; must be int32 [1] on cpu",
    ),
]


@pytest.mark.parametrize(("refused", "message"), REFUSED)
def test_refused(refused: object, message: str) -> None:
    assert MOST_ARMS == 16
    with pytest.raises(ArgumentError) as refusal:
        refused()
    assert str(refusal.value) == message
