"""A model without sparse attention is served as if the plugin were not installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from integration.engine.conftest import Checkpoint
from integration.engine.runs import Answer, answers, assert_same_answers, token_prompts

SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.platforms import current_platform
models, prompts, arguments = json.loads(sys.argv[1])
reports = []
for model in models:
    report = {"platform": type(current_platform).__name__}
    try:
        llm = LLM(model=model, dtype="float32", max_model_len=2048, max_num_seqs=16, seed=0,
                  kv_cache_memory_bytes=96 << 20, **arguments)
        sampling = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True, logprobs=1)
        outputs = [o.outputs[0] for o in llm.generate([{"prompt_token_ids": p} for p in prompts], sampling)]
        report["block_size"] = llm.llm_engine.vllm_config.cache_config.block_size
        logprobs = [[s[t].logprob for s, t in zip(o.logprobs, o.token_ids)] for o in outputs]
        report["answers"] = [[list(o.token_ids), found] for o, found in zip(outputs, logprobs)]
    except Exception as error:
        report["error"] = f"{type(error).__name__}: {error}"
    reports.append(report)
print("RESULT", json.dumps(reports))
"""


def in_another_process(models: Sequence[Path], environment: dict[str, str], **arguments: Any) -> list[dict[str, Any]]:
    """Run the script above with other variables and return what it reports of each model."""
    task = json.dumps([[str(model) for model in models], token_prompts(), arguments])
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT, task],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    lines = [line for line in found.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, found.stdout[-2000:] + found.stderr[-2000:]
    reports: list[dict[str, Any]] = json.loads(lines[-1].removeprefix("RESULT "))
    return reports


def as_answers(report: dict[str, Any]) -> list[Answer]:
    return [Answer(tuple(tokens), tuple(logprobs), 0) for tokens, logprobs in report["answers"]]


@pytest.fixture(scope="module")
def stock(checkpoint: Checkpoint) -> dict[str, Any]:
    """vLLM with every plugin shut out."""
    return in_another_process([checkpoint("llama")], {"VLLM_PLUGINS": ""})[0]


def test_llama_is_untouched(checkpoint: Checkpoint, stock: dict[str, Any]) -> None:
    assert stock["platform"] == "CpuPlatform"
    seen: dict[str, Any] = {}

    def note(llm: Any) -> None:
        seen["block_size"] = llm.llm_engine.vllm_config.cache_config.block_size

    mine = answers(checkpoint("llama"), attention_backend=None, watch=note)
    assert_same_answers(mine, as_answers(stock))
    assert seen["block_size"] == stock["block_size"]


def test_llama_under_the_serving_flag(checkpoint: Checkpoint, stock: dict[str, Any]) -> None:
    mine = answers(checkpoint("llama"), {"mode": "topology_sparse_merge"}, attention_backend="KVPLUGIN")
    assert_same_answers(mine, as_answers(stock))


def test_dsa_without_the_flag_is_refused_as_by_stock_vllm(checkpoint: Checkpoint) -> None:
    with pytest.raises(NotImplementedError, match=r"Sparse Attention is not supported on CPU\."):
        answers(checkpoint("glm52"), attention_backend=None)


def test_switched_off_the_flag_means_what_vllm_would_choose(checkpoint: Checkpoint, stock: dict[str, Any]) -> None:
    models = [checkpoint("llama"), checkpoint("glm52")]
    llama, sparse = in_another_process(models, {"KVPLUGIN_DISABLE": "1"}, attention_backend="KVPLUGIN")
    assert llama["platform"] == "CpuPlatform"
    assert_same_answers(as_answers(llama), as_answers(stock))
    assert "Sparse Attention is not supported on CPU." in sparse["error"]
