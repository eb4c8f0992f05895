"""The committed checkpoint: it answers, and both of its forms are the same model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from integration.tiny_dsa.spec import ModelKind
from integration.tiny_dsa.training.evaluation import chunks, questions
from integration.tiny_dsa.training.export import TRAINED, export_committed, load_committed, with_halves_apart
from integration.tiny_dsa.training.losses import answer_accuracy
from integration.tiny_dsa.training.model import INDEX_HEADS, TinyModel, top_k

MOST_BYTES = 2_500_000


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return load_committed()


@torch.no_grad()
@pytest.mark.parametrize("task", ["recall", "needle", "copy"])
def test_it_answers_at_the_smallest_budget(model: TinyModel, task: str) -> None:
    batch = questions(512)[task]
    found = [answer_accuracy(model(part.tokens, select=top_k(16)), part) for part in chunks(batch)]
    assert sum(found) / len(found) >= 0.95


def test_it_is_small() -> None:
    assert sum(file.stat().st_size for file in TRAINED.iterdir()) <= MOST_BYTES


def test_the_card_names_its_licence() -> None:
    assert "license: apache-2.0" in (TRAINED / "README.md").read_text()


@pytest.mark.parametrize("kind", [ModelKind.GLM52, ModelKind.V32])
def test_forms(tmp_path: Path, kind: ModelKind) -> None:
    export_committed(kind, tmp_path, index_topk=32)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["index_topk"] == 32
    assert ("indexer_rope_interleave" in config) == (kind is ModelKind.GLM52)
    weights, stored = load_file(tmp_path / "model.safetensors"), load_file(TRAINED / "model.safetensors")
    assert weights.keys() == stored.keys()
    changed = {name for name in stored if not torch.equal(weights[name], stored[name])}
    if kind is ModelKind.GLM52:
        assert not changed
    else:
        assert {name.split("indexer.")[1].split(".")[0] for name in changed} >= {"wq_b", "wk"}


def test_halves_apart_pair_the_same_values() -> None:
    numbered = {"indexer.wq_b.weight": torch.arange(INDEX_HEADS * 128.0)[:, None]}
    (moved,) = with_halves_apart(numbered).values()
    first = moved[:128, 0].tolist()
    assert first[:3] == [0, 2, 4]
    assert first[32:35] == [1, 3, 5]
    assert first[64:] == list(range(64, 128))
