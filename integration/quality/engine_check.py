"""``python -m integration.quality.engine_check glm52 default``: the same questions through real vLLM, on the CPU.

One engine a process. The committed checkpoint is served with the plugin; each greedy token and its log-probability is
compared with the torch model under the same selection rule, on the same fp8 keys.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Read when vLLM is imported: no engine-core process, no network.
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)

import torch

from integration.engine.runs import Answer, answers, counted
from integration.quality.agreement import Agreement
from integration.quality.damage import Damage
from integration.quality.policies import contestants
from integration.quality.selection import Selector
from integration.tiny_dsa.spec import ModelKind
from integration.tiny_dsa.training.evaluation import questions
from integration.tiny_dsa.training.export import export_committed, load_committed
from integration.tiny_dsa.training.model import IndexerState
from kvplugin.topology import Counter
from kvplugin.vllm.cpu.index_cache import quantize_fp8

BUDGET = 32
LENGTHS = (256, 600, 1024)
COPIED = 8


@dataclass(frozen=True)
class Question:
    """A prompt, and the right continuation."""

    prompt: list[int]
    right: list[int]


def engine_questions() -> list[Question]:
    """The last question of each recall, and the middle of each copy."""
    found = []
    for length in LENGTHS:
        for task, batch in questions(length).items():
            for tokens, answer in zip(batch.tokens.tolist(), batch.answers, strict=True):
                places = answer.nonzero()[:, 0].tolist()
                first, count = (places[len(places) // 2], COPIED) if task == "copy" else (places[-1], 1)
                found.append(Question(tokens[:first], tokens[first : first + count]))
    return found


def check(form: ModelKind, contestant: str) -> Agreement:
    """Start the engine, ask, compare."""
    asked = engine_questions()
    (chosen,) = (each for each in contestants(BUDGET) if each.name == contestant)
    policy: dict[str, Any] | None = None
    if chosen.config is not None:
        policy = chosen.config.model_dump(mode="json", exclude_unset=True)
    with tempfile.TemporaryDirectory(prefix="kvplugin-quality-") as folder:
        model = export_committed(form, Path(folder))
        prompts = [question.prompt for question in asked]
        rewritten: list[int] = []

        def watch(llm: Any) -> None:
            if policy is not None:
                rewritten.append(counted(llm)[Counter.REWRITTEN])

        overrides = {"index_topk": BUDGET}
        got = answers(model, policy, prompts=prompts, new_tokens=COPIED, watch=watch, hf_overrides=overrides)
    return _compare(form, contestant, asked, got, sum(rewritten))


@torch.no_grad()
def _compare(
    form: ModelKind, contestant: str, asked: Sequence[Question], got: Sequence[Answer], rewritten: int
) -> Agreement:
    model = load_committed()
    (chosen,) = (each for each in contestants(BUDGET) if each.name == contestant)
    tokens = same = right = torch_right = 0
    worst = 0.0
    for question, answer in zip(asked, got, strict=True):
        count = len(question.right)
        own = list(answer.tokens[:count])
        text = torch.tensor([question.prompt + own])
        logits = model(text, select=Selector(chosen, Damage("clean"), BUDGET), change=_rounded)[0]
        log_probs = logits[len(question.prompt) - 1 : -1].log_softmax(-1)
        best = log_probs.argmax(-1).tolist()
        tokens += count
        same += sum(mine == other for mine, other in zip(own, best, strict=True))
        right += sum(mine == other for mine, other in zip(own, question.right, strict=True))
        torch_right += sum(mine == other for mine, other in zip(best, question.right, strict=True))
        expected = log_probs.gather(1, torch.tensor(own)[:, None])[:, 0]
        worst = max(worst, float((expected - torch.tensor(answer.logprobs[:count])).abs().max()))
    return Agreement(form, contestant, tokens, same, right, torch_right, worst, rewritten)


def _rounded(layer: int, state: IndexerState) -> IndexerState:
    """Queries and keys through the engine's fp8 and back."""
    queries, query_scales = quantize_fp8(state.queries.contiguous(), state.queries.shape[-1])
    keys, key_scales = quantize_fp8(state.keys.contiguous(), state.keys.shape[-1])
    return IndexerState(queries.float() * query_scales, keys.float() * key_scales, state.weights)


if __name__ == "__main__":
    print(json.dumps(asdict(check(ModelKind(sys.argv[1]), sys.argv[2]))))
