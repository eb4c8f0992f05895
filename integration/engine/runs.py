"""Run one engine on given prompts and return what it answered."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvplugin.config import ROOT_KEY
from kvplugin.topology import Counter, read_counters
from kvplugin.vllm.backend_names import BACKEND_NAME
from kvplugin.vllm.engine_state import engine_state

KV_CACHE_BYTES = 96 << 20
NEW_TOKENS = 16
SAME = 1e-5
"""Log-prob difference of answers that must be the same: float32 sums depend on memory alignment and threads."""
MERGE: dict[str, Any] = {"mode": "topology_sparse_merge"}
# The engine's own compiled rotary op is wrong for MLA on a CPU, with or without the plugin.
DENSE_ARGUMENTS: dict[str, Any] = {
    "attention_backend": "CPU_MLA",
    "compilation_config": {"custom_ops": ["-rotary_embedding"]},
}


@dataclass(frozen=True)
class Answer:
    """Greedy tokens of one request, their log-probs, and the prompt tokens found in the prefix cache."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached: int


def token_prompts(lengths: Sequence[int] = (30, 150, 97, 300), seed: int = 0) -> list[list[int]]:
    """Random byte tokens (ids 3 to 258), one prompt per length."""
    draw = random.Random(seed)
    return [[draw.randrange(3, 259) for _ in range(length)] for length in lengths]


@contextmanager
def engine(model: Path, policy: dict[str, Any] | None = None, **arguments: Any) -> Iterator[Any]:
    """A real ``vllm.LLM`` in this process, gone at the end of the block."""
    from vllm import LLM

    options: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 2048,
        "max_num_seqs": 16,
        "seed": 0,
        "kv_cache_memory_bytes": KV_CACHE_BYTES,
        "attention_backend": BACKEND_NAME,
    }
    if policy is not None:
        options["additional_config"] = {ROOT_KEY: {"policy": policy}}
    gc.freeze()  # vLLM collects garbage eight times per start, and most of this process's objects are here to stay
    llm = LLM(model=str(model), **(options | arguments))
    try:
        yield llm
    finally:
        del llm
        gc.collect()


def ask(llm: Any, prompts: Sequence[Sequence[int]], *, new_tokens: int = NEW_TOKENS) -> list[Answer]:
    """All prompts at once, greedily."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True, logprobs=1)
    outputs = llm.generate([{"prompt_token_ids": list(p)} for p in prompts], sampling, use_tqdm=False)
    return [
        Answer(
            tuple(output.outputs[0].token_ids),
            tuple(
                step[token].logprob
                for step, token in zip(output.outputs[0].logprobs, output.outputs[0].token_ids, strict=True)
            ),
            output.num_cached_tokens or 0,
        )
        for output in outputs
    ]


def answers(
    model: Path,
    policy: dict[str, Any] | None = None,
    *,
    prompts: Sequence[Sequence[int]] | None = None,
    new_tokens: int = NEW_TOKENS,
    watch: Callable[[Any], None] = lambda llm: None,
    **arguments: Any,
) -> list[Answer]:
    """What a fresh engine answers; ``watch`` sees the engine afterwards."""
    with engine(model, policy, **arguments) as llm:
        found = ask(llm, token_prompts() if prompts is None else prompts, new_tokens=new_tokens)
        watch(llm)
    return found


def counted(llm: Any) -> dict[Counter, int]:
    """The engine's counters, phases added up."""
    hook = engine_state(llm.llm_engine.vllm_config).hook
    assert hook is not None, "the engine has no policy hook"
    phases = read_counters(hook.counters.sum(0)).values()
    return {counter: sum(phase[counter] for phase in phases) for counter in Counter}


def assert_same_answers(got: Sequence[Answer], want: Sequence[Answer]) -> None:
    """Equal tokens, log-probs within ``SAME``; says which request and token differ first."""
    assert len(got) == len(want)
    for request, (mine, other) in enumerate(zip(got, want, strict=True)):
        for position, (a, b) in enumerate(zip(mine.tokens, other.tokens, strict=True)):
            assert a == b, f"request {request}, token {position}: {a} instead of {b}; {mine.tokens} / {other.tokens}"
        worst = max(abs(a - b) for a, b in zip(mine.logprobs, other.logprobs, strict=True))
        assert worst <= SAME, f"request {request}: log-probs differ by {worst:.2e}, allowed {SAME:.0e}"
