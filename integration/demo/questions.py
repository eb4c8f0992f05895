"""The demo's questions: the same ones on every machine and in every run, each with its right answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from integration.tiny_dsa.training.evaluation import questions
from integration.tiny_dsa.training.vocabulary import WORDS

LENGTHS = (128, 256, 512, 1024)
"""Tokens of the texts that the questions stand at the end of."""
TEXTS = {"recall": 2, "needle": 4, "copy": 2, "header": 2}
"""Texts of each task at each length, as many as a newcomer has the patience for."""
COPIED = 8
"""Words of a copy to answer, from its middle on; the other tasks have answers of one word."""


@dataclass(frozen=True)
class Question:
    """A text that ends where the answer begins; ``right`` holds the words that must follow."""

    task: str
    prompt: str
    right: tuple[str, ...]


def demo_questions() -> tuple[Question, ...]:
    """Of every text the last question, or the second half of the copy."""
    return tuple(question for length in LENGTHS for question in _of_length(length))


def _of_length(length: int) -> Iterator[Question]:
    batches = questions(length)
    for task, texts in TEXTS.items():
        batch = batches[task]
        for tokens, is_answer in zip(batch.tokens[:texts].tolist(), batch.answers[:texts], strict=True):
            words = [WORDS[token] for token in tokens]
            places = is_answer.nonzero().flatten().tolist()
            first, count = (places[len(places) // 2], COPIED) if task == "copy" else (places[-1], 1)
            # The tokenizer puts the first word, <bos>, in front by itself.
            yield Question(task, " ".join(words[1:first]), tuple(words[first : first + count]))
