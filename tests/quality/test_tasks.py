from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from integration.tiny_dsa.training import vocabulary as words
from integration.tiny_dsa.training.evaluation import questions
from integration.tiny_dsa.training.tasks import TaskBatch, skipping_positions, training_batch
from integration.tiny_dsa.training.word_tokenizer import build_word_tokenizer


@pytest.mark.parametrize("length", [128, 256, 1024])
def test_every_answer_stands_at_its_source(length: int) -> None:
    for task, batch in questions(length).items():
        assert batch.tokens.shape[1] == length
        assert (batch.tokens[:, 0] == words.BOS).all()
        right = batch.tokens[batch.answers]
        sources = batch.sources[batch.answers]
        rows = batch.answers.nonzero()[:, 0]
        if task == "absent":
            assert (right == words.NONE).all()
            assert (sources == words.BOS).all()
        else:
            assert torch.equal(batch.tokens[rows, sources], right), task


def test_header_is_among_the_sinks() -> None:
    batch = questions(256)["header"]
    assert (batch.sources[batch.answers] < 4).all()


def test_absent_keys_are_nowhere_in_the_context() -> None:
    batch = questions(256)["absent"]
    for tokens, answers in zip(batch.tokens, batch.answers, strict=True):
        first = int(answers.nonzero()[0])
        asked = tokens[answers.nonzero()[:, 0] - 1]
        assert not torch.isin(asked, tokens[: first - 1]).any()


def test_keys_have_one_value_in_a_sequence() -> None:
    batch = training_batch(np.random.default_rng(3), 12, 256, absent=0.2)
    recall = TaskBatch(*(field[5:] for field in batch))
    for tokens in recall.tokens.tolist():
        told: dict[int, int] = {}
        for key, value in pairwise(tokens):
            if words.FIRST_KEY <= key < words.FIRST_VALUE and value != words.ASK:
                assert told.setdefault(key, value) == value


def test_positions_ascend_to_the_furthest() -> None:
    positions = skipping_positions(np.random.default_rng(0), 4, 64, 500)
    assert (positions.diff(dim=1) >= 1).all()
    assert positions.max() < 500


def test_tokenizer_reads_what_it_writes() -> None:
    tokenizer = build_word_tokenizer()
    assert len(words.WORDS) == len(set(words.WORDS)) == 256
    tokens = questions(256)["recall"].tokens[0].tolist()
    assert tokenizer.encode(tokenizer.decode(tokens[1:])).ids == tokens
    assert tokenizer.encode("xyzzy ?").ids == [words.BOS, words.UNKNOWN, words.ASK]
