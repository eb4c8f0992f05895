"""Arms in one real engine: each request by its own policy, caches apart, switches that reach running requests."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from integration.engine.conftest import Checkpoint
from integration.engine.runs import engine, token_prompts
from kvplugin.config import ROOT_KEY
from kvplugin.errors import RequestError
from kvplugin.requests.assignment import choose_arm
from kvplugin.requests.override import Override, clear_override, update_override
from kvplugin.requests.rollout import parse_rollout
from kvplugin.requests.watch import POLL_S
from kvplugin.topology import Counter
from kvplugin.vllm.engine_state import engine_state

ARMS = {
    "control": {"mode": "observe"},
    "merge": {"mode": "topology_sparse_merge"},
    "stable": {"mode": "topology_compress_sparse", "sink_tokens": 2, "local_tokens": 8},
}
PROMPTS = token_prompts((300, 210, 150, 97))
SEEN = 2.5 * POLL_S
"""Seconds after which a change is in force."""


class Told(NamedTuple):
    """What came back for one request."""

    arm: str
    tokens: tuple[int, ...]
    cached: int


class Bench:
    """An engine with a rollout, and its two files."""

    def __init__(self, started: AbstractContextManager[Any], file: Path, state: Path) -> None:
        self._stack = ExitStack()
        self.llm = self._stack.enter_context(started)
        self.file, self.state = file, state

    def close(self) -> None:
        """End the engine."""
        self.llm = None
        self._stack.close()

    def ask(self, prompts: Sequence[list[int]], extras: Sequence[dict[str, Any]], new_tokens: int = 8) -> list[Told]:
        """All at once, greedily; ``extras`` are each request's ``extra_args``."""
        from vllm import SamplingParams

        params = [
            SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True, extra_args=extra) for extra in extras
        ]
        outputs = self.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return [Told(o.kvplugin_arm, tuple(o.outputs[0].token_ids), o.num_cached_tokens) for o in outputs]

    def by(self, *arms: str, prompts: Sequence[list[int]] = PROMPTS) -> list[Told]:
        return self.ask(prompts[: len(arms)], [{"kvplugin_arm": arm} for arm in arms])

    def override(self, **changes: Any) -> None:
        update_override(self.state, lambda _: Override.model_validate(changes))
        time.sleep(SEEN)

    def forget(self) -> None:
        """Start a test with an empty prefix cache and no override."""
        clear_override(self.state)
        time.sleep(SEEN)
        self.llm.reset_prefix_cache()

    @property
    def hook(self) -> Any:
        return engine_state(self.llm.llm_engine.vllm_config).hook


def write_rollout(path: Path, **changes: Any) -> Path:
    shares = {"control": 0.5, "merge": 0.25, "stable": 0.25}
    path.write_text(json.dumps({"arms": ARMS, "shares": shares, "default_arm": "control"} | changes))
    return path


@pytest.fixture(scope="module")
def alone(checkpoint: Checkpoint) -> dict[str, list[tuple[int, ...]]]:
    """Tokens of each prompt, asked alone in an engine that has one arm's policy and no rollout."""
    return {arm: answers_alone(checkpoint("glm52"), policy) for arm, policy in ARMS.items()}


def answers_alone(model: Path, policy: dict[str, Any]) -> list[tuple[int, ...]]:
    """In a function of its own: an engine must be gone before the next one starts, names that hold it included."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    with engine(model, policy) as llm:
        outputs = [llm.generate([{"prompt_token_ids": p}], sampling, use_tqdm=False)[0] for p in PROMPTS]
    return [tuple(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def running(
    checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory, alone: dict[str, list[tuple[int, ...]]]
) -> Iterator[Bench]:
    """One engine for all tests; vLLM's engines of one process follow each other, so it comes after the others."""
    folder = tmp_path_factory.mktemp("rollout")
    file, state = write_rollout(folder / "rollout.yaml"), folder / "override.json"
    config = {"rollout": str(file), "rollout_state": str(state)}
    started = engine(checkpoint("glm52"), additional_config={ROOT_KEY: config})
    bench = Bench(started, file, state)
    yield bench
    bench.close()


@pytest.fixture
def bench(running: Bench) -> Iterator[Bench]:
    running.forget()
    yield running
    write_rollout(running.file)
    clear_override(running.state)


def test_each_request_of_a_batch_follows_its_own_arm(bench: Bench, alone: dict[str, list[tuple[int, ...]]]) -> None:
    assert len({tuple(tokens) for tokens in alone.values()}) == len(ARMS), "arms that answer alike show nothing"
    for order in (["control", "merge", "stable", "merge"], ["stable", "control", "merge", "control"]):
        told = bench.by(*order)
        assert [t.arm for t in told] == order
        for place, (arm, found) in enumerate(zip(order, told, strict=True)):
            assert found.tokens == alone[arm][place], f"prompt {place} by {arm}"


def test_the_arm_is_the_documented_hash(bench: Bench) -> None:
    rollout = parse_rollout(bench.file.read_text(), "rollout")
    sessions = [f"s{number}" for number in range(24)]
    told = bench.ask([PROMPTS[3][:20]] * 24, [{"kvplugin_session": s} for s in sessions], new_tokens=1)
    assert [t.arm for t in told] == [choose_arm(rollout, s) for s in sessions]
    assert {t.arm for t in told} == set(ARMS)


def test_arms_share_no_prefix_and_hit_their_own(bench: Bench) -> None:
    assert [t.cached for t in bench.by("control", "control", "control")] == [0, 0, 0]
    assert [t.cached for t in bench.by("merge", "merge", "merge")] == [0, 0, 0]
    again = bench.by("merge", "merge", "merge")
    assert all(t.cached > 0 for t in again)
    assert [t.tokens for t in again] == [t.tokens for t in bench.by("merge", "merge", "merge")]


def test_the_callers_own_salt_still_keeps_callers_apart(bench: Bench) -> None:
    def cached(salt: str | None) -> int:
        from vllm import SamplingParams

        prompt: dict[str, Any] = {"prompt_token_ids": PROMPTS[0]}
        if salt is not None:
            prompt["cache_salt"] = salt
        params = SamplingParams(max_tokens=1, temperature=0, extra_args={"kvplugin_arm": "merge"})
        return int(bench.llm.generate([prompt], params, use_tqdm=False)[0].num_cached_tokens)

    assert [cached(salt) for salt in (None, "alice", "bob")] == [0, 0, 0]
    assert all(cached(salt) > 0 for salt in (None, "alice", "bob"))


def test_nothing_written_before_a_flip_is_used_after_it(bench: Bench) -> None:
    first, control = bench.by("merge"), bench.by("control")
    bench.override(enabled=False)
    off = bench.by("merge")
    assert (off[0].cached, off[0].tokens) == (0, control[0].tokens)
    assert bench.by("control")[0].cached > 0, "the control arm selects as before, and keeps its cache"
    clear_override(bench.state)
    time.sleep(SEEN)
    on = bench.by("merge")
    assert (on[0].cached, on[0].tokens) == (0, first[0].tokens)
    assert bench.by("merge")[0].cached > 0


def test_the_switch_reaches_a_running_request(bench: Bench) -> None:
    """Its tokens are those of the merge up to the switch; rows are counted until then, and not after it."""
    from vllm import SamplingParams

    core = bench.llm.llm_engine
    params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True, extra_args={"kvplugin_arm": "merge"})
    core.add_request("running", {"prompt_token_ids": PROMPTS[1]}, params)
    for _ in range(5):
        core.step()
    bench.override(enabled=False)
    core.step()
    counted = int(bench.hook.counters[..., Counter.SEEN].sum())
    while core.has_unfinished_requests():
        core.step()
    assert int(bench.hook.counters[..., Counter.SEEN].sum()) == counted
    assert counted > 0


def test_the_switch_is_in_force_within_a_second_under_load(bench: Bench) -> None:
    """From the write of the override to the first step that runs without, or again with, the policies."""
    from vllm import SamplingParams

    bench.by("control")  # a step, which takes up what earlier tests left
    core, scheduler = bench.llm.llm_engine, bench.llm.llm_engine.engine_core.engine_core.scheduler
    params = SamplingParams(max_tokens=1500, temperature=0, ignore_eos=True, extra_args={"kvplugin_arm": "merge"})
    for number in range(8):
        core.add_request(f"load-{number}", {"prompt_token_ids": PROMPTS[3][:20]}, params)
    written: list[float] = []
    stop = threading.Event()

    def flip() -> None:
        draw = random.Random(1)
        while not stop.wait(draw.uniform(0.5, 0.8)):
            off = len(written) % 2 == 0
            written.append(time.monotonic())
            update_override(bench.state, lambda _, off=off: Override(enabled=not off))

    delays: list[float] = []
    generation = scheduler.kvplugin_rollout.message.generation
    flipping = threading.Thread(target=flip)
    flipping.start()
    try:
        while len(delays) < 20:
            started = time.monotonic()
            core.step()
            if scheduler.kvplugin_rollout.message.generation != generation:
                generation = scheduler.kvplugin_rollout.message.generation
                delays.append(started - written[len(delays)])
    finally:
        stop.set()
        flipping.join()
    core.abort_request([f"load-{number}" for number in range(8)])
    core.step()
    median, worst = sorted(delays)[10], max(delays)  # the 99th percentile of twenty is the largest
    print(f"kill switch: median {median:.3f} s, worst of {len(delays)} {worst:.3f} s")
    assert worst < 1.0, f"delays in seconds: {[round(delay, 3) for delay in delays]}"


def test_policies_and_arms_change_while_the_engine_runs(bench: Bench) -> None:
    merge = bench.by("merge")
    bench.override(arms={"new": ARMS["merge"], "merge": {"mode": "observe"}})
    control, renamed = bench.by("merge"), bench.by("new")
    assert control[0].tokens == bench.by("control")[0].tokens
    assert (renamed[0].arm, renamed[0].tokens) == ("new", merge[0].tokens)
    write_rollout(bench.file, arms={"control": ARMS["control"]}, shares={})
    bench.override()
    with pytest.raises(RequestError, match="'merge' is an unknown arm; use control"):
        bench.by("merge")


def test_a_bad_file_changes_nothing(bench: Bench) -> None:
    before = bench.by("merge")
    bench.file.write_text("arms: [")
    time.sleep(SEEN)
    assert bench.by("merge")[0].tokens == before[0].tokens
    bench.file.write_text(json.dumps({"arms": {"wide": ARMS["merge"] | {"sink_tokens": 10_000}}}))
    time.sleep(SEEN)
    assert bench.by("merge")[0].tokens == before[0].tokens


def test_a_stable_prefix_is_counted_from_the_second_request_of_a_session_on(bench: Bench) -> None:
    def counted() -> list[int]:
        return [int(count) for count in bench.hook.prefix_counters.sum((0, 1))]

    extra = {"kvplugin_arm": "stable", "kvplugin_session": "s", "kvplugin_scaffold_tokens": 100}
    start = counted()
    bench.ask([PROMPTS[0]], [extra], new_tokens=4)
    assert counted() == start, "a first prompt has nothing to be compared with"
    bench.ask([PROMPTS[0][:100] + PROMPTS[1]], [extra], new_tokens=4)
    rows, visible, unselected = (now - then for now, then in zip(counted(), start, strict=True))
    assert rows > 0
    assert 0 < unselected < visible <= 100 * rows
    between = counted()
    bench.ask([PROMPTS[2]], [extra], new_tokens=4)
    assert counted() == between, "another prefix"
    bench.ask([PROMPTS[2]], [extra | {"kvplugin_session": "other"}], new_tokens=4)
    assert counted() == between, "another session"


def test_random_traffic_never_leaks_an_arm(bench: Bench) -> None:
    """Requests come, are aborted, are preempted and resumed; each that ends answers as it does alone."""
    from vllm import SamplingParams

    draw, core = random.Random(7), bench.llm.llm_engine
    names, prompts = list(ARMS), token_prompts((40, 65, 90, 130), seed=3)
    # A list of arms per prompt, asked alone.
    want = {(p, a): bench.by(a, prompts=[prompts[p]])[0].tokens for p in range(len(prompts)) for a in names}
    scheduler = core.engine_core.engine_core.scheduler
    asked: dict[str, tuple[int, str]] = {}
    answers: dict[str, tuple[int, ...]] = {}
    for turn in range(80):
        if turn < 60 and draw.random() < 0.7:
            place, arm, name = draw.randrange(len(prompts)), draw.choice(names), f"r{turn}"
            params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, extra_args={"kvplugin_arm": arm})
            core.add_request(name, {"prompt_token_ids": prompts[place]}, params)
            asked[name] = (place, arm)
        unanswered = sorted(asked.keys() - answers.keys())
        if unanswered and draw.random() < 0.1:
            gone = draw.choice(unanswered)
            core.abort_request([gone])
            asked.pop(gone)
        if scheduler.running and draw.random() < 0.15:
            request = scheduler.running.pop(draw.randrange(len(scheduler.running)))
            scheduler._preempt_request(request, time.monotonic())
        for output in core.step():
            if output.finished and output.request_id in asked:
                answers[output.request_id] = tuple(output.outputs[0].token_ids)
    while core.has_unfinished_requests():
        for output in core.step():
            if output.finished and output.request_id in asked:
                answers[output.request_id] = tuple(output.outputs[0].token_ids)
    assert answers.keys() == asked.keys()
    wrong = {name: asked[name] for name, tokens in answers.items() if tokens != want[asked[name]]}
    assert not wrong, f"{len(wrong)} of {len(answers)} answers differ: {wrong}"
    worker = bench.llm.llm_engine.model_executor.driver_worker.worker
    assert len(worker.kvplugin_requests) <= 1, "facts of requests that are over"


def test_chats_offline_go_through_it_too(bench: Bench) -> None:
    from vllm import SamplingParams

    def chat(question: str, arm: str) -> Any:
        extra = {"kvplugin_arm": arm, "kvplugin_session": "chats"}
        params = SamplingParams(max_tokens=2, temperature=0, extra_args=extra)
        messages = [{"role": "system", "content": "answer in verse " * 8}, {"role": "user", "content": question}]
        return bench.llm.chat(messages, params, use_tqdm=False)[0]

    before = int(bench.hook.prefix_counters.sum())
    assert chat("who?", "stable").kvplugin_arm == "stable"
    assert int(bench.hook.prefix_counters.sum()) == before
    chat("and why?", "stable")
    assert int(bench.hook.prefix_counters.sum()) > before, "the system part is a stable prefix without being told"
    with pytest.raises(RequestError, match="'ghost' is an unknown arm"):
        chat("who?", "ghost")


def test_before_topk_serves_arms_alike(
    checkpoint: Checkpoint, tmp_path: Path, running: Bench, alone: dict[str, list[tuple[int, ...]]]
) -> None:
    """Runs last: vLLM's engines of one process follow each other, and the module's own is ended here."""
    running.close()
    config = {
        "rollout": str(write_rollout(tmp_path / "rollout.yaml")),
        "rollout_state": str(tmp_path / "state.json"),
        "placement": "before_topk",
        "metrics": {"sample_every": 3},
    }
    started = engine(checkpoint("glm52"), additional_config={ROOT_KEY: config})
    with closing(Bench(started, running.file, running.state)) as bench:
        order = ["control", "merge", "stable", "merge"]
        for place, (arm, found) in enumerate(zip(order, bench.by(*order), strict=True)):
            assert found.tokens == alone[arm][place], f"prompt {place} by {arm}"
        sampled = bench.hook.sampled[..., Counter.SEEN].sum(-1)
        assert int((sampled > 0).sum()) == len(ARMS), "each arm is sampled"
        assert int(bench.hook.counters.sum()) == 0
