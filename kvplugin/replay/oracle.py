"""A second opinion on the merge: Transformer Engine's own correction functions, where they are installed and sound."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvplugin.replay.merge import merge_states
from kvplugin.replay.reference import Attention

TRANSFORMER_ENGINE = "transformer_engine"
MODULES = (
    "transformer_engine.pytorch.attention.dot_product_attention.context_parallel",
    "transformer_engine.pytorch.attention",
)
"""Where its versions keep the functions, newest first."""
FUNCTIONS = {
    "flash_attn_fwd_softmax_lse_correction": ("softmax_lse", "softmax_lse_per_step"),
    "flash_attn_fwd_out_correction": ("out", "out_per_step", "softmax_lse", "softmax_lse_per_step", "seq_dim"),
}
"""The two functions and the parameters this adapter was written for."""

SELF_TEST_TOLERANCE = 1e-5

Merge = Callable[[Tensor, Tensor], Attention]


class MergeOracle(NamedTuple):
    """A merge of partial states by other code, or the reason why there is none."""

    name: str
    merge: Merge | None
    reason: str


def transformer_engine_oracle() -> MergeOracle:
    """Probe Transformer Engine: import, functions, their parameters, then numbers. Never raises."""
    reasons = []
    for path in MODULES:
        try:
            module = import_module(path)
        except ModuleNotFoundError as error:
            if error.name == TRANSFORMER_ENGINE:
                return MergeOracle(TRANSFORMER_ENGINE, None, "not installed")
            reasons.append(f"{path}: {error}")
            continue
        except Exception as error:  # a broken CUDA library raises anything at import
            reasons.append(f"{path}: {type(error).__name__}: {error}")
            continue
        problem = _unknown_interface(module) or _failed_self_test(module)
        if problem is None:
            return MergeOracle(TRANSFORMER_ENGINE, _adapter(module), "")
        reasons.append(f"{path}: {problem}")
    return MergeOracle(TRANSFORMER_ENGINE, None, "; ".join(reasons))


def _unknown_interface(module: Any) -> str | None:
    for name, expected in FUNCTIONS.items():
        function = getattr(module, name, None)
        if function is None:
            return f"has no {name}"
        try:
            found = tuple(inspect.signature(function).parameters)
        except (TypeError, ValueError):
            return f"{name} hides its parameters"
        if found != expected:
            return f"{name} takes ({', '.join(found)}), expected ({', '.join(expected)})"
    return None


def _adapter(module: Any) -> Merge:
    correct_lse = module.flash_attn_fwd_softmax_lse_correction
    correct_out = module.flash_attn_fwd_out_correction

    def merge(out: Tensor, lse: Tensor) -> Attention:
        """States ``[N, Hq, Sq, Dv]`` and ``[N, Hq, Sq]``; Transformer Engine wants batch, head, query."""
        total = lse[0].unsqueeze(0).clone()
        for state in lse[1:]:
            correct_lse(total, state.unsqueeze(0))
        # Its sequence dimension is that of the output [batch, head, query, Dv]: 2.
        merged = torch.zeros_like(out[0]).unsqueeze(0)
        for value, state in zip(out, lse, strict=True):
            correct_out(merged, value.unsqueeze(0), total, state.unsqueeze(0), 2)
        return Attention(merged.squeeze(0), total.squeeze(0))

    return merge


def _failed_self_test(module: Any) -> str | None:
    """Merge three random states with both; a version with another meaning of its arguments must not judge anyone."""
    generator = torch.Generator().manual_seed(0)
    out, lse = torch.randn(3, 2, 4, 8, generator=generator), torch.randn(3, 2, 4, generator=generator)
    try:
        found = _adapter(module)(out, lse)
    except Exception as error:  # other code, on a machine it may not support
        return f"self-test raised {type(error).__name__}: {error}"
    expected = merge_states(out, lse)
    off = max(float((found.out - expected.out).abs().max()), float((found.lse - expected.lse).abs().max()))
    return None if off <= SELF_TEST_TOLERANCE else f"self-test is off by {off:.3g}, at most {SELF_TEST_TOLERANCE:g}"
