"""An engine with something wrong in it: counted, reported, and still serving."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from integration.engine.conftest import Checkpoint
from integration.engine.runs import MERGE, answers, ask, assert_same_answers, counted, engine, token_prompts
from kvplugin.errors import ConfigError, CoordinateError
from kvplugin.topology import Counter
from kvplugin.vllm.cpu import indexer
from kvplugin.vllm.cpu.index_cache import read_keys, write_keys
from kvplugin.vllm.cpu.scoring import topk_rows
from kvplugin.vllm.engine_state import engine_state

NAN_INDEX = 2143289344  # what a GPU top-k emits for NaN logits


@pytest.fixture
def broken_topk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A top-k kernel that writes one garbage index into each row longer than the budget."""

    def garbage(scores: torch.Tensor, row_lengths: torch.Tensor, selection: torch.Tensor) -> None:
        topk_rows(scores, row_lengths, selection)
        selection[:, 0] = torch.where(row_lengths > selection.shape[1], NAN_INDEX, selection[:, 0])

    monkeypatch.setattr(indexer, "topk_rows", garbage)


@pytest.mark.usefixtures("broken_topk")
@pytest.mark.parametrize("action", ["fallback", "drop"])
def test_garbage_indices_are_counted_and_never_attended_to(checkpoint: Checkpoint, action: str) -> None:
    prompts = token_prompts((100, 120))
    with engine(checkpoint("glm52"), MERGE | {"coordinate_mismatch": action}) as llm:
        found = ask(llm, prompts, new_tokens=4)
        counters = counted(llm)
    bad_rows = 2 * sum(len(p) + 3 - 64 for p in prompts)
    assert counters[Counter.INVALID] == bad_rows
    assert counters[Counter.FALLBACK] == (bad_rows if action == "fallback" else 0)
    assert all(len(answer.tokens) == 4 for answer in found)


@pytest.mark.usefixtures("broken_topk")
def test_raise_stops_the_engine_with_the_value(checkpoint: Checkpoint) -> None:
    with (
        engine(checkpoint("glm52"), MERGE | {"coordinate_mismatch": "raise"}) as llm,
        pytest.raises(CoordinateError, match=rf"learned index {NAN_INDEX} is outside \[0, 65\)"),
    ):
        ask(llm, token_prompts((100,)), new_tokens=4)


@pytest.mark.parametrize("page", [-1, 4, 2**31 - 1])
def test_an_indexer_page_that_is_not_in_the_cache_reads_as_zeros(page: int) -> None:
    cache = torch.zeros(4, 2, 8 + 4, dtype=torch.uint8)
    write_keys(torch.ones(8, 8), cache, torch.arange(8), group=8)
    keys = read_keys(cache, torch.tensor([3, page, 0], dtype=torch.int32), length=5, head_dim=8, group=8)
    assert keys.tolist() == [[1.0] * 8, [1.0] * 8, [0.0] * 8, [0.0] * 8, [1.0] * 8]


def test_a_hook_that_does_not_fire_is_reported_and_switched_off(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, plugin_log: list[str]
) -> None:
    model = checkpoint("glm52")
    plain = answers(model)

    def without_hook(self: Any, scores: Any, row_lengths: Any, selection: Any, row_phase: Any) -> None:
        topk_rows(scores, row_lengths, selection)

    monkeypatch.setattr(indexer.CpuSparseAttnIndexer, "select_rows", without_hook)
    with engine(model, MERGE) as llm:
        found = ask(llm, token_prompts())
        assert engine_state(llm.llm_engine.vllm_config).hook is None
    assert_same_answers(found, plain)
    assert any("the policy hook did not fire" in line for line in plugin_log), plugin_log
    assert "kvplugin: inactive: self_test_failed" in plugin_log


def test_bypassed_rows_are_warned_about_once(checkpoint: Checkpoint, plugin_log: list[str]) -> None:
    policy = MERGE | {"limits": {"max_row_length": 70}}
    with engine(checkpoint("glm52"), policy) as llm:
        for _ in range(2):
            ask(llm, token_prompts((100,)), new_tokens=2)
            time.sleep(0.6)  # two intervals of the thread that reads the counters
        assert counted(llm)[Counter.BYPASS_MAX_ROW_LENGTH] > 0
    assert sum("rows are bypassed: max_row_length" in line for line in plugin_log) == 1, plugin_log


@pytest.mark.parametrize(
    ("policy", "arguments", "message"),
    [
        pytest.param({"mode": "merge"}, {}, "kvplugin.policy.mode: 'merge' is unknown; use disabled, ", id="mode"),
        pytest.param({"sinks": 1}, {}, "kvplugin.policy.sinks: unknown key; use mode, sink_tokens", id="key"),
        pytest.param(
            MERGE | {"sink_tokens": 60}, {}, "exceed the cap of 16 for a top-k width of 64", id="structure over the cap"
        ),
        pytest.param(MERGE | {"witness": "drift"}, {}, "'drift' needs block scores", id="drift in an engine"),
        pytest.param(
            MERGE,
            {"worker_cls": "vllm.v1.worker.gpu_worker.Worker"},
            "--worker-cls: 'vllm.v1.worker.gpu_worker.Worker' beside",
            id="another worker",
        ),
        pytest.param(
            MERGE, {"kv_cache_dtype": "fp8"}, "--kv-cache-dtype: 'fp8' beside", id="a KV cache the CPU cannot hold"
        ),
    ],
)
def test_wrong_settings_stop_start_up(
    checkpoint: Checkpoint, policy: dict[str, Any], arguments: dict[str, Any], message: str
) -> None:
    with (
        pytest.raises(ConfigError) as raised,
        engine(checkpoint("glm52"), policy, **arguments),
    ):
        pass
    assert message in str(raised.value)
