"""The model in torch, teacher-forced over whole sequences: parameters carry the names that checkpoints use."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from integration.tiny_dsa import dimensions as dim
from integration.tiny_dsa.training.vocabulary import WORDS

HEADS = 2
INDEX_HEADS = 2
PATTERN = "FFS"
"""Layer 0 writes what stood before each token, layer 1 matches, layer 2 reuses its selection."""
MATCHING_LAYER, MATCHING_HEAD = 1, 0
QK = dim.QK_NOPE + dim.QK_ROPE
SHARED_DIRECTION = 0.5


class IndexerState(NamedTuple):
    """What an indexer scores with: rotated queries ``[B, T, h, D]`` and keys ``[B, T, D]``, weights ``[B, T, h]``."""

    queries: Tensor
    keys: Tensor
    weights: Tensor


Select = Callable[[int, Tensor], Tensor]
"""``(leader layer, scores [B, T, T] with -inf above the diagonal) -> bool [B, T, T]``: the tokens attended to."""
ChangeState = Callable[[int, IndexerState], IndexerState]
"""``(leader layer, state) -> state``: what becomes of an indexer's queries and keys before it scores."""


@dataclass
class Trace:
    """What a forward pass leaves behind, each ``[B, T, T]``.

    Attributes:
        scores, selected: by leader.
        attention: by layer, mean over heads.
        matching: the matching head's attention, with its gradients.
    """

    scores: dict[int, Tensor] = field(default_factory=dict)
    selected: dict[int, Tensor] = field(default_factory=dict)
    attention: dict[int, Tensor] = field(default_factory=dict)
    matching: Tensor | None = None


class Rotation(NamedTuple):
    """RoPE angles of a batch: ``cos`` and ``sin`` ``[B, T, 1, rope / 2]``."""

    cos: Tensor
    sin: Tensor

    def interleaved(self, x: Tensor) -> Tensor:
        """Rotate ``[B, T, h, rope]`` whose pairs stand side by side; the result has their halves apart."""
        real, imaginary = x[..., 0::2], x[..., 1::2]
        return torch.cat([real * self.cos - imaginary * self.sin, imaginary * self.cos + real * self.sin], -1)


class RmsNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), self.weight, dim.RMS_EPS)


class Indexer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq_b = _linear(dim.Q_LORA_RANK, INDEX_HEADS * dim.INDEX_HEAD)
        self.wk = _linear(dim.HIDDEN, dim.INDEX_HEAD)
        self.k_norm = nn.LayerNorm(dim.INDEX_HEAD, eps=1e-6)
        self.weights_proj = _linear(dim.HIDDEN, INDEX_HEADS)

    def state(self, hidden: Tensor, latent: Tensor, rotation: Rotation) -> IndexerState:
        """Queries, keys and head weights, rotated."""
        batch, length, _ = hidden.shape
        queries = self.wq_b(latent).view(batch, length, INDEX_HEADS, dim.INDEX_HEAD)
        keys = self.k_norm(self.wk(hidden)).unsqueeze(2)
        weights = self.weights_proj(hidden) * (INDEX_HEADS * dim.INDEX_HEAD) ** -0.5
        return IndexerState(_rotate_first(queries, rotation), _rotate_first(keys, rotation).squeeze(2), weights)

    def scores(self, state: IndexerState) -> Tensor:
        """Scores ``[B, T, T]``, not masked."""
        logits = functional.relu(torch.matmul(state.queries.transpose(1, 2), state.keys.transpose(1, 2).unsqueeze(1)))
        return (logits * state.weights.transpose(1, 2).unsqueeze(-1)).sum(1)


class Attention(nn.Module):
    def __init__(self, leads: bool) -> None:
        super().__init__()
        self.q_a_proj = _linear(dim.HIDDEN, dim.Q_LORA_RANK)
        self.q_a_layernorm = RmsNorm(dim.Q_LORA_RANK)
        self.q_b_proj = _linear(dim.Q_LORA_RANK, HEADS * QK)
        self.kv_a_proj_with_mqa = _linear(dim.HIDDEN, dim.KV_LORA_RANK + dim.QK_ROPE)
        self.kv_a_layernorm = RmsNorm(dim.KV_LORA_RANK)
        self.kv_b_proj = _linear(dim.KV_LORA_RANK, HEADS * (dim.QK_NOPE + dim.V_HEAD))
        self.o_proj = _linear(HEADS * dim.V_HEAD, dim.HIDDEN)
        if leads:
            self.indexer = Indexer()

    def query_latent(self, hidden: Tensor) -> Tensor:
        """``[B, T, q_lora]``: what attention and the indexer derive their queries from."""
        return self.q_a_layernorm(self.q_a_proj(hidden))

    def attend(self, hidden: Tensor, latent: Tensor, rotation: Rotation, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Output ``[B, T, H]`` and probabilities ``[B, heads, T, T]`` over the tokens of ``mask`` (bool, broadcast)."""
        batch, length, _ = hidden.shape
        queries = self.q_b_proj(latent).view(batch, length, HEADS, QK)
        queries = _with_rope(queries[..., : dim.QK_NOPE], rotation.interleaved(queries[..., dim.QK_NOPE :]))
        compressed, rope = self.kv_a_proj_with_mqa(hidden).split([dim.KV_LORA_RANK, dim.QK_ROPE], -1)
        expanded = self.kv_b_proj(self.kv_a_layernorm(compressed)).view(batch, length, HEADS, -1)
        content, values = expanded.split([dim.QK_NOPE, dim.V_HEAD], -1)
        keys = _with_rope(content, rotation.interleaved(rope.unsqueeze(2)).expand(-1, -1, HEADS, -1))
        logits = torch.matmul(queries.transpose(1, 2), keys.permute(0, 2, 3, 1)) * QK**-0.5
        probabilities = torch.softmax(logits.masked_fill(~mask, -torch.inf), -1)
        if not torch.is_grad_enabled():
            # A row that selects nothing attends to nothing, as kernels have it. (In training no row is empty.)
            probabilities = probabilities.nan_to_num_(0.0)
        output = torch.matmul(probabilities, values.transpose(1, 2)).transpose(1, 2).flatten(2)
        return self.o_proj(output), probabilities


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = _linear(dim.HIDDEN, dim.INTERMEDIATE)
        self.up_proj = _linear(dim.HIDDEN, dim.INTERMEDIATE)
        self.down_proj = _linear(dim.INTERMEDIATE, dim.HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, leads: bool) -> None:
        super().__init__()
        self.self_attn = Attention(leads)
        self.mlp = Mlp()
        self.input_layernorm = RmsNorm(dim.HIDDEN)
        self.post_attention_layernorm = RmsNorm(dim.HIDDEN)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(len(WORDS), dim.HIDDEN)
        self.layers = nn.ModuleList(Layer(letter == "F") for letter in PATTERN)
        self.norm = RmsNorm(dim.HIDDEN)


class TinyModel(nn.Module):
    """Three layers of sparse MLA with dense MLPs; random at first (see ``warm_start`` for the circuits)."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.model = Decoder()
        self.lm_head = _linear(dim.HIDDEN, len(WORDS))
        self._draw_weights()

    def indexer_parameters(self) -> list[nn.Parameter]:
        return [parameter for name, parameter in self.named_parameters() if "indexer" in name]

    def main_parameters(self) -> list[nn.Parameter]:
        return [parameter for name, parameter in self.named_parameters() if "indexer" not in name]

    def forward(
        self,
        tokens: Tensor,
        *,
        select: Select | None = None,
        positions: Tensor | None = None,
        trace: Trace | None = None,
        score: bool = False,
        change: ChangeState | None = None,
    ) -> Tensor:
        """Logits ``[B, T, vocabulary]``.

        Args:
            tokens: int64 ``[B, T]``.
            select: the selection of each leader; default dense attention.
            positions: int64 ``[B, T]``; default 0, 1, …
            trace: receives scores, selections and attention.
            score: run the indexers, with gradients, even where nothing selects by them.
            change: damage to the indexers' states.
        """
        length = tokens.shape[1]
        rotation = _rotation(torch.arange(length)[None] if positions is None else positions)
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        hidden, mask = self.model.embed_tokens(tokens), causal
        for index, layer in enumerate(self.model.layers):
            attention: Attention = layer.self_attn
            normed = layer.input_layernorm(hidden)
            latent = attention.query_latent(normed)
            if PATTERN[index] == "F" and (select is not None or score):
                # Detached: the indexer learns from attention, attention never from the indexer.
                with torch.set_grad_enabled(score and torch.is_grad_enabled()):
                    state = attention.indexer.state(normed.detach(), latent.detach(), rotation)
                    scores = attention.indexer.scores(state if change is None else change(index, state))
                if select is not None:
                    mask = select(index, scores.detach().masked_fill(~causal, -torch.inf))
                if trace is not None:
                    trace.scores[index], trace.selected[index] = scores, mask
            heads_mask = mask if mask.dim() == 2 else mask.unsqueeze(1)
            output, probabilities = attention.attend(normed, latent, rotation, heads_mask)
            if trace is not None:
                trace.attention[index] = probabilities.detach().mean(1)
                if index == MATCHING_LAYER:
                    trace.matching = probabilities[:, MATCHING_HEAD]
            hidden = hidden + output
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return self.lm_head(self.model.norm(hidden))

    @torch.no_grad()
    def _draw_weights(self) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                gain = 0.5 if "o_proj" in name or "down_proj" in name else 1.0
                deviation = 0.7 if "embed" in name else gain / math.sqrt(parameter.shape[1])
                nn.init.normal_(parameter, 0, deviation)
        # A direction that all words share: a head that looks at positions only needs a query that is always there.
        self.model.embed_tokens.weight.add_(SHARED_DIRECTION * torch.randn(dim.HIDDEN))


def groups() -> dict[int, list[int]]:
    """Leader layer -> the layers that attend to its selection."""
    found: dict[int, list[int]] = {}
    for layer, letter in enumerate(PATTERN):
        leader = layer if letter == "F" else max(found)
        found.setdefault(leader, []).append(layer)
    return found


def top_k(budget: int) -> Select:
    """The indexer's own selection: its best ``budget`` tokens."""

    def select(layer: int, scores: Tensor) -> Tensor:
        visible = scores > -torch.inf
        if scores.shape[-1] <= budget:
            return visible
        best = scores.topk(budget, -1).indices
        return torch.zeros_like(visible).scatter_(-1, best, True) & visible

    return select


def inverse_frequencies() -> Tensor:
    """RoPE's angle per position, ``[rope / 2]``."""
    return 1.0 / (dim.ROPE_THETA ** (torch.arange(0, dim.QK_ROPE, 2).float() / dim.QK_ROPE))


def _rotation(positions: Tensor) -> Rotation:
    angles = (positions[..., None].float() * inverse_frequencies()).unsqueeze(2)
    return Rotation(angles.cos(), angles.sin())


def _with_rope(content: Tensor, rotated: Tensor) -> Tensor:
    return torch.cat([content, rotated], -1)


def _rotate_first(x: Tensor, rotation: Rotation) -> Tensor:
    """The indexer has its rotary dimensions in front, attention has them behind."""
    return torch.cat([rotation.interleaved(x[..., : dim.QK_ROPE]), x[..., dim.QK_ROPE :]], -1)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)
