"""Captures from an engine of its own: loads a model, runs one prompt, and asks a full prefill for its opinion."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kvplugin.config import ROOT_KEY, Mode
from kvplugin.errors import ArgumentError
from kvplugin.replay import Capture, Record
from kvplugin.vllm.backend_names import BACKEND_NAME
from kvplugin.vllm.capture_client import CaptureClient, CaptureFailed, engine_call
from kvplugin.vllm.capture_request import CaptureRequest


@dataclass(frozen=True)
class OfflineRun:
    """What to run.

    Attributes:
        model: checkpoint of a model with sparse attention.
        prompt: a text file; None makes a prompt of ``tokens`` tokens.
        step: generated tokens that the captured step sees.
        mode: of the policy.
        dtype: of the model, as vLLM spells it.
        kv_gib: room for the KV cache.
    """

    model: Path
    prompt: Path | None
    tokens: int
    step: int
    mode: Mode
    dtype: str
    kv_gib: float


def run_offline(run: OfflineRun, wanted: CaptureRequest) -> Capture:
    """One capture; its last layer also holds the sampled token's log-probability as a full prefill has it.

    Raises:
        ArgumentError: prompt or layers do not fit the model.
        CaptureFailed: the step never came.
    """
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would override the size given here
    llm = _start(run)
    prompt = _prompt(run, llm)
    client = CaptureClient(engine_call(llm))
    client.arm(wanted)
    generated = _generate(llm, prompt, max_tokens=run.step + 1, salt="capture")
    if client.result()["state"] != "captured":
        raise CaptureFailed(f"the engine never came to step {run.step} of {len(prompt)} prompt tokens")
    capture = client.fetch()
    client.disarm()
    reference = _prefill_log_prob(llm, [*prompt, *generated.token_ids])
    return replace(capture, records=tuple(_with_reference(record, reference) for record in capture.records))


def _start(run: OfflineRun) -> Any:
    from vllm import LLM

    return LLM(
        model=str(run.model),
        skip_tokenizer_init=run.prompt is None,
        dtype=run.dtype,
        kv_cache_memory_bytes=int(run.kv_gib * (1 << 30)),
        max_num_seqs=1,
        attention_backend=BACKEND_NAME,
        seed=0,
        additional_config={ROOT_KEY: {"policy": {"mode": str(run.mode)}, "metrics": {"enabled": False}}},
    )


def _prompt(run: OfflineRun, llm: Any) -> list[int]:
    config = llm.llm_engine.vllm_config.model_config
    if run.prompt is None:
        vocabulary = config.get_vocab_size()
        found = [(7919 * position + 17) % (vocabulary - 8) + 8 for position in range(run.tokens)]
    else:
        found = llm.get_tokenizer().encode(run.prompt.read_text(encoding="utf-8"))
    room = config.max_model_len - run.step - 2
    if not 1 <= len(found) <= room:
        where = "kvplugin capture --tokens" if run.prompt is None else f"kvplugin capture --prompt {run.prompt.name}"
        raise ArgumentError(where, f"{len(found)} tokens", f"with --step {run.step} the model has room for 1 to {room}")
    return list(found)


def _generate(llm: Any, prompt: list[int], *, max_tokens: int, salt: str, prompt_logprobs: int | None = None) -> Any:
    from vllm import SamplingParams

    sampling = SamplingParams(
        max_tokens=max_tokens, temperature=0, ignore_eos=True, detokenize=False, prompt_logprobs=prompt_logprobs
    )
    request = {"prompt_token_ids": prompt, "cache_salt": salt}
    (output,) = llm.generate([request], sampling, use_tqdm=False)
    return output if prompt_logprobs is not None else output.outputs[0]


def _prefill_log_prob(llm: Any, tokens: list[int]) -> float:
    """Log-probability of the last token by a prefill of all, with nothing from the prefix cache."""
    output = _generate(llm, tokens, max_tokens=1, salt="reference", prompt_logprobs=0)
    return float(output.prompt_logprobs[-1][tokens[-1]].logprob)


def _with_reference(record: Record, log_prob: float) -> Record:
    return record if record.log_probs is None else replace(record, reference_log_probs=torch.tensor([log_prob]))
