"""Parts of the rollout's glue that need no engine."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvplugin.config import PolicyConfig
from kvplugin.requests.keys import ASSIGNED_ARM_KEY, STABLE_PREFIX_KEY, RequestKeys
from kvplugin.requests.rollout import rollout_of
from kvplugin.requests.slots import StepRollout
from kvplugin.vllm.rollout import (
    wrap_input_processor,
    wrap_output_processor,
    wrap_renderer,
    wrap_sampling_params,
)
from kvplugin.vllm.rollout.arm_echo import HEADER, ArmHeader, note_arm
from kvplugin.vllm.rollout.batch_requests import NO_SLOT, BatchRequests
from kvplugin.vllm.rollout.front_end import base_request_id, choose
from kvplugin.vllm.rollout.scaffold import MOST_REMEMBERED, Scaffolds, shared_length
from kvplugin.vllm.rollout.source import connector_conflicts
from kvplugin.vllm.rollout.startup import SCHEDULERS, _place_scheduler
from kvplugin.vllm.rows import RowBuffers


@pytest.mark.parametrize(
    ("request_id", "base"),
    [
        ("cmpl-mine-7-0", "cmpl-mine-7"),
        ("cmpl-88154bc9cabb78f4-11", "cmpl-88154bc9cabb78f4"),
        ("resp_b36d549f8980ab86_2", "resp_b36d549f8980ab86"),
        ("chatcmpl-88154bc9cabb78f4_3", "chatcmpl-88154bc9cabb78f4"),
        ("chatcmpl-my_7", "chatcmpl-my_7"),
        ("chatcmpl-88154bc9cabb78f4-0123456789abcdef-beam-4", "chatcmpl-88154bc9cabb78f4"),
        ("12", "12"),
    ],
)
def test_prompts_of_one_request_have_one_base(request_id: str, base: str) -> None:
    assert base_request_id(request_id) == base


def test_what_decides_an_arm() -> None:
    rollout = rollout_of({"arms": {"a": {}, "b": {}}, "shares": {"a": 0.5, "b": 0.5}, "default_arm": "a"})
    by_request = rollout.model_copy(update={"key": "request"})
    assert choose(rollout, RequestKeys(arm="b"), "s", "r") == ("b", "explicit")
    assert choose(rollout, RequestKeys(session="s"), None, "r")[1] == "session"
    assert choose(rollout, RequestKeys(session="s"), "other", "r") == choose(rollout, RequestKeys(), "s", "r2")
    assert choose(rollout, RequestKeys(), None, "r")[1] == "request"
    assert choose(by_request, RequestKeys(session="s"), None, "r")[1] == "request"
    assert len({choose(by_request, RequestKeys(session="s"), None, f"r{n}")[0] for n in range(30)}) == 2


def test_wraps_are_put_on_once_and_come_off() -> None:
    from vllm.renderers.base import BaseRenderer
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.engine.output_processor import OutputProcessor, RequestState

    def points() -> list[Any]:
        return [
            InputProcessor.process_inputs,
            InputProcessor.__init__,
            OutputProcessor.add_request,
            RequestState.make_request_output,
            SamplingParams.from_optional,
            BaseRenderer.render_chat,
            BaseRenderer.render_chat_async,
        ]

    wraps = (wrap_input_processor, wrap_output_processor, wrap_renderer, wrap_sampling_params)
    for wrap in wraps:
        wrap.uninstall()
    originals = points()
    for wrap in (*wraps, *wraps):
        wrap.install()
    wrapped = points()
    assert all(w is not o and w.__wrapped__ is o for w, o in zip(wrapped, originals, strict=True))
    for wrap in wraps:
        wrap.uninstall()
    assert points() == originals


def test_the_header_names_the_arm_of_the_request_alone() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]})
        await asyncio.sleep(0)
        # As an engine is called: in a task of its own, when the first part is asked for.
        await asyncio.create_task(called(scope["arm"]))
        await send({"type": "http.response.body", "body": b"x", "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def called(arm: str | None) -> None:
        if arm is not None:
            note_arm(arm)

    async def ask(arm: str | None) -> list[Any]:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        await ArmHeader(app)({"type": "http", "arm": arm}, None, send)  # type: ignore[arg-type]
        return sent

    async def both() -> list[list[Any]]:
        return await asyncio.gather(ask("a"), ask("b"), ask(None))

    first, second, none = asyncio.run(both())
    assert [m["type"] for m in first] == ["http.response.start", "http.response.body", "http.response.body"]
    assert (HEADER.encode(), b"a") in first[0]["headers"]
    assert (HEADER.encode(), b"b") in second[0]["headers"]
    assert none[0]["headers"] == [(b"a", b"b")]
    note_arm("outside")  # where nobody is being answered


def test_the_leading_part_is_rendered_once() -> None:
    scaffolds = Scaffolds()
    system, user = {"role": "system", "content": "s"}, {"role": "user", "content": "u"}
    key, probes = scaffolds.probes([system, user], {"tools": None})
    assert [probe[:-1] for probe in probes] == [[system], [system]]
    assert probes[0][-1]["content"][0] != probes[1][-1]["content"][0]
    scaffolds.learn(key, [[1, 2, 3, 9], [1, 2, 3, 8, 8]])
    assert scaffolds.length(key) == 3
    assert scaffolds.probes([system, {"role": "user", "content": "other"}], {"tools": None}) == (key, [])
    assert scaffolds.probes([system, user], {"tools": []})[0] != key
    assert scaffolds.probes([user], {"tools": None})[0] != key
    other, _ = scaffolds.probes([{"role": "system", "content": "cannot be rendered"}], {})
    scaffolds.learn(other, [])
    assert scaffolds.length(other) == 0
    for number in range(MOST_REMEMBERED):
        scaffolds.learn(f"filler-{number}", [])
    assert scaffolds.probes([system, user], {"tools": None})[1], "the oldest is forgotten"


def test_shared_length() -> None:
    assert [shared_length(*p) for p in (([], [1]), ([1, 2], [1, 2]), ([1], [1, 2]), ([1, 2], [1, 3]))] == [0, 2, 1, 1]


def test_requests_come_and_go() -> None:
    requests = BatchRequests()
    requests.start("a", {ASSIGNED_ARM_KEY: "x", STABLE_PREFIX_KEY: 7})
    requests.start("b", {ASSIGNED_ARM_KEY: "y"})
    requests.start("c", None)
    requests.name_slots(StepRollout(1, "", True, (None, ("y", PolicyConfig()), ("x", PolicyConfig()))))
    assert requests.slots(["a", "b", "c", "unknown"]) == [2, 1, NO_SLOT, NO_SLOT]
    assert requests.stable_prefixes(["a", "b", "c", "unknown"]) == [7, 0, 0, 0]
    requests.finish(["a", "never there"])
    requests.start("a", {ASSIGNED_ARM_KEY: "y"})
    assert requests.slots(["a"]) == [1], "an id that comes again is another request"
    assert requests.stable_prefixes(["a"]) == [0]
    assert len(requests) == 3


def test_row_buffers_stay_where_they_are_and_forget_the_last_batch() -> None:
    buffers = RowBuffers(8, "cpu")
    first = buffers.fill(
        torch.tensor([0, 0, 1], dtype=torch.int8), torch.tensor([0, 0, 1]), torch.tensor([7, 8]).int(),
        torch.tensor([3, 5]).int(), torch.tensor([9, 0]).int(),
    )  # fmt: skip
    assert first.request is not None
    assert first.arm is not None
    assert first.prefix is not None
    assert (first.arm.tolist(), first.prefix.tolist(), first.request.tolist()) == ([3, 3, 5], [9, 9, 0], [7, 7, 8])
    place = first.arm.data_ptr()
    one, row = torch.tensor([1], dtype=torch.int8), torch.tensor([0])
    second = buffers.fill(one, row, torch.tensor([6]).int(), torch.tensor([4]).int(), None)
    assert second.arm is not None
    assert second.request is not None
    assert second.arm.data_ptr() == place
    assert (second.arm.tolist(), second.prefix, second.request.tolist()) == ([4], None, [6])
    without = buffers.fill(one, row, torch.tensor([6]).int(), None, None)
    assert (without.arm, without.prefix) == (None, None)


def test_connectors_that_find_kv_by_tokens_alone_are_refused() -> None:
    def conflicts(connector: str | None) -> list[str]:
        transfer = None if connector is None else SimpleNamespace(kv_connector=connector)
        return [str(p) for p in connector_conflicts(SimpleNamespace(kv_transfer_config=transfer))]

    assert conflicts(None) == conflicts("OffloadingConnector") == []
    (message,) = conflicts("LMCacheConnectorV1")
    assert message.startswith("kvplugin.rollout: arms beside the KV connector 'LMCacheConnectorV1'")


def test_a_scheduler_of_the_operators_own_is_refused() -> None:
    def config(cls: Any, asynchronous: bool = False) -> Any:
        scheduling = SimpleNamespace(scheduler_cls=cls, async_scheduling=asynchronous)
        scheduling.get_scheduler_cls = lambda: dict
        return SimpleNamespace(scheduler_config=scheduling)

    for asynchronous in (False, True):
        found = config(None, asynchronous)
        assert _place_scheduler(found) == []
        assert found.scheduler_config.scheduler_cls == SCHEDULERS[asynchronous]
        assert _place_scheduler(found) == [], "a second look changes nothing"
    (problem,) = _place_scheduler(config("mine.Scheduler"))
    assert str(problem).startswith("--scheduler-cls: 'mine.Scheduler' beside a rollout; drop it, or derive it from ")
