"""GLM-5.2 in ``transformers`` as an independent engine: same fp8 rounding of the indexer, any selection rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as glm

from kvplugin.vllm.cpu.index_cache import quantize_fp8

SelectTokens = Callable[[Tensor, int], Tensor]
"""``(scores [S, S] with -inf above the diagonal, index_topk) -> bool [S, S]``: the tokens each query attends to."""


def learned(scores: Tensor, budget: int) -> Tensor:
    """The indexer's own selection; ties go to the lower token."""
    order = scores.sort(dim=-1, descending=True, stable=True).indices[:, :budget]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, True)


def merged(sink: int, local: int) -> SelectTokens:
    """Sinks and the local window outrank every learned token inside the budget."""

    def select(scores: Tensor, budget: int) -> Tensor:
        query, token = torch.meshgrid(torch.arange(len(scores)), torch.arange(len(scores)), indexing="ij")
        structural = ((token < sink) | (token > query - local)) & (token <= query)
        return learned(scores.masked_fill(structural, torch.inf), budget)

    return select


def windowed(sink: int, local: int) -> SelectTokens:
    """Only the sinks and the local window."""

    def select(scores: Tensor, budget: int) -> Tensor:
        query, token = torch.meshgrid(torch.arange(len(scores)), torch.arange(len(scores)), indexing="ij")
        return (token < sink) | ((token > query - local) & (token <= query))

    return select


class Oracle:
    """A checkpoint in float32; the main attention is transformers' own eager code."""

    def __init__(self, checkpoint: Path, select: SelectTokens, index_topk: int | None = None) -> None:
        options = glm.GlmMoeDsaConfig.from_pretrained(checkpoint)
        options.index_topk = index_topk or options.index_topk
        self._model = glm.GlmMoeDsaForCausalLM.from_pretrained(
            checkpoint, config=options, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        for module in self._model.modules():
            if isinstance(module, glm.GlmMoeDsaIndexer):
                module.forward = _indexer_forward(module, select)

    @torch.no_grad()
    def log_probs(self, prompt: Sequence[int], continuation: Sequence[int]) -> Tensor:
        """Log-probs ``[len(continuation), vocabulary]`` at each position of a teacher-forced continuation."""
        tokens = torch.tensor([[*prompt, *continuation]])
        logits = self._model(tokens, use_cache=False).logits[0].double()
        return torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]


def _indexer_forward(indexer: glm.GlmMoeDsaIndexer, select: SelectTokens) -> Callable[..., Tensor]:
    def forward(
        hidden_states: Tensor,
        q_resid: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor,
        position_ids: Tensor,
        past_key_values: object = None,
    ) -> Tensor:
        count, rotary = hidden_states.shape[1], indexer.qk_rope_head_dim
        queries = indexer.wq_b(q_resid).view(1, count, indexer.n_heads, indexer.head_dim)
        keys = indexer.k_norm(indexer.wk(hidden_states)).unsqueeze(2)
        rotated = glm.apply_rotary_pos_emb_interleave(
            queries[..., :rotary], keys[..., :rotary], *position_embeddings, unsqueeze_dim=2
        )
        queries = _rounded(torch.cat([rotated[0], queries[..., rotary:]], -1)[0])
        keys = _rounded(torch.cat([rotated[1], keys[..., rotary:]], -1)[0, :, 0])
        weights = indexer.weights_proj(hidden_states)[0].double()
        scores = torch.einsum("qhd,kd->qhk", queries, keys).relu_()
        scores = torch.einsum("qhk,qh->qk", scores, weights).float().double()
        causal = torch.ones(count, count, dtype=torch.bool).tril()
        selected = select(scores.masked_fill(~causal, -torch.inf), indexer.index_topk) & causal
        return _as_indices(selected).unsqueeze(0)

    return forward


def _rounded(x: Tensor) -> Tensor:
    """Through fp8 and back, in float64."""
    values, scales = quantize_fp8(x.contiguous(), x.shape[-1])
    return values.double() * scales.double()


def _as_indices(selected: Tensor) -> Tensor:
    """Token indices of each row of a mask; short rows repeat their newest token, which changes nothing."""
    newest = torch.arange(len(selected)).unsqueeze(1)
    tokens = torch.arange(selected.shape[1]).expand_as(selected)
    width = int(selected.sum(-1).max())
    return (
        torch.where(selected, tokens, newest)
        .gather(1, selected.int().sort(dim=1, descending=True, stable=True).indices[:, :width])
        .to(torch.int32)
    )
