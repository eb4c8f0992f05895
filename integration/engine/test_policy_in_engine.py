"""What the policy does, and does not do, inside an engine."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch

from integration.engine.conftest import Checkpoint
from integration.engine.runs import MERGE, Answer, answers, ask, assert_same_answers, counted, engine, token_prompts
from kvplugin.config import ROOT_KEY
from kvplugin.topology import Counter
from kvplugin.vllm.cpu.attention import CpuSparseMLAImpl

PATTERN = "FSSFSS"
GROUPS = PATTERN.count("F")
NO_STRUCTURE = MERGE | {"sink_tokens": 0, "local_tokens": 0}


@pytest.fixture(scope="module")
def without_policy(checkpoint: Checkpoint) -> list[Answer]:
    """The CPU parts alone: nothing is configured, so there is no hook."""
    return answers(checkpoint("glm52"))


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param({}, id="mode left at disabled"),
        pytest.param({"mode": "disabled"}, id="disabled"),
        pytest.param({"mode": "observe"}, id="observe"),
        pytest.param(NO_STRUCTURE, id="merge without structure"),
        pytest.param(MERGE | {"limits": {"max_rows": 1}}, id="every prefill bypassed"),
    ],
)
def test_changes_nothing(checkpoint: Checkpoint, without_policy: list[Answer], policy: dict[str, Any]) -> None:
    assert_same_answers(answers(checkpoint("glm52"), policy), without_policy)


def test_merge_changes_answers(checkpoint: Checkpoint, without_policy: list[Answer]) -> None:
    merged = answers(checkpoint("glm52"), MERGE)
    assert [a.tokens for a in merged] != [a.tokens for a in without_policy]


def test_before_topk_answers_as_after_topk(checkpoint: Checkpoint) -> None:
    model = checkpoint("glm52")
    after = answers(model, MERGE)
    config = {ROOT_KEY: {"policy": MERGE, "placement": "before_topk", "metrics": {"sample_every": 1}}}
    with engine(model, additional_config=config) as llm:
        before = ask(llm, token_prompts())
        hook = _hook(llm)
        seen = int(hook.sampled[..., Counter.SEEN].sum())
        evicted = int(hook.sampled[..., Counter.EVICTED].sum())
        exact = int(hook.counters.sum())
    assert_same_answers(before, after)
    assert seen == GROUPS * sum(len(p) + len(a.tokens) - 1 for p, a in zip(token_prompts(), after, strict=True))
    assert evicted > 0
    assert exact == 0, "before_topk has sampled counters only"


def test_phases_limit_where_the_policy_acts(checkpoint: Checkpoint) -> None:
    prompts = token_prompts((100, 90))
    rows = {"prefill": GROUPS * 190, "decode": GROUPS * 2 * 7}
    with engine(checkpoint("glm52"), MERGE | {"phases": "decode"}) as llm:
        ask(llm, prompts, new_tokens=8)
        counters = counted(llm)
    assert counters[Counter.BYPASS_PHASE] == rows["prefill"]
    assert counters[Counter.SEEN] == sum(rows.values())


def test_counters_are_exact(checkpoint: Checkpoint) -> None:
    """Against numbers worked out from the requests: index_topk 64, 4 sinks and 12 local tokens."""
    prompts = token_prompts((40, 100, 150))
    with engine(checkpoint("glm52"), MERGE) as llm:
        ask(llm, prompts, new_tokens=5)
        counters = counted(llm)
    lengths = [length for prompt in prompts for length in range(1, len(prompt) + 5)]
    selected = GROUPS * sum(min(64, length) for length in lengths)
    assert counters[Counter.SEEN] == GROUPS * len(lengths)
    assert counters[Counter.REWRITTEN] + counters[Counter.IDENTITY] == counters[Counter.SEEN]
    assert counters[Counter.KEPT] + counters[Counter.INJECTED] + counters[Counter.BACKFILLED] == selected
    assert counters[Counter.EVICTED] == counters[Counter.INJECTED] > 0
    assert counters[Counter.SINK_POSSIBLE] == GROUPS * sum(min(4, length) for length in lengths)
    assert counters[Counter.LOCAL_POSSIBLE] == GROUPS * sum(min(12, max(0, length - 4)) for length in lengths)
    for never in (Counter.INVALID, Counter.RESCUED, Counter.FALLBACK, Counter.EMPTY, Counter.BACKFILLED):
        assert counters[never] == 0, never.name


def test_followers_read_the_leaders_rewritten_selection(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All layers of a group attend to one set; two groups need not."""
    selections: dict[int, list[torch.Tensor]] = defaultdict(list)
    forward = CpuSparseMLAImpl.forward_mqa

    def record(self: CpuSparseMLAImpl, q: Any, cache: Any, metadata: Any, layer: Any) -> Any:
        index = int(layer.layer_name.split(".")[2])
        assert self.topk_indices_buffer is not None
        selections[index].append(self.topk_indices_buffer[: metadata.num_actual_tokens].clone())
        return forward(self, q, cache, metadata, layer)

    monkeypatch.setattr(CpuSparseMLAImpl, "forward_mqa", record)
    prompt = token_prompts((200,))
    answers(checkpoint("glm52"), MERGE, prompts=prompt, new_tokens=4)
    steps = {index: torch.cat(found).sort(1).values for index, found in selections.items()}
    assert sorted(steps) == list(range(6))
    for leader in (0, 3):
        for follower in (leader + 1, leader + 2):
            assert torch.equal(steps[leader], steps[follower]), f"layer {follower} differs from its leader {leader}"
    assert not torch.equal(steps[0], steps[3]), "both groups select alike: the test could not see a mix-up"
    last = steps[0][-1]
    for token in (0, 1, 2, 3, *range(203 - 12, 203)):  # sinks and local window of the last decode row
        assert token in last, f"token {token} is structural and not selected"


def _hook(llm: Any) -> Any:
    from kvplugin.vllm.engine_state import engine_state

    return engine_state(llm.llm_engine.vllm_config).hook
