"""Signals of the indexer's health: every form equals the oracle, and rows that can be worked out by hand."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import pytest
import torch
from devices import device_of, each_of, numba_form
from hypothesis import given
from hypothesis import strategies as st
from policy_cases import Layout, lay_out, to_device
from strategies import NAN_LOGITS_INDEX, SCORE_DTYPES, hazards_for, policies, score_matrices

from kvplugin.config import Eviction, Mode, PolicyConfig
from kvplugin.errors import ArgumentError
from kvplugin.topology import PolicyParams, PolicyTable, lower, signals
from kvplugin.topology.signals import (
    BOUNDS,
    UNIT,
    Signal,
    SignalColumn,
    SignalMemory,
    columns_of,
    new_signal_counters,
    observe_signals,
    reference,
    torch_ops,
    triton_ops,
)
from kvplugin.topology.signals.call import SignalCall
from kvplugin.topology.signals.reference import is_sampled

FAST = {"torch_ops": torch_ops, "numba_ops": numba_form(signals.__name__), "triton_ops": triton_ops}
every_fast_form, every_form = each_of(FAST), each_of({"reference": reference, **FAST})
LEADERS = 3
REQUEST_6 = torch.tensor([6], dtype=torch.int32)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call, and what the memory holds before it: ``state`` maps (leader, slot) to (request, length, tokens)."""

    learned: torch.Tensor
    row_lengths: torch.Tensor
    arms: list[PolicyParams]
    every: int = 1
    row_live: torch.Tensor | None = None
    row_phase: torch.Tensor | None = None
    row_arm: torch.Tensor | None = None
    row_request: torch.Tensor | None = None
    scores: torch.Tensor | None = None
    score_start: torch.Tensor | None = None
    slots: int = 0
    leader: int = 0
    state: dict[tuple[int, int], tuple[int, int, list[int]]] | None = None
    layout: Layout = Layout.PLAIN
    on: bool = True


@dataclass(frozen=True)
class Outcome:
    """The histograms, and the memory: (request, length, set of tokens) for each leader and slot."""

    counters: torch.Tensor
    memory: list[list[tuple[list[int], set[int]]]]

    def buckets(self, signal: Signal, arm: int = 0, phase: int = 1) -> list[int]:
        return self.counters[arm, phase, list(columns_of(signal)[:-1])].tolist()

    def value(self, signal: Signal, arm: int = 0, phase: int = 1) -> float | None:
        """The one value that was observed."""
        seen = sum(self.buckets(signal, arm, phase))
        assert seen <= 1
        return int(self.counters[arm, phase, columns_of(signal)[-1]]) / UNIT if seen else None


def run(form: ModuleType, case: Case) -> Outcome:
    """Run a case on copies of its tensors, and see to it that inputs are only read."""
    device = device_of(form)
    table = PolicyTable(case.arms, device)
    table.switch(on=case.on)
    memory = SignalMemory(LEADERS, case.slots, case.learned.shape[1], device) if case.slots else None
    for (layer, slot), (request, length, tokens) in (case.state or {}).items():
        memory.tags[layer, slot] = torch.tensor([request, length])
        memory.tokens[layer, slot, : len(tokens)] = torch.tensor(sorted(tokens), dtype=torch.int32)
    learned, around = lay_out(case.learned.to(device), case.layout)
    before = around.clone()
    names = ("row_live", "row_phase", "row_arm", "row_request", "score_start")
    counters = new_signal_counters(device, len(case.arms))
    form.observe_into(
        SignalCall(
            learned=learned,
            row_lengths=case.row_lengths.to(device),
            **{name: to_device(getattr(case, name), device) for name in names},
            scores=None if case.scores is None else lay_out(case.scores.to(device), case.layout)[0],
            policies=table.rows,
            enabled=table.enabled,
            every=case.every,
            counters=counters,
            tokens=None if memory is None else memory.tokens,
            tags=None if memory is None else memory.tags,
            leader=case.leader,
        )
    )
    assert torch.equal(around, before), "the learned rows were written"
    return Outcome(counters.cpu(), [] if memory is None else _sets(memory))


def _sets(memory: SignalMemory) -> list[list[tuple[list[int], set[int]]]]:
    sets = [[set(tokens) - {-1} for tokens in layer] for layer in memory.tokens.tolist()]
    for tokens in memory.tokens.flatten(0, 1).tolist():
        count = sum(token != -1 for token in tokens)
        assert tokens[count:] == [-1] * (len(tokens) - count), "an unused place before a used one"
    return [list(zip(tags, layer, strict=True)) for tags, layer in zip(memory.tags.tolist(), sets, strict=True)]


def assert_agree(found: Outcome, expected: Outcome) -> None:
    sums = [columns_of(signal)[-1] for signal in Signal]
    names = [column.name for column in SignalColumn]
    for arm, phase, column in (found.counters != expected.counters).nonzero().tolist():
        here, there = (int(outcome.counters[arm, phase, column]) for outcome in (found, expected))
        close = column in sums and abs(here - there) <= 2
        assert close, f"arm {arm}, phase {phase}, {names[column]}: {here}, should be {there}"
    assert found.memory == expected.memory


@st.composite
def arms_of(draw: st.DrawFn, width: int) -> PolicyParams:
    """A policy; mostly one that would evict, and has witnesses."""
    if draw(st.sampled_from([False, False, False, True])):
        return draw(policies(width, tuple(Mode)[1:]))
    block, room = draw(st.sampled_from([1, 2, 3])), width
    sizes = {}
    for name, unit, usual in (("sink_tokens", 1, 2), ("local", block, 1), ("witness_blocks", block, 2)):
        sizes[name] = min(draw(st.integers(0, usual + 1)), room // unit)
        room -= sizes[name] * unit
    sizes["local_blocks" if draw(st.booleans()) else "local_tokens"] = sizes.pop("local")
    config = PolicyConfig(
        mode=draw(st.sampled_from([Mode.SPARSE_MERGE, Mode.SPARSE_MERGE, Mode.OBSERVE, Mode.COMPRESS_SPARSE])),
        eviction=draw(st.sampled_from([Eviction.LOWEST_SCORE] * 3 + list(Eviction))),
        block_size=block,
        max_structural_fraction=1.0,
        **sizes,
    )
    return lower(config, width)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    rows, width = draw(st.sampled_from([3, 4, 1, 0])), draw(st.sampled_from([7, 16, 16, 1, 3]))
    arms = draw(st.lists(arms_of(width), min_size=1, max_size=2))
    arms += [lower(PolicyConfig(), width)] * draw(st.integers(0, 1))
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    usual = [3 * width, 3 * width + 1, 2 * width + 8, width + 1, width + 1]
    lengths = st.sampled_from([*usual * 2, width, width - 1, 1, 0, -7, 100_000, NAN_LOGITS_INDEX])

    def column(values: Any, kind: torch.dtype) -> torch.Tensor:
        return torch.tensor(draw(st.lists(values, min_size=rows, max_size=rows)), dtype=kind)

    def perhaps(values: list[Any], kind: torch.dtype) -> torch.Tensor | None:
        return column(st.sampled_from(values), kind) if draw(st.booleans()) else None

    row_lengths = column(lengths, draw(st.sampled_from([torch.int32, torch.int64])))
    random = Random(draw(st.integers(0, 2**16)))
    learned = [_row(random, width, length, dtype) for length in row_lengths.tolist()]
    scores = draw(score_matrices(rows, 3 * width + 8 + draw(st.sampled_from([2, 2, -1]))))
    if draw(st.booleans()):
        scores = scores.abs()  # so that what leaves weighs something
    slots, leader = draw(st.sampled_from([0, 1, 2, 4, 4])), draw(st.integers(0, LEADERS - 1))
    requests = [0, 1, 5, -1, -(2**31)]
    row_request = column(st.sampled_from(requests), torch.int32) if slots else perhaps(requests, torch.int32)
    state = {}
    if row_request is not None and slots:
        for row, (length, request) in enumerate(zip(row_lengths.tolist(), row_request.tolist(), strict=True)):
            layer, back = [(leader, 1), (leader - 1, 0), (leader, 0), (leader - 1, 0)][row]
            if layer >= 0 and length > back:
                tokens = [t for t in learned[row] if 0 <= t < length - back and random.random() < 0.8]
                state[layer, request % slots] = (request, length - back, sorted(set(tokens)))
    return Case(
        learned=torch.tensor(learned, dtype=dtype).reshape(rows, width),
        row_lengths=row_lengths,
        arms=arms,
        every=draw(st.sampled_from([1, 1, 1, 2, 3])),
        row_live=perhaps([True, True, True, False], torch.bool),
        row_phase=perhaps([1, 1, 0, 2, -1], torch.int8),
        row_arm=perhaps([0, 0, 1, len(arms) - 1, len(arms), -1], torch.int32),
        row_request=row_request,
        scores=scores if draw(st.sampled_from([True, True, True, False])) else None,
        score_start=perhaps([0, 0, 2, -1], draw(st.sampled_from([torch.int32, torch.int64]))),
        slots=slots,
        leader=leader,
        state=state,
        layout=draw(st.sampled_from(Layout)),
        on=draw(st.sampled_from([True] * 9 + [False])),
    )


def _row(random: Random, width: int, length: int, dtype: torch.dtype) -> list[int]:
    """A set of tokens at random places, low ones more often, so that rows overlap; holes and hazards between them."""
    visible = max(0, min(length, 4 * width if random.random() < 0.7 else length))
    most = min(width, visible)
    row = random.sample(range(visible), random.choice([most, most, most, most // 2, 0]))
    hazards = [value for value in hazards_for(length, dtype) if not 0 <= value < length]
    row += [random.choice([-1, -1, -7, random.choice(hazards)]) for _ in range(width - len(row))]
    random.shuffle(row)
    return row


def test_every_form_is_tested() -> None:
    assert {path.stem for path in Path(str(signals.__file__)).parent.glob("*_ops.py")} == set(FAST)


@every_fast_form
@given(case=cases())
def test_matches_reference(implementation: ModuleType, case: Case) -> None:
    assert_agree(run(implementation, case), run(reference, case))


@every_fast_form
@pytest.mark.parametrize("dtype", SCORE_DTYPES)
def test_widths_of_real_buffers(implementation: ModuleType, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    # The interpreter takes a minute to sort a wide row.
    width = 2048 if implementation is not triton_ops or torch.cuda.is_available() else 128
    length = 5 * width // 2
    learned = torch.stack([torch.randperm(length - 1, generator=generator)[:width] for _ in range(3)]).int()
    learned[1, width // 8 : width // 2] = -1
    policy = PolicyConfig(mode=Mode.SPARSE_MERGE, witness_blocks=2, block_size=8, max_structural_fraction=0.5)
    tokens = torch.randperm(length - 1, generator=generator)[: 3 * width // 4].tolist()
    case = Case(
        learned=learned,
        row_lengths=torch.tensor([length, length, width]),
        arms=[lower(policy, width)],
        scores=torch.randn(3, length, generator=generator).to(dtype),
        row_request=torch.tensor([6, 7, 8], dtype=torch.int32),
        slots=4,
        leader=1,
        state={(1, 2): (6, length - 1, tokens), (0, 2): (6, length, tokens[:7]), (1, 3): (7, length - 1, tokens)},
    )
    expected = run(reference, case)
    assert [sum(expected.buckets(signal)) for signal in (Signal.STEP_OVERLAP, Signal.EVICTION_MARGIN)] == [2, 1]
    assert_agree(run(implementation, case), expected)


@every_fast_form
def test_the_last_of_many_rows_of_a_slot_stays(implementation: ModuleType) -> None:
    rows = 131
    case = one_row([1, 2, 3, 4], 9)
    case = replace(
        case,
        learned=torch.arange(rows, dtype=torch.int32)[:, None] + torch.arange(4, dtype=torch.int32),
        row_lengths=torch.full((rows,), 200),
        row_live=torch.tensor([row in (0, 1, 130) for row in range(rows)]),
        row_request=torch.tensor([4 if row == 130 else 0 for row in range(rows)], dtype=torch.int32),
        row_phase=None,
        slots=4,
    )
    assert run(implementation, case).memory[0][0] == ([4, 200], {130, 131, 132, 133})


def one_row(learned: list[int], length: int, scores: dict[int, float] | None = None, **changes: Any) -> Case:
    """A decode row under a policy of one sink and a window of one token; other tokens score NaN."""
    policy = {"mode": Mode.SPARSE_MERGE, "sink_tokens": 1, "local_tokens": 1, "max_structural_fraction": 0.5}
    policy |= {name: changes.pop(name) for name in list(changes) if name in PolicyConfig.model_fields}
    row = [(scores or {}).get(token, float("nan")) for token in range(length)]
    return Case(
        learned=torch.tensor([learned], dtype=torch.int32),
        row_lengths=torch.tensor([length]),
        arms=[lower(PolicyConfig(**policy), len(learned))],
        scores=None if scores is None else torch.tensor([row]),
        row_phase=torch.ones(1, dtype=torch.int8),
        **changes,
    )


SCORES = {2: 1.0, 3: 2.0, 4: 4.0, 9: 3.0}
BY_HAND: dict[str, tuple[Case, dict[Signal, float | None]]] = {
    "an indexer that lost its sinks": (
        one_row([5, 6, 8, 9], 10, sink_tokens=2, local_tokens=2, max_structural_fraction=1.0),
        {Signal.SINK_HIT: 0.0, Signal.LOCAL_HIT: 1.0, Signal.WITNESS_HIT: None, Signal.VALID_DEFICIT: 0.0},
    ),
    "one of two witnesses": (
        # 12 blocks of one token, witnesses 4 and 8.
        one_row([4, 5, 6, 7], 12, witness_blocks=2, block_size=1, max_structural_fraction=1.0),
        {Signal.WITNESS_HIT: 0.5, Signal.SINK_HIT: 0.0, Signal.LOCAL_HIT: 0.0},
    ),
    "token 2 leaves for the sink": (
        one_row([2, 3, 4, 9], 10, SCORES),
        {Signal.EVICTED_SHARE: 0.1, Signal.EVICTION_MARGIN: 1 / 3, Signal.LOCAL_HIT: 1.0},
    ),
    "observed as if it merged": (
        one_row([2, 3, 4, 9], 10, SCORES, mode=Mode.OBSERVE),
        {Signal.EVICTED_SHARE: 0.1, Signal.EVICTION_MARGIN: 1 / 3},
    ),
    "the oldest leaves, though it scores highest": (
        one_row([2, 3, 4, 9], 10, SCORES | {2: 8.0}, eviction=Eviction.OLDEST),
        {Signal.EVICTED_SHARE: 8 / 17, Signal.EVICTION_MARGIN: 0.0},
    ),
    "the last slot leaves": (
        one_row([2, 3, 9, 4], 10, SCORES, eviction=Eviction.INPUT_ORDER),
        {Signal.EVICTED_SHARE: 0.4, Signal.EVICTION_MARGIN: 0.0},
    ),
    "of equal scores the higher token leaves": (
        one_row([3, 2, 4, 9], 10, {2: 1.0, 3: 1.0, 4: 5.0, 9: 1.0}),
        {Signal.EVICTED_SHARE: 1 / 8, Signal.EVICTION_MARGIN: 0.0},
    ),
    "NaN leaves and weighs nothing": (
        one_row([2, 3, 4, 9], 10, SCORES | {2: float("nan")}),
        {Signal.EVICTED_SHARE: 0.0, Signal.EVICTION_MARGIN: None},
    ),
    "an infinite score has no share": (
        one_row([2, 3, 4, 9], 10, SCORES | {4: float("inf")}),
        {Signal.EVICTED_SHARE: None, Signal.EVICTION_MARGIN: 0.5},
    ),
    "nothing leaves": (
        one_row([0, 3, 4, 9], 10, SCORES | {0: 1.0}),
        {Signal.EVICTED_SHARE: None, Signal.EVICTION_MARGIN: None, Signal.SINK_HIT: 1.0},
    ),
    "without scores": (one_row([2, 3, 4, 9], 10), {Signal.EVICTED_SHARE: None, Signal.LOCAL_HIT: 1.0}),
    "a short row has no structure to miss": (
        one_row([0, 1, -1, -1], 4, SCORES),
        {Signal.SINK_HIT: None, Signal.VALID_DEFICIT: 0.5, Signal.INVALID_SHARE: 0.0},
    ),
    "indices that are no token": (
        one_row([5, NAN_LOGITS_INDEX, -7, -1], 10),
        {Signal.INVALID_SHARE: 0.5, Signal.VALID_DEFICIT: 0.75},
    ),
    "a policy that is off": (one_row([2, 3, 4, 9], 10, mode=Mode.DISABLED), dict.fromkeys(Signal, None)),
    "a third of the last step's set": (
        one_row([3, 4, 5, 6], 21, slots=4, row_request=REQUEST_6, state={(0, 2): (6, 20, [1, 2, 3, 4])}),
        {Signal.STEP_OVERLAP: 1 / 3, Signal.LEADER_OVERLAP: None},
    ),
    "another request in the slot": (
        one_row([3, 4, 5, 6], 21, slots=4, row_request=REQUEST_6, state={(0, 2): (2, 20, [1, 2, 3, 4])}),
        {Signal.STEP_OVERLAP: None},
    ),
    "a step was missed": (
        one_row([3, 4, 5, 6], 21, slots=4, row_request=REQUEST_6, state={(0, 2): (6, 19, [1, 2, 3, 4])}),
        {Signal.STEP_OVERLAP: None},
    ),
    "a first token finds an empty slot": (
        one_row([0, -1, -1, -1], 1, slots=4, row_request=torch.zeros(1, dtype=torch.int32)),
        {Signal.STEP_OVERLAP: None, Signal.VALID_DEFICIT: 0.0},
    ),
    "three quarters of the layer before": (
        one_row([2, 3, 4, -1], 21, slots=4, leader=1, row_request=REQUEST_6, state={(0, 2): (6, 21, [1, 2, 3, 4])}),
        {Signal.STEP_OVERLAP: None, Signal.LEADER_OVERLAP: 0.75},
    ),
    "two empty sets": (
        one_row([-1] * 4, 21, slots=4, row_request=REQUEST_6, state={(0, 2): (6, 20, [])}),
        {Signal.STEP_OVERLAP: None},
    ),
}


@every_form
@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(implementation: ModuleType, name: str) -> None:
    case, values = BY_HAND[name]
    outcome = run(implementation, case)
    assert {signal: outcome.value(signal) for signal in values} == pytest.approx(values, abs=1e-6)


@every_form
def test_repeated_tokens_stay_in_range(implementation: ModuleType) -> None:
    case = one_row([3, 3, 0, 0], 21, SCORES, slots=4, row_request=REQUEST_6, state={(0, 2): (6, 20, [3])})
    outcome = run(implementation, case)
    assert all(0 <= (outcome.value(signal) or 0) <= 1 for signal in Signal)
    assert outcome.value(Signal.STEP_OVERLAP) is not None


def test_samples_come_in_bursts_of_consecutive_lengths() -> None:
    assert reference.hash32(1) == 0x514E28B7, "MurmurHash3's"
    sampled = [is_sampled(length, 1234, 64) for length in range(64_000)]
    assert all(len(set(sampled[first : first + 8])) == 1 for first in range(0, 64_000, 8))
    assert 0.8 < sum(sampled) / 1000 < 1.2
    assert all(is_sampled(length, -5, 1) for length in range(20))


def test_two_steps_of_two_layers_through_the_public_function() -> None:
    memory, counters = SignalMemory(2, 4, 4, "cpu"), new_signal_counters()
    table = PolicyTable(one_row([1, 2, 3, 4], 20).arms)

    def step(length: int, leader: int, learned: list[int]) -> None:
        rows = torch.tensor([learned], dtype=torch.int32), torch.tensor([length])
        given = {"config": table, "counters": counters, "row_request": REQUEST_6, "memory": memory}
        observe_signals(*rows, every=1, leader=leader, **given)

    step(20, 0, [1, 2, 3, 4])
    step(20, 1, [1, 2, 3, 4])
    step(21, 0, [3, 4, 5, 6])
    step(21, 1, [3, 4, 5, 6])
    step(22, 2, [3, 4, 5, 6])  # no such layer
    step(22, -1, [3, 4, 5, 6])
    memory.clear()
    step(22, 0, [3, 4, 5, 6])

    def seen(signal: Signal) -> list[int]:
        return counters[0, 1, list(columns_of(signal))].tolist()

    assert seen(Signal.STEP_OVERLAP) == [0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 666_666]
    assert seen(Signal.LEADER_OVERLAP) == [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 2_000_000]
    assert sum(seen(Signal.VALID_DEFICIT)[:-1]) == 7


def test_columns() -> None:
    assert [column for signal in Signal for column in columns_of(signal)] == list(SignalColumn)
    assert len(SignalColumn) == len(Signal) * (len(BOUNDS) + 2)
    assert new_signal_counters("cpu", 3).shape == (3, 2, len(SignalColumn))


I32 = {"dtype": torch.int32}
REFUSED = [
    ("learned", torch.zeros(2, 4), "observe_signals.learned: got float32"),
    ("row_lengths", torch.zeros(3, **I32), "observe_signals.row_lengths: got int32 [3]"),
    ("config", PolicyTable([lower(PolicyConfig(), 5)]), "observe_signals.config: lowered for width 5, width is 4"),
    ("counters", new_signal_counters("cpu", 2), "observe_signals.counters: got int64 [2, 2, 108]"),
    ("counters", new_signal_counters().mT.contiguous().mT, "observe_signals.counters: strides"),
    ("every", 0, "observe_signals.every: got 0; use 1 to 2147483647"),
    ("every", 2**31, "observe_signals.every: got 2147483648"),
    ("scores", torch.zeros(2, 4, dtype=torch.float64), "observe_signals.scores: got float64"),
    ("score_start", torch.zeros(2), "observe_signals.score_start: got float32"),
    ("row_live", torch.zeros(2, **I32), "observe_signals.row_live: got int32"),
    ("row_phase", torch.zeros(2, **I32), "observe_signals.row_phase: got int32"),
    ("row_arm", torch.zeros(2, dtype=torch.int64), "observe_signals.row_arm: got int64"),
    ("row_request", torch.zeros(2, dtype=torch.int64), "observe_signals.row_request: got int64"),
    ("memory", SignalMemory(1, 1, 5, "cpu"), "observe_signals.memory: got int32 [1, 1, 5]"),
]


@pytest.mark.parametrize(("name", "value", "message"), REFUSED, ids=[f"{name}" for name, _, _ in REFUSED])
def test_refuses(name: str, value: Any, message: str) -> None:
    table = PolicyTable([lower(PolicyConfig(), 4)])
    arguments = {"learned": torch.zeros(2, 4, **I32), "row_lengths": torch.ones(2, **I32), "config": table}
    arguments |= {"counters": new_signal_counters(), "every": 1, name: value}
    with pytest.raises(ArgumentError) as refusal:
        observe_signals(arguments.pop("learned"), arguments.pop("row_lengths"), **arguments)
    assert str(refusal.value).startswith(message)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 1, 1), "SignalMemory.leaders: got 0; use 1 or more"),
        ((1, 3, 1), "SignalMemory.slots: got 3; use a power of two"),
        ((1, 1, -1), "SignalMemory.width: got -1; use 1 or more"),
    ],
)
def test_a_memory_refuses(sizes: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ArgumentError) as refusal:
        SignalMemory(*sizes, "cpu")
    assert str(refusal.value) == message
