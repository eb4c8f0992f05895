"""Sparse attention on the CPU gives the same answers however a batch is cut, and dense ones when it may see all."""

from __future__ import annotations

from typing import Any

import pytest

from integration.engine.conftest import Checkpoint
from integration.engine.runs import (
    DENSE_ARGUMENTS,
    MERGE,
    Answer,
    answers,
    ask,
    assert_same_answers,
    counted,
    engine,
    token_prompts,
)
from kvplugin.topology import Counter


@pytest.fixture(scope="module")
def batched(checkpoint: Checkpoint) -> list[Answer]:
    """Merge policy at index_topk 64, all requests at once: what every other way of serving must repeat."""
    return answers(checkpoint("v32"), MERGE)


def test_equals_dense_attention_when_all_tokens_fit(checkpoint: Checkpoint) -> None:
    sparse = answers(checkpoint("v32"), MERGE, hf_overrides={"index_topk": 1024})
    assert_same_answers(sparse, answers(checkpoint("dense"), **DENSE_ARGUMENTS))


def test_budget_matters(checkpoint: Checkpoint, batched: list[Answer]) -> None:
    """Without this the parity below could be that of an engine that ignores the selection."""
    wide = answers(checkpoint("v32"), MERGE, hf_overrides={"index_topk": 1024})
    assert [a.tokens for a in wide] != [a.tokens for a in batched]


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({"block_size": 64}, id="blocks of 64"),
        pytest.param({"max_num_batched_tokens": 48, "enable_chunked_prefill": True}, id="chunked prefill"),
        pytest.param({"max_num_seqs": 1}, id="one by one"),
        pytest.param({"enable_prefix_caching": False}, id="no prefix cache"),
    ],
)
def test_serving_shape_does_not_matter(
    checkpoint: Checkpoint, batched: list[Answer], arguments: dict[str, Any]
) -> None:
    assert_same_answers(answers(checkpoint("v32"), MERGE, **arguments), batched)


def test_prefix_hit_equals_miss(checkpoint: Checkpoint) -> None:
    with engine(checkpoint("v32"), MERGE) as llm:
        cold = ask(llm, token_prompts())
        warm = ask(llm, token_prompts())
    assert [a.cached for a in cold] == [0, 0, 0, 0]
    assert all(a.cached >= 16 for a in warm), f"prompt tokens found in the prefix cache: {[a.cached for a in warm]}"
    assert_same_answers(warm, cold)


@pytest.mark.parametrize("phases", [["prefill", "decode"], ["decode"]], ids=["both phases", "decode only"])
def test_preempted_requests_answer_the_same(checkpoint: Checkpoint, phases: list[str]) -> None:
    """A resumed request prefills tokens that it had decoded: their phase must not change, nor their KV."""
    prompts, policy = token_prompts((200, 210, 190, 220)), MERGE | {"phases": phases}
    preemptions: list[float] = []

    def count_preemptions(llm: Any) -> None:
        preemptions.extend(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions")

    arguments = {"prompts": prompts, "new_tokens": 40, "enable_prefix_caching": False}
    calm = answers(checkpoint("v32"), policy, **arguments)
    crowded = answers(
        checkpoint("v32"),
        policy,
        watch=count_preemptions,
        num_gpu_blocks_override=57,
        max_model_len=512,
        disable_log_stats=False,
        **arguments,
    )
    assert sum(preemptions) > 0, "the cache was large enough for all requests: nothing was preempted"
    assert_same_answers(crowded, calm)


def test_many_requests_at_once(checkpoint: Checkpoint) -> None:
    """24 requests over 16 seats, each against itself alone; rows are counted once per index group."""
    prompts = token_prompts([20 + 17 * i for i in range(24)], seed=3)
    with engine(checkpoint("glm52"), MERGE, enable_prefix_caching=False) as llm:
        together = ask(llm, prompts, new_tokens=6)
        seen = counted(llm)[Counter.SEEN]
        alone = [ask(llm, [prompt], new_tokens=6)[0] for prompt in prompts[::6]]
    assert_same_answers(together[::6], alone)
    groups = 2
    assert seen == groups * sum(len(prompt) + 6 - 1 for prompt in prompts)
