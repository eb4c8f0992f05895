"""Circuits that are built in before training: finding them by gradient alone takes longer than the whole recipe.

Two layers make an induction circuit. Layer 0, head 0 looks one position back (RoPE turns a constant query into a look
at a fixed distance) and writes what stood there. Layer 1, head 0 looks for tokens whose written content equals its own
token, so that a repeated key finds the token behind its first appearance. The sink gives that head a place to rest when
nothing matches. The indexers start from what attention has become: index head ``h`` as a copy of attention head ``h``.
From random weights they find content late, and on some seeds not at all. Everything stays trainable.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from integration.tiny_dsa import dimensions as dim
from integration.tiny_dsa.training.model import (
    HEADS,
    INDEX_HEADS,
    QK,
    Attention,
    TinyModel,
    groups,
    inverse_frequencies,
)
from integration.tiny_dsa.training.vocabulary import BOS

FREQUENCIES = 6
"""Fastest RoPE frequencies of the previous-token head: slower ones hardly tell neighbours apart."""
PREVIOUS_LOGIT = 12.0
WRITE_GAIN = 2.0
MATCH_GAIN = 4.0
SINK_MARK = 6.0
"""Size of the embedding dimension that only ``<bos>`` has, about as long as the rest of an embedding."""
SINK_GAIN = 3.0
_MARK = dim.HIDDEN - 1
_SINK = dim.QK_NOPE - 1


@torch.no_grad()
def build_in(model: TinyModel, *, sink: bool) -> None:
    """Write the circuits into a random model.

    Args:
        model: changed in place.
        sink: whether the matching head rests on ``<bos>`` when nothing matches.
    """
    first, second = (model.model.layers[layer].self_attn for layer in (0, 1))
    embeddings = model.model.embed_tokens.weight
    shared = embeddings.mean(0) / embeddings.mean(0).norm()
    first.o_proj.weight[:, : dim.V_HEAD].mul_(WRITE_GAIN)
    _look_back(first, embeddings, shared)
    _match(first, second)
    if sink:
        _rest_on_bos(model, second, shared)


@torch.no_grad()
def copy_heads(model: TinyModel) -> None:
    """Start each indexer as its layer's attention: index head ``h`` scores as attention head ``h`` does.

    An index key holds the rotary part that all heads share and the content key of each head; an index query meets the
    part of its own head. The norm of the latent in between only scales a token's key, and the indexer's own key norm
    takes that back.

    Args:
        model: changed in place.
    """
    embeddings = model.model.embed_tokens.weight
    shared = embeddings.mean(0) / embeddings.mean(0).norm()
    for layer in groups():
        attention: Attention = model.model.layers[layer].self_attn
        indexer, latent = attention.indexer, attention.kv_a_proj_with_mqa.weight[: dim.KV_LORA_RANK]
        expand = attention.kv_b_proj.weight.view(HEADS, -1, dim.KV_LORA_RANK)[:, : dim.QK_NOPE]
        content = expand * attention.kv_a_layernorm.weight @ latent / latent.norm(dim=1).mean()
        rotary = attention.kv_a_proj_with_mqa.weight[dim.KV_LORA_RANK :]
        indexer.wk.weight.copy_(torch.cat([rotary, content.flatten(0, 1)]))
        indexer.wq_b.weight.zero_()
        queries = indexer.wq_b.weight.view(INDEX_HEADS, dim.INDEX_HEAD, -1)
        for head, query in enumerate(attention.q_b_proj.weight.view(HEADS, QK, -1)):
            own = dim.QK_ROPE + head * dim.QK_NOPE
            queries[head, : dim.QK_ROPE] = query[dim.QK_NOPE :]
            queries[head, own : own + dim.QK_NOPE] = query[: dim.QK_NOPE]
        indexer.weights_proj.weight.copy_(shared.expand(INDEX_HEADS, -1))


def _look_back(attention: Attention, embeddings: Tensor, shared: Tensor) -> None:
    """Head 0: key frequency i points at the shared direction, the query is the same turned back by one position."""
    always = float((embeddings @ shared).mean() / embeddings.pow(2).mean(1).sqrt().mean())
    in_latent = always / math.sqrt((dim.Q_LORA_RANK - 1 + always**2) / dim.Q_LORA_RANK)
    size = math.sqrt(PREVIOUS_LOGIT / (in_latent * always * QK**-0.5))
    attention.q_a_proj.weight[0] = shared
    query, key = attention.q_b_proj.weight, attention.kv_a_proj_with_mqa.weight[dim.KV_LORA_RANK :]
    query[:QK] = 0
    key[: 2 * FREQUENCIES] = 0
    for pair, angle in enumerate(inverse_frequencies()[:FREQUENCIES].tolist()):
        row = dim.QK_NOPE + 2 * pair
        query[row, 0], query[row + 1, 0] = size * math.cos(angle), -size * math.sin(angle)
        key[2 * pair] = size * shared


def _match(first: Attention, second: Attention) -> None:
    """Head 0 of layer 1: query = own token as layer 0 would write it, key = what layer 0 wrote."""
    rows = slice(dim.QK_NOPE, dim.QK_NOPE + dim.V_HEAD)
    read = first.kv_b_proj.weight[rows] @ first.kv_a_proj_with_mqa.weight[: dim.KV_LORA_RANK]
    written = torch.linalg.pinv(first.o_proj.weight[:, : dim.V_HEAD])
    second.q_a_proj.weight[: dim.QK_NOPE] = read / read.norm(dim=1, keepdim=True)
    second.kv_a_proj_with_mqa.weight[: dim.QK_NOPE] = 1.5 * written / written.norm(dim=1, keepdim=True)
    same = MATCH_GAIN * torch.eye(dim.QK_NOPE)
    for projection, size in ((second.q_b_proj.weight, QK), (second.kv_b_proj.weight, dim.QK_NOPE)):
        projection[:size] = 0
        projection[: dim.QK_NOPE, : dim.QK_NOPE] = same


def _rest_on_bos(model: TinyModel, attention: Attention, shared: Tensor) -> None:
    """One content dimension of the matching head: a constant query meets a key that only ``<bos>`` has."""
    embeddings = model.model.embed_tokens.weight
    embeddings[:, _MARK] = 0
    embeddings[BOS, _MARK] = SINK_MARK
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[_MARK] = 0
        layer.mlp.down_proj.weight[_MARK] = 0
    attention.q_a_proj.weight[_SINK] = shared
    attention.kv_a_proj_with_mqa.weight[_SINK] = 0
    attention.kv_a_proj_with_mqa.weight[_SINK, _MARK] = 1
    for projection in (attention.q_b_proj.weight, attention.kv_b_proj.weight):
        projection[_SINK, _SINK] = SINK_GAIN
