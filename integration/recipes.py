"""How this repository runs vLLM on a CPU: models, command lines, environment."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path

from integration.server import HOST, ServerError
from integration.tiny_dsa import ModelKind, TinySpec, write_checkpoint
from integration.tiny_dsa.training.export import export_committed
from kvplugin.config import Mode

MODELS = Path(__file__).resolve().parent.parent / "models"
SERVED_NAME = "tiny"
MAX_MODEL_LEN = 2048
TRAINED_TOPK = 32
"""Budget of the trained model: so small that what the policy takes from it, and adds, shows in answers."""


def tiny_model(kind: ModelKind) -> Path:
    """The tiny checkpoint of ``kind`` with default settings, written where it is missing or differs."""
    return write_checkpoint(TinySpec(kind), MODELS / f"tiny-{kind}")


def trained_model() -> Path:
    """The committed trained checkpoint in GLM-5.2's form, written where it is missing or differs."""
    return export_committed(ModelKind.GLM52, MODELS / "tiny-trained-glm52", index_topk=TRAINED_TOPK)


def require_vllm() -> None:
    """Raise ``ServerError`` with the cure where vLLM is not installed; costs no import of it."""
    if importlib.util.find_spec("vllm") is None:
        raise ServerError("vLLM is not installed in this Python; run 'make setup' and use .venv/bin/python")


def model_arguments(model: Path) -> tuple[str, ...]:
    """Command-line arguments that serve a tiny checkpoint, whatever the backend.

    fp32, because comparing texts needs answers that do not depend on how requests were batched.
    """
    return (
        *("--model", str(model), "--served-model-name", SERVED_NAME),
        *("--dtype", "float32", "--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", "16"),
    )


def plugin_arguments(mode: Mode) -> tuple[str, ...]:
    """Command-line arguments that turn the plugin on."""
    return ("--attention-backend", "KVPLUGIN", f"--additional-config.kvplugin.policy.mode={mode}")


def rollout_arguments(rollout: Path, state: Path) -> tuple[str, ...]:
    """Command-line arguments that turn the plugin on with a rollout file, and a place for its override."""
    return (
        *("--attention-backend", "KVPLUGIN"),
        f"--additional-config.kvplugin.rollout={rollout}",
        f"--additional-config.kvplugin.rollout_state={state}",
    )


def cpu_environment(base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables for a server on this machine: a small KV cache, no network, no proxy between client and server."""
    past_proxy = ",".join(filter(None, (base.get("no_proxy") or base.get("NO_PROXY"), "localhost", HOST)))
    return {
        # GiB. vLLM would take half of the machine's memory.
        "VLLM_CPU_KVCACHE_SPACE": base.get("VLLM_CPU_KVCACHE_SPACE", "1"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONUNBUFFERED": "1",
        "no_proxy": past_proxy,
        "NO_PROXY": past_proxy,
    }
