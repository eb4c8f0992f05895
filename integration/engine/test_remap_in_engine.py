"""The grouped remap inside an engine: how often it converts, and that nobody can tell from the answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from integration.engine.conftest import Checkpoint
from integration.engine.runs import MERGE, Answer, ask, engine, token_prompts
from kvplugin.config import ROOT_KEY
from kvplugin.metrics.collector import DirectoryCollector
from kvplugin.metrics.directory import DIRECTORY_VARIABLE
from kvplugin.metrics.export import DRAIN_INTERVAL_S
from kvplugin.remap import RemapCounter, remap_grouped
from kvplugin.remap import memo as memo_module
from kvplugin.remap.groups import GroupLayout
from kvplugin.remap.layouts import layout_from_config, leader_mask
from kvplugin.remap.paths import RemapPath
from kvplugin.vllm.cpu.attention import CpuSparseMLAImpl, CpuSparseMLAMetadata, CpuSparseMLAMetadataBuilder
from kvplugin.vllm.engine_remap import read_layout
from kvplugin.vllm.engine_state import EngineState, engine_state
from kvplugin.vllm.log import logger

PATTERN = "FSSFSS"
GROUPS, LAYERS = PATTERN.count("F"), len(PATTERN)
ONCE_PER_GROUP = {RemapPath.GROUPED: GROUPS, RemapPath.MEMO: LAYERS - GROUPS}
ONCE_PER_LAYER = {RemapPath.PER_LAYER: LAYERS}
IN_CHUNKS = {"max_num_batched_tokens": 48, "enable_chunked_prefill": True, "enable_prefix_caching": False}
PROMPTS = token_prompts((30, 90))
NEW_TOKENS = 5
PREFILL, DECODE, MIXED = "prefill", "decode", "mixed"


def settings(**sections: Any) -> dict[str, Any]:
    return {"additional_config": {ROOT_KEY: sections}}


CONFIGURATIONS = {
    "grouped": (settings(policy=MERGE), ONCE_PER_GROUP),
    "switched off": (settings(policy=MERGE, remap={"grouped": False}), ONCE_PER_LAYER),
    "grouped without a policy": (settings(), ONCE_PER_GROUP),
    "not configured": ({}, ONCE_PER_LAYER),
}


@dataclass
class Run:
    """One engine: what it answered, and of each of its steps, what it was made of and how layers got their indices."""

    state: EngineState
    answers: list[Answer] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    paths: list[dict[RemapPath, int]] = field(default_factory=list)
    layout: GroupLayout | None = None
    seen: list[int] = field(default_factory=lambda: [0] * len(RemapPath))

    def note_step(self, metadata: CpuSparseMLAMetadata) -> None:
        rows = metadata.row_request.bincount()
        kinds = {PREFILL if count > 1 else DECODE for count in rows.tolist()}
        self.kinds.append(MIXED if len(kinds) > 1 else kinds.pop())
        counts = self.state.remap.paths.tolist()
        changes = {path: counts[path] - self.seen[path] for path in RemapPath}
        self.paths.append({path: change for path, change in changes.items() if change})
        self.seen = counts


RunOf = Callable[[str], Run]


@pytest.fixture(scope="module")
def run_of(checkpoint: Checkpoint) -> RunOf:
    """The run of a configuration, on first use."""

    @cache
    def run(name: str) -> Run:
        with engine(checkpoint("glm52"), **CONFIGURATIONS[name][0], **IN_CHUNKS) as llm, watched(llm) as found:
            found.answers += ask(llm, PROMPTS, new_tokens=NEW_TOKENS)
            found.layout = read_layout(llm.llm_engine.vllm_config)
        return found

    return run


@contextmanager
def watched(llm: Any) -> Iterator[Run]:
    forward, found = CpuSparseMLAImpl.forward_mqa, Run(engine_state(llm.llm_engine.vllm_config))

    def note(self: CpuSparseMLAImpl, q: Any, cache: Any, metadata: Any, layer: Any) -> Any:
        answer = forward(self, q, cache, metadata, layer)
        if self.layer == LAYERS - 1:
            found.note_step(metadata)
        return answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuSparseMLAImpl, "forward_mqa", note)
        yield found


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_conversions_of_every_step(run_of: RunOf, name: str) -> None:
    """Prefill steps, decode steps, and both in one batch: as many conversions as groups, or as layers."""
    run, expected = run_of(name), CONFIGURATIONS[name][1]
    assert set(run.kinds) == {PREFILL, DECODE, MIXED}, run.kinds
    for number, (kind, paths) in enumerate(zip(run.kinds, run.paths, strict=True)):
        assert paths == expected, f"step {number}, {kind}: {paths}"
    assert run.state.remap.invalid.tolist() == [0] * len(RemapCounter)


@pytest.mark.parametrize(
    ("one", "other"), [("grouped", "switched off"), ("grouped without a policy", "not configured")]
)
def test_answers_are_the_same_to_the_last_bit(run_of: RunOf, one: str, other: str) -> None:
    assert run_of(one).answers == run_of(other).answers


def test_the_layout_is_that_of_the_configuration(run_of: RunOf) -> None:
    found, expected = run_of("grouped").layout, layout_from_config(LAYERS, index_topk_pattern=PATTERN)
    assert found is not None
    assert [replace(group, members=()) for group in found.groups] == list(expected.groups)
    assert [len(group.members) for group in found.groups] == [1, 1], "layers of one pool have one place"


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], dict[str, dict[str, float]]]:
    """``exported()``: kvplugin's counters of a test's engines, as ``/metrics`` would show them, by metric and label."""
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))

    def read() -> dict[str, dict[str, float]]:
        time.sleep(3 * DRAIN_INTERVAL_S)
        families = DirectoryCollector(tmp_path).collect()
        return {f.name: {"/".join(s.labels.values()): s.value for s in f.samples} for f in families}

    return read


def test_a_bad_page_is_counted_and_never_read(
    checkpoint: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
    plugin_log: list[str],
    exported: Callable[[], dict[str, dict[str, float]]],
) -> None:
    """Of a request that fits the budget, each row selects all it sees: the rows' first 16 tokens are those lost."""
    build = CpuSparseMLAMetadataBuilder.build
    answers: list[Answer] = []
    corrupted: dict[int, torch.Tensor] = {}  # one for leaders and followers, as the engine has one for both
    bad_pages = [-1, 10**6]  # padding, and beyond the pool

    def corrupt(self: CpuSparseMLAMetadataBuilder, *arguments: Any, **options: Any) -> CpuSparseMLAMetadata:
        metadata = build(self, *arguments, **options)
        table = corrupted.setdefault(metadata.block_table.data_ptr(), metadata.block_table.clone())
        table.copy_(metadata.block_table)[0, 0] = bad_pages[len(answers)]
        return replace(metadata, block_table=table)

    with engine(checkpoint("glm52"), **settings(), enable_prefix_caching=False) as llm:
        monkeypatch.setattr(CpuSparseMLAMetadataBuilder, "build", corrupt)
        while len(answers) < len(bad_pages):
            answers += ask(llm, token_prompts((40,)), new_tokens=3)
        metrics = exported()
    lost = len(bad_pages) * GROUPS * sum(min(16, length) for length in range(1, 40 + 3))
    assert metrics["kvplugin_remap_invalid"] == {
        reason.name.lower(): lost if reason is RemapCounter.INVALID_PAGE else 0 for reason in RemapCounter
    }
    assert metrics["kvplugin_remap_conversions"] == {"grouped": 12, "memo": 24, "per_layer": 0, "fallback": 0}
    assert [len(answer.tokens) for answer in answers] == [3, 3]
    assert "kvplugin_policy_rows" not in metrics, "no policy is configured"
    assert sum("indices without a row in the KV pool: invalid_page" in line for line in plugin_log) == 1, plugin_log


def test_a_failing_group_conversion_costs_speed_only(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, plugin_log: list[str], run_of: RunOf
) -> None:
    expected = run_of("grouped").answers
    calls: list[int] = []

    def fail_first(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("no such kernel")
        return remap_grouped(*arguments, **options)

    monkeypatch.setattr(memo_module, "remap_grouped", fail_first)
    monkeypatch.setattr(memo_module, "logger", logger)  # the one that plugin_log hears
    with engine(checkpoint("glm52"), **settings(policy=MERGE), **IN_CHUNKS) as llm:
        answers = ask(llm, PROMPTS, new_tokens=NEW_TOKENS)
        paths = engine_state(llm.llm_engine.vllm_config).remap.paths.tolist()
    assert answers == expected
    assert paths[RemapPath.FALLBACK] == 3 * paths[RemapPath.GROUPED] > 0, "the first group alone falls back"
    assert any("layers [0, 1, 2] convert one by one from now on" in line for line in plugin_log), plugin_log


@pytest.mark.parametrize("freq", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("offset", [0, 1, 2, 5])
@pytest.mark.parametrize("pattern", [None, "FSSFSFSS"])
def test_the_rule_is_that_of_vllm(freq: int, offset: int, pattern: str | None) -> None:
    """Against the one place where vLLM has the rule in a function of its own."""
    from transformers import PretrainedConfig
    from vllm.models.hy_v4.nvidia.attention import compute_skip_topk_layers

    rule = {"index_topk_freq": freq, "index_skip_topk_offset": offset, "index_topk_pattern": pattern}
    shared = compute_skip_topk_layers(PretrainedConfig(index_topk=64, num_hidden_layers=8, **rule))
    assert [layer not in shared for layer in range(8)] == list(leader_mask(8, **rule))
