"""The tasks: batches of token sequences in which every answer has one place in the context that gives it away."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from integration.tiny_dsa.training import vocabulary as words

FILLER_WEIGHT = 0.1
"""Loss weight of filler: enough to keep it text, too little to compete with the answers."""
PHRASE = 4
_PHRASES = words.FIRST_FILLER + np.stack(
    [np.random.default_rng(1234 + row).permutation(len(words.FILLER_WORDS))[:PHRASE] for row in range(48)]
)


class TaskBatch(NamedTuple):
    """Sequences of one length.

    Attributes:
        tokens: int64 ``[B, T]``, starting with ``<bos>``.
        weights: float32 ``[B, T]``, loss weight of predicting that token.
        answers: bool ``[B, T]``, the tokens that count as answers (each is predicted by the row before it).
        sources: int64 ``[B, T]``, where an answer's row must look; -1 elsewhere.
    """

    tokens: Tensor
    weights: Tensor
    answers: Tensor
    sources: Tensor


def recall(
    draw: np.random.Generator,
    sequences: int,
    length: int,
    pairs: int,
    queries: int,
    *,
    absent: float = 0.0,
    header: bool = False,
) -> TaskBatch:
    """Key-value pairs scattered over filler, then ``? key value`` for some of them.

    Args:
        draw: source of chance.
        sequences, length: shape of the batch.
        pairs: pairs in the context; fewer where they do not fit.
        queries: questions at the end.
        absent: share of the questions whose key has no value; they are answered ``none``.
        header: whether the first pair stands right after ``<bos>``, among the attention sinks, and is asked for first.
    """
    body = length - 1 - 3 * queries
    slots = body // 2
    keys = len(words.KEY_WORDS)
    pairs = min(pairs, slots, keys - 1)
    tokens, weights = _filler(draw, sequences, length)
    row = np.arange(sequences)[:, None]
    slot = _distinct(draw, sequences, slots, pairs)
    if header:
        # Slot 0 may be among the others already: it changes places with the first.
        slot[slot == 0] = np.broadcast_to(slot[:, :1], slot.shape)[slot == 0]
        slot[:, 0] = 0
    key = _distinct(draw, sequences, keys, keys)
    value = words.FIRST_VALUE + draw.integers(0, len(words.VALUE_WORDS), (sequences, keys))
    for column, content in ((1, words.FIRST_KEY + key[:, :pairs]), (2, value[:, :pairs])):
        tokens[row, column + 2 * slot] = content
        weights[row, column + 2 * slot] = 0
    asked = _asked(draw, sequences, pairs, queries)
    if header:
        asked[:, 0] = 0
    missing = draw.random((sequences, queries)) < absent
    asked = np.where(missing, draw.integers(pairs, keys, (sequences, queries)), asked)
    first = 1 + body + 3 * np.arange(queries)[None]
    tokens[:, first[0]] = words.ASK
    tokens[row, first + 1] = words.FIRST_KEY + key[row, asked]
    tokens[row, first + 2] = np.where(missing, words.NONE, value[row, asked])
    weights[:, 1 + body :] = 0
    weights[:, first[0] + 2] = 1
    answers = np.zeros((sequences, length), bool)
    answers[:, first[0] + 2] = True
    sources = np.full((sequences, length), -1)
    # Nothing gives an absent key away; the model parks such a row on <bos>.
    sources[row, first + 2] = np.where(missing, words.BOS, 2 + 2 * slot[row, np.minimum(asked, pairs - 1)])
    return _batch(tokens, weights, answers, sources)


def copy(draw: np.random.Generator, sequences: int, length: int, segment: int) -> TaskBatch:
    """A segment of ``segment`` distinct keys and values somewhere in filler, and the same segment again at the end."""
    segment = min(segment, (length - 2) // 2)
    tokens, weights = _filler(draw, sequences, length)
    # No filler words: they stand all over the context, so that one word would not tell where to go on.
    content = words.FIRST_KEY + _distinct(draw, sequences, words.FIRST_FILLER - words.FIRST_KEY, segment)
    row, place = np.arange(sequences)[:, None], np.arange(segment)[None]
    first = 1 + draw.integers(0, length - 2 * segment, sequences)[:, None] + place
    tokens[row, first], weights[row, first] = content, 0
    again = slice(length - segment, length)
    tokens[:, again], weights[:, again] = content, 1
    # Nothing announces the segment's first word.
    weights[:, length - segment] = 0
    answers = np.zeros((sequences, length), bool)
    answers[:, length - segment + 1 :] = True
    sources = np.full((sequences, length), -1)
    sources[:, again] = first
    return _batch(tokens, weights, answers, sources)


def training_batch(draw: np.random.Generator, sequences: int, length: int, absent: float) -> TaskBatch:
    """Copy (40 %), recall with many pairs or few, some of them with a header."""
    copies = max(1, round(sequences * 0.4))
    longest = min(int(draw.integers(max(8, length // 12), length // 2)), 120)
    parts = [copy(draw, copies, length, longest)]
    for count in ((sequences - copies + 1) // 2, (sequences - copies) // 2):
        queries = min(int(draw.integers(length // 16, length // 6)), 64)
        most = min(len(words.KEY_WORDS), (length - 1 - 3 * queries) // 2)
        pairs = int(draw.integers(4, most + 1)) if draw.random() < 0.7 else int(draw.integers(4, 24))
        parts.append(recall(draw, count, length, pairs, queries, absent=absent, header=draw.random() < 0.3))
    return TaskBatch(*(torch.cat(field) for field in zip(*parts, strict=True)))


def skipping_positions(draw: np.random.Generator, sequences: int, length: int, furthest: int) -> Tensor:
    """Ascending positions int64 ``[B, T]`` with three random gaps: long distances at the price of a short sequence."""
    cuts = np.sort(draw.integers(1, length, (sequences, 3)), 1)
    total = draw.random((sequences, 1)) * (furthest - length)
    shares = np.sort(draw.random((sequences, 3)), 1)
    gaps = (np.diff(np.concatenate([np.zeros((sequences, 1)), shares], 1), axis=1) * total).astype(np.int64)
    positions = np.arange(length)[None] + sum(
        gaps[:, cut : cut + 1] * (np.arange(length)[None] >= cuts[:, cut : cut + 1]) for cut in range(3)
    )
    return torch.from_numpy(positions)


def _filler(draw: np.random.Generator, sequences: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of random phrases behind ``<bos>``, and their weights."""
    text = _PHRASES[draw.integers(0, len(_PHRASES), (sequences, length // PHRASE + 2))].reshape(sequences, -1)
    start = draw.integers(0, PHRASE)
    tokens = np.concatenate([np.full((sequences, 1), words.BOS), text[:, start : start + length - 1]], 1)
    weights = np.full((sequences, length), FILLER_WEIGHT, np.float32)
    weights[:, 0] = 0
    return tokens, weights


def _distinct(draw: np.random.Generator, rows: int, choices: int, count: int) -> np.ndarray:
    """``count`` different numbers below ``choices`` in each row."""
    return draw.random((rows, choices)).argsort(1)[:, :count]


def _asked(draw: np.random.Generator, rows: int, pairs: int, queries: int) -> np.ndarray:
    if queries > pairs:
        return draw.integers(0, pairs, (rows, queries))
    return _distinct(draw, rows, pairs, queries)


def _batch(*arrays: np.ndarray) -> TaskBatch:
    return TaskBatch(*(torch.from_numpy(array) for array in arrays))
