"""Steps captured from a running engine replay clean, however they came to be, and hold nothing that is not theirs."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from integration.engine.conftest import Checkpoint
from integration.engine.runs import MERGE, Answer, ask, assert_same_answers, engine, token_prompts
from kvplugin.cli.capture import capture
from kvplugin.cli.replay import replay
from kvplugin.config import ROOT_KEY
from kvplugin.errors import ArgumentError
from kvplugin.replay import (
    Capture,
    CaptureReport,
    Record,
    Stage,
    Status,
    read_capture,
    replay_capture,
    write_capture,
)
from kvplugin.vllm.capture_client import CaptureClient, CaptureFailed, engine_call
from kvplugin.vllm.capture_request import CaptureRequest
from kvplugin.vllm.cpu.mla_ops import attend_rows
from kvplugin.vllm.engine_state import engine_state

LAYERS, LEADERS = range(6), (0, 3)
POLICIES = {"no policy": None, "merge": MERGE}
ROOMY: dict[str, Any] = {}
CRAMPED: dict[str, Any] = {
    "max_num_batched_tokens": 48,
    "enable_chunked_prefill": True,
    "enable_prefix_caching": False,
    "num_gpu_blocks_override": 57,
    "max_model_len": 512,
}
"""Prompts come in chunks, requests are preempted, and pages go from one request to the next."""
TOPK = 64


@pytest.fixture(scope="module", params=POLICIES.values(), ids=POLICIES)
def policy(request: pytest.FixtureRequest) -> dict[str, Any] | None:
    return request.param


class Server:
    """One engine at a time. Starts are what costs here, so it serves until another policy or other options come."""

    def __init__(self, model: Path) -> None:
        self._model, self._running = model, ExitStack()
        self._current: tuple[object, Any] | None = None

    def __call__(self, policy: dict[str, Any] | None, **options: Any) -> Any:
        if self._current is None or self._current[0] != (policy, options):
            self.stop()
            self._current = (policy, options), self._running.enter_context(engine(self._model, policy, **options))
        return self._current[1]

    def stop(self) -> None:
        self._current = None
        self._running.close()


@pytest.fixture(scope="module")
def serve(checkpoint: Checkpoint) -> Iterator[Server]:
    server = Server(checkpoint("glm52"))
    yield server
    server.stop()


@pytest.fixture
def no_server(serve: Server) -> None:
    """For tests that start engines themselves."""
    serve.stop()


def wanted(**fields: Any) -> CaptureRequest:
    return CaptureRequest.parse(json.dumps(fields))


def captured(llm: Any, run: Callable[[], object] | None = None, **fields: Any) -> Capture:
    """Arm, run, fetch."""
    client = CaptureClient(engine_call(llm))
    client.arm(wanted(**fields))
    (run or (lambda: ask(llm, token_prompts(), new_tokens=6)))()
    return client.fetch()


def assert_clean(found: Capture) -> CaptureReport:
    report = replay_capture(found)
    drifts = [
        (record.layer, stage.stage, stage.findings)
        for record in report.records
        for stage in record.stages
        if stage.status is Status.DRIFT
    ]
    assert report.within, drifts
    assert [record.layer for record in report.records] == list(LAYERS)
    for record in report.records:
        looked = {stage.stage for stage in record.stages if stage.status is Status.MATCH}
        assert looked >= {Stage.IDENTITY, Stage.CACHE, Stage.SELECTION, Stage.ATTENTION}, (
            f"layer {record.layer}: {looked}"
        )
        assert (Stage.INDEXER_SCORES in looked) == (record.layer in LEADERS)
    return report


def as_sets(selection: torch.Tensor) -> list[set[int]]:
    return [{token for token in row if token >= 0} for row in selection.tolist()]


def rewritten(record: Record) -> bool:
    assert record.selection_before is not None
    assert record.inputs.selection is not None
    return as_sets(record.selection_before) != as_sets(record.inputs.selection[0])


def scheduler(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler


def one_by_one(llm: Any, prompts: Sequence[Sequence[int]], new_tokens: int, watch: Callable[[], object]) -> None:
    """All prompts at once, with a look before every step of the engine; stops when the look gives true."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True)
    for request, prompt in enumerate(prompts):
        llm.llm_engine.add_request(str(request), {"prompt_token_ids": list(prompt)}, sampling)
    while llm.llm_engine.has_unfinished_requests() and not watch():
        llm.llm_engine.step()
    llm.llm_engine.abort_request([str(request) for request in range(len(prompts))])


def test_decode_step_and_prefix_hit_replay_clean(serve: Server, policy: dict[str, Any] | None) -> None:
    """The same engine serves the same prompts three times: cold and plain, warm and plain, warm and captured."""
    answers: list[list[Answer]] = []
    llm = serve(policy, **ROOMY)
    before = llm.request_counter.counter

    def run() -> None:
        answers.append(ask(llm, token_prompts(), new_tokens=6))

    run()
    run()
    warm = captured(llm, run, request=1, step=5)
    assert answers[2][1].cached >= 16, "no prefix was found in the cache"
    assert_same_answers(answers[2], answers[1])
    report = assert_clean(warm)
    last = warm.records[-1]
    assert last.log_probs is not None
    assert float(last.log_probs) == pytest.approx(answers[2][1].logprobs[5], abs=1e-6)
    assert (last.step, last.positions, last.request.split("-")[0]) == (5, [150 + 5 - 1], str(before + 9))
    assert all(rewritten(record) == (policy is not None) for record in warm.records)
    assert [record.index_group for record in warm.records] == [0, 0, 0, 3, 3, 3]
    assert report.model == "glm52 (GlmMoeDsaForCausalLM, float32)"
    assert ("topology_sparse_merge" in report.policy) == (policy is not None), report.policy


@pytest.mark.parametrize("placement", ["after_topk", "before_topk"])
@pytest.mark.usefixtures("no_server")
def test_selection_before_the_policy_is_the_indexers(checkpoint: Checkpoint, placement: str) -> None:
    """Worked out from the captured scores; the local window (12 of a cap of 16, beside 4 sinks) must be in it after."""
    config = {ROOT_KEY: {"policy": MERGE, "placement": placement}}
    with engine(checkpoint("glm52"), additional_config=config) as llm:
        found = captured(llm, request=3, step=2, layers=[0])
    (record,) = found.records
    assert record.indexer_scores is not None
    assert record.selection_before is not None
    assert record.inputs.selection is not None
    length = 300 + 2
    order = sorted(range(length), key=lambda token: (-float(record.indexer_scores[0, token]), token))
    assert as_sets(record.selection_before) == [set(order[:TOPK])]
    structure = {*range(4), *range(length - 12, length)}
    best = [token for token in order if token not in structure][: TOPK - len(structure)]
    assert as_sets(record.inputs.selection[0]) == [structure | set(best)]
    assert replay_capture(found).within


def test_swapped_page_is_named(serve: Server, policy: dict[str, Any] | None, tmp_path: Path) -> None:
    good = captured(serve(policy, **ROOMY), request=1, step=5, layers=[2])
    (record,) = good.records
    keys = record.inputs.pool.keys.clone()
    keys[3] = keys[5]
    swapped = replace(record, inputs=replace(record.inputs, pool=replace(record.inputs.pool, keys=keys)))
    report = replay_capture(replace(good, records=(swapped,)))
    assert not report.within
    assert report.first_drift is not None
    assert (report.first_drift.stage, report.first_drift.layer) == (Stage.IDENTITY, 2)
    assert "tokens [48, 64) is not what was captured: it holds what tokens [80, 96) held" in str(report.first_drift)
    write_capture(replace(good, records=(swapped,)), tmp_path / "swapped")
    assert replayed(tmp_path / "swapped")[0] == 1
    write_capture(good, tmp_path / "good")
    status, output = replayed(tmp_path / "good")
    assert status == 0, output
    assert "1 records within tolerance" in output


def test_disarmed_engine_is_as_before(serve: Server, policy: dict[str, Any] | None) -> None:
    llm = serve(policy, **ROOMY)
    state = engine_state(llm.llm_engine.vllm_config)
    client = CaptureClient(engine_call(llm))
    client.arm(wanted(request="nobody"))
    ask(llm, token_prompts((30,)), new_tokens=2)
    assert client.result() == {"state": "armed", "request": None}
    client.disarm()
    assert state.capture is None
    captured(llm, lambda: ask(llm, token_prompts((30,))), step=1, layers=[0])
    assert state.capture is None, "a capture that is over must not stay on the hot path"


def test_refusals(serve: Server, policy: dict[str, Any] | None) -> None:
    llm = serve(policy, **ROOMY)
    client = CaptureClient(engine_call(llm))
    with pytest.raises(ArgumentError, match=r"^capture.layers: got \[6, 9\]; this worker holds layers 0 to 5$"):
        client.arm(wanted(layers=[6, 9]))
    client.arm(wanted(limit=2048))
    ask(llm, token_prompts((30,)), new_tokens=2)
    with pytest.raises(ArgumentError, match=r"^capture.limit: 2048 bytes hold no record of .* 30 tokens; bytes"):
        client.result()
    client.arm(wanted(limit=160_000, rows=1))
    ask(llm, token_prompts((30,), seed=4), new_tokens=2)
    found = client.result()
    assert found["layers"] == [0]
    assert found["left_out"] == [1, 2, 3, 4, 5]

    client.disarm()

    def arm_late() -> None:
        if scheduler(llm).running and client.result()["state"] == "idle":
            client.arm(wanted(request="0", step=0))

    with pytest.raises(CaptureFailed, match=r"request 0, step 0: request 0-\w{8} is at step 1 already$"):
        one_by_one(llm, token_prompts((30,), seed=5), 4, arm_late)


def test_a_request_that_ends_before_the_step(serve: Server, policy: dict[str, Any] | None) -> None:
    llm = serve(policy, **ROOMY)
    client = CaptureClient(engine_call(llm))

    def abort() -> None:
        if scheduler(llm).running and scheduler(llm).running[0].num_output_tokens == 2:
            llm.llm_engine.abort_request(["0"])

    for run in (
        lambda: one_by_one(llm, token_prompts((30,)), 3, list),
        lambda: one_by_one(llm, token_prompts((30,)), 9, abort),
    ):
        client.arm(wanted(request="0", step=5))
        run()
        ask(llm, token_prompts((30,)), new_tokens=1)  # a worker learns of an end in the next step
        with pytest.raises(CaptureFailed, match=r"step 5: request 0-\w{8} was over before it came to the step$"):
            client.result()


def test_two_clients(serve: Server, policy: dict[str, Any] | None) -> None:
    """The second one takes over, and the first is told; what it says afterwards does the second no harm."""
    llm = serve(policy, **ROOMY)
    first, second = CaptureClient(engine_call(llm)), CaptureClient(engine_call(llm))
    first.arm(wanted(step=1))
    with pytest.raises(ArgumentError, match=r"^capture.layers: got \[9\]"):
        second.arm(wanted(layers=[9]))
    assert first.result()["state"] == "armed", "a refused capture takes nobody's place"
    second.arm(wanted(step=1, layers=[0]))
    with pytest.raises(ArgumentError, match="another capture was armed, and has taken this one's place; capture again"):
        first.result()
    first.disarm()
    ask(llm, token_prompts((30,)), new_tokens=2)
    assert second.result()["layers"] == [0]
    second.disarm()
    second.disarm()
    assert second.result() == {"state": "idle"}


def test_a_worker_method_raises_nothing(serve: Server, policy: dict[str, Any] | None) -> None:
    answer = engine_call(serve(policy, **ROOMY))("kvplugin_capture_arm", "{}", "owner", "one too many")
    assert answer["error"][0] == "capture"
    assert "TypeError" in answer["error"][1]


def test_chunked_prefill_replays_clean(serve: Server, policy: dict[str, Any] | None) -> None:
    """Step 0 is the chunk that holds the end of the prompt; 'next' is whatever chunk comes next."""
    llm = serve(policy, **CRAMPED)
    last = captured(llm, request=3, step=0, rows=8)
    first = captured(llm, lambda: ask(llm, token_prompts((30, 150)), new_tokens=1), request=1, rows=4)
    assert_clean(last)
    assert last.records[0].positions == list(range(292, 300))
    assert last.records[0].step == 0
    assert_clean(first)
    newest = first.records[0].positions[-1]
    assert newest + 1 < 150, "not the first chunk of the prompt"
    assert first.records[0].inputs.kv_seq_lens.tolist() == [newest + 1]


def test_preempted_and_resumed_request_replays_clean(serve: Server, policy: dict[str, Any] | None) -> None:
    client: list[CaptureClient] = []
    llm = serve(policy, **CRAMPED)

    def arm_after_preemption() -> bool:
        back = [
            request for request in scheduler(llm).running if request.num_preemptions and request.num_output_tokens > 2
        ]
        if back and not client:
            client.append(CaptureClient(engine_call(llm)))
            client[0].arm(wanted(request=back[0].request_id, step=back[0].num_output_tokens, rows=4))
        return bool(client) and client[0].result()["state"] == "captured"

    one_by_one(llm, token_prompts((200, 210, 190, 220)), 40, arm_after_preemption)
    assert client, "the cache was large enough for all requests: nothing was preempted and resumed"
    resumed = client[0].fetch()
    assert_clean(resumed)
    assert resumed.records[0].step > 2


def test_capture_holds_nothing_of_other_requests(serve: Server, policy: dict[str, Any] | None) -> None:
    """Two requests side by side, in pages that others have used: what is theirs is worked out from the whole cache."""
    llm = serve(policy, **CRAMPED)
    ask(llm, token_prompts((97, 150, 220, 200), seed=1), new_tokens=2)
    seen: list[set[int]] = []

    def look() -> None:
        running = {request.request_id[0]: request for request in scheduler(llm).running}
        if len(running) == 2 and running["1"].num_output_tokens == 4:
            pool = scheduler(llm).kv_cache_manager
            seen.extend(set(pool.get_block_ids(running[each].request_id)[0]) for each in "01")

    prompts = token_prompts((150, 97))
    found = captured(llm, lambda: one_by_one(llm, prompts, 8, look), request="1", step=4)
    mine, other = seen[1], seen[0]
    length = 97 + 4
    for record in found.records:
        assert record.page_ids is not None
        assert record.request.startswith("1-")
        assert record.inputs.kv_seq_lens.tolist() == [length]
        assert set(record.page_ids.tolist()) <= mine - other
        assert len(record.page_ids) == record.inputs.pool.keys.shape[0] == -(-length // 16)
        assert record.inputs.pool.keys.flatten(0, 1)[length:].count_nonzero() == 0, "the rest of the last page"
        assert record.indexer_scores is None or record.indexer_scores.shape == (1, length)
        assert record.inputs.q.shape[2] == 1


AS_IT_WAS = {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_LOGGING_STREAM": "ext://sys.stdout"}
"""What vLLM logs by default: the command asks for less where nothing is set, and other tests of this process listen."""


def replayed(folder: Path) -> tuple[int, str]:
    """Exit status and output of ``kvplugin replay``."""
    app = typer.Typer()
    app.command()(replay)
    found = CliRunner().invoke(app, [str(folder)], env={"COLUMNS": "200"})
    return found.exit_code, found.output


@pytest.mark.parametrize("mode", ["disabled", "topology_sparse_merge"])
@pytest.mark.usefixtures("no_server")
def test_command_captures_from_a_model(checkpoint: Checkpoint, tmp_path: Path, mode: str) -> None:
    """``kvplugin capture --model``; its last layer also compares the log-probability with a full prefill's."""
    app = typer.Typer()
    app.command()(capture)
    options = {"--model": checkpoint("glm52"), "--step": 3, "--tokens": 200, "--mode": mode, "--layers": "0,4-5"}
    arguments = [str(each) for pair in options.items() for each in pair]
    gc.freeze()  # as in runs.engine
    found = CliRunner().invoke(app, [str(tmp_path / "out"), *arguments, "--kv-gib", "0.3"], env=AS_IT_WAS)
    assert found.exit_code == 0, found.output
    assert "step 3, 203 tokens, positions 202 to 202, layers 0, 4, 5\n" in found.output
    status, output = replayed(tmp_path / "out")
    assert status == 0, output
    report = replay_capture(read_capture(tmp_path / "out"))
    looked = [stage.status for record in report.records for stage in record.stages if stage.stage is Stage.LOG_PROBS]
    assert looked == [Status.UNAVAILABLE, Status.UNAVAILABLE, Status.MATCH]
    everything = (tmp_path / "out" / "manifest.json").read_text()
    assert "prompt" not in everything
    assert "head_targets" not in everything, "token ids"


def test_lse_costs_the_output_no_bit() -> None:
    torch.manual_seed(0)
    query, rows = torch.randn(70, 3, 24), torch.randn(50, 24)
    physical = torch.stack([torch.randperm(50)[:9] for _ in query]).int()
    physical[3] = -1
    physical[5, 4:] = -1
    lse = torch.empty(70, 3)
    out = attend_rows(query, rows, physical, 0.3, 16, lse)
    assert torch.equal(out, attend_rows(query, rows, physical, 0.3, 16))
    for row in range(70):
        chosen = rows[physical[row][physical[row] >= 0].long()]
        expected = (query[row].double() @ chosen.double().t() * 0.3).logsumexp(-1)
        assert torch.allclose(lse[row].double(), expected, atol=1e-5, rtol=0), row
