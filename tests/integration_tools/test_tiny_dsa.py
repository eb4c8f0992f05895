"""The tiny checkpoints: reproducible, small, complete, and loadable by transformers."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from integration.tiny_dsa import ModelKind, TinySpec, write_checkpoint
from integration.tiny_dsa.__main__ import app
from integration.tiny_dsa.spec import MAX_LAYERS
from integration.tiny_dsa.tokenizer import FIRST_BYTE, FIRST_SYLLABLE, SpecialToken, build_tokenizer, readable_tokens
from integration.tiny_dsa.weights import model_weights
from kvplugin.errors import ConfigError

FILES = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
INDEXER = {"wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight"}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[ModelKind, Path]:
    root = tmp_path_factory.mktemp("tiny")
    return {kind: write_checkpoint(TinySpec(kind), root / kind) for kind in ModelKind}


def read_config(checkpoint: Path) -> dict[str, object]:
    return json.loads((checkpoint / "config.json").read_text())


def test_writes_the_same_bytes_in_another_process(checkpoints: dict[ModelKind, Path], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "integration.tiny_dsa", "glm52", "--out", str(tmp_path)]
    subprocess.run(command, check=True, timeout=120)
    assert {file.name for file in tmp_path.iterdir()} == FILES
    for name in FILES:
        assert (tmp_path / name).read_bytes() == (checkpoints[ModelKind.GLM52] / name).read_bytes(), name


def test_a_seed_changes_every_random_tensor() -> None:
    first, second = (model_weights(TinySpec(ModelKind.GLM52, seed=seed)) for seed in (0, 1))
    constant = {name for name in first if "k_norm" in name or "correction_bias" in name}
    assert {name for name in first if torch.equal(first[name], second[name])} == constant


@pytest.mark.parametrize("kind", ModelKind)
def test_stays_under_ten_megabytes(kind: ModelKind, tmp_path: Path) -> None:
    write_checkpoint(TinySpec(kind, layers=MAX_LAYERS), tmp_path)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 10_000_000


def test_an_intact_checkpoint_is_left_alone_and_a_damaged_one_restored(tmp_path: Path) -> None:
    write_checkpoint(TinySpec(ModelKind.LLAMA), tmp_path)
    written = {name: (tmp_path / name).stat().st_mtime_ns for name in FILES}
    weights = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[:1000])
    write_checkpoint(TinySpec(ModelKind.LLAMA), tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == weights
    assert {name for name in FILES if (tmp_path / name).stat().st_mtime_ns != written[name]} == {"model.safetensors"}


@pytest.mark.parametrize("kind", [kind for kind in ModelKind if kind.is_sparse])
def test_indexer_weights_stand_in_leader_layers_only(kind: ModelKind) -> None:
    weights = model_weights(TinySpec(kind, layers=4, pattern="FSFS"))
    found = {name.split("layers.")[1] for name in weights if ".indexer." in name}
    assert found == {f"{layer}.self_attn.indexer.{name}" for layer, name in itertools.product((0, 2), INDEXER)}


def test_dense_model_shares_every_other_tensor() -> None:
    dense = model_weights(TinySpec(ModelKind.DENSE))
    for kind in (ModelKind.V32, ModelKind.GLM52):
        sparse = model_weights(TinySpec(kind))
        assert {name for name in sparse if ".indexer." not in name} == dense.keys()
        assert all(torch.equal(sparse[name], tensor) for name, tensor in dense.items())


@pytest.mark.parametrize(("layers", "pattern"), [(6, "FSSFSS"), (4, "FSSF"), (1, "F")])
def test_default_pattern_repeats_fss(layers: int, pattern: str) -> None:
    assert TinySpec(ModelKind.V32, layers=layers).sparsity == (pattern, 64)


def test_config_carries_the_choices(tmp_path: Path) -> None:
    config = read_config(write_checkpoint(TinySpec(ModelKind.V32, 3, "FFS", 32), tmp_path))
    assert config["architectures"] == ["DeepseekV32ForCausalLM"]
    assert (config["num_hidden_layers"], config["index_topk_pattern"], config["index_topk"]) == (3, "FFS", 32)


@pytest.mark.parametrize("kind", [ModelKind.DENSE, ModelKind.LLAMA])
def test_models_without_an_indexer_do_not_mention_one(kind: ModelKind, checkpoints: dict[ModelKind, Path]) -> None:
    assert not [key for key in read_config(checkpoints[kind]) if "index" in key]


@pytest.mark.parametrize("text", ["plain ASCII", "Grüße, 世界 🌍", "tab\tnew\nline\r\x00\x7f", "e\u0301 \u200b ﷽", ""])
def test_tokenizer_round_trip_is_one_token_a_byte(text: str) -> None:
    tokenizer = build_tokenizer()
    tokens = tokenizer.encode(text).ids
    assert tokens == [FIRST_BYTE + byte for byte in text.encode()]
    assert tokenizer.decode(tokens) == text


def test_special_tokens_are_single_tokens() -> None:
    assert build_tokenizer().encode("a<eos>").ids == [FIRST_BYTE + ord("a"), SpecialToken.EOS]


def test_generated_tokens_are_readable() -> None:
    """The largest logit always belongs to a token of printable ASCII: all others have a logit of exactly 0."""
    tokenizer, readable = build_tokenizer(), readable_tokens()
    assert all(tokenizer.decode([token]).isascii() and tokenizer.decode([token]).isprintable() for token in readable)
    assert len(readable) > FIRST_SYLLABLE
    head = model_weights(TinySpec(ModelKind.LLAMA, layers=1))["lm_head.weight"]
    assert set(torch.nonzero(head.abs().sum(dim=1)).flatten().tolist()) == set(readable)


@pytest.mark.parametrize("kind", ModelKind)
def test_transformers_reads_tokenizer_and_chat_template(kind: ModelKind, checkpoints: dict[ModelKind, Path]) -> None:
    transformers = pytest.importorskip("transformers", reason="part of the dev extra")
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(checkpoints[kind])
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Grüße"}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == "<bos>system: Be brief.\nuser: Grüße\nassistant:"
    tokens = tokenizer.encode(rendered)
    assert tokens[0] == tokenizer.bos_token_id == SpecialToken.BOS
    assert tokenizer.decode(tokens, skip_special_tokens=True) == rendered.removeprefix("<bos>")
    assert (len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id) == (512, SpecialToken.EOS, SpecialToken.PAD)


@pytest.mark.parametrize("kind", [ModelKind.GLM52, ModelKind.DENSE, ModelKind.LLAMA])
def test_transformers_matches_every_key(kind: ModelKind, checkpoints: dict[ModelKind, Path]) -> None:
    transformers = pytest.importorskip("transformers", reason="part of the dev extra")
    model, report = transformers.AutoModelForCausalLM.from_pretrained(checkpoints[kind], output_loading_info=True)
    assert type(model).__name__ == read_config(checkpoints[kind])["architectures"][0]
    assert not any(report.values()), report


def test_glm52_answers_depend_on_the_selection(checkpoints: dict[ModelKind, Path]) -> None:
    """Random weights can make attention cancel out; then no policy would show in the text."""
    transformers = pytest.importorskip("transformers", reason="part of the dev extra")
    answers = []
    prompt = torch.tensor([build_tokenizer().encode("The quick brown fox jumps over the lazy dog. " * 3).ids])
    for index_topk in (64, prompt.shape[1] + 16):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            checkpoints[ModelKind.GLM52], index_topk=index_topk, dtype=torch.float32
        )
        answer = model.generate(prompt, max_new_tokens=16, do_sample=False)[0, prompt.shape[1] :]
        answers.append(answer.tolist())
    sparse, dense = answers
    assert sparse != dense
    assert len(set(sparse)) >= 4, f"degenerate text: {sparse}"
    assert set(sparse) <= set(readable_tokens())


REFUSALS = [
    (["glm52", "--pattern", "FSS"], "--pattern: 'FSS' has 3 letters; give 6, one a layer"),
    (["glm52", "--pattern", "FSSFSSF"], "--pattern: 'FSSFSSF' has 7 letters; give 6, one a layer"),
    (["v32", "--pattern", "SFSFSF"], "--pattern: 'SFSFSF' has no indexer before its first layer; start with F"),
    (
        ["v32", "--pattern", "FSXFSS"],
        "--pattern: 'FSXFSS' has letters other than F and S; use F (runs the indexer) or S (shares)",
    ),
    (["v32", "--index-topk", "0"], "--index-topk: 0 selects no token; use 1 or more"),
    (["v32", "--layers", "0"], "--layers: 0 is out of range; use 1 to 12"),
    (["v32", "--layers", "13"], "--layers: 13 is out of range; use 1 to 12"),
    (["v32", "--seed", "-1"], "--seed: -1 is negative; use 0 or more"),
    (["dense", "--index-topk", "64"], "--index-topk: given for 'dense', which has no indexer; leave it out"),
    (["llama", "--pattern", "F"], "--pattern: given for 'llama', which has no indexer; leave it out"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSALS)
def test_refuses(arguments: list[str], message: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "model")])
    assert (result.exit_code, result.stderr.splitlines()) == (2, [message])
    assert not (tmp_path / "model").exists()


def test_refuses_all_wrong_fields_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        TinySpec(ModelKind.V32, layers=2, pattern="SFX", index_topk=0, seed=-5)
    assert [problem.key for problem in caught.value.problems] == ["seed", "index_topk", "pattern", "pattern", "pattern"]


def test_refuses_an_unknown_kind_naming_the_valid_ones(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["v33", "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert all(f"'{kind}'" in result.stderr for kind in ["v33", *ModelKind])


@pytest.mark.parametrize("below", [(), ("model",)])
def test_refuses_an_out_that_is_a_file_or_lies_in_one(below: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("kept")
    out = file.joinpath(*below)
    result = CliRunner().invoke(app, ["llama", "--out", str(out)])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"--out: {out}: ")
    assert result.stderr.endswith("; give a directory that can be written\n")
    assert file.read_text() == "kept"
