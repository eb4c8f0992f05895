"""Capture folders: what is written is read, bounded and without strays; hostile ones get one clear line."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvplugin.replay import (
    Capture,
    CaptureFileError,
    CaptureWriter,
    KVPool,
    MissingExtra,
    read_capture,
    replay_capture,
    write_capture,
)
from kvplugin.replay.capture.manifest import MANIFEST_NAME
from kvplugin.replay.capture.tensors import own_pages, tensors_of
from kvplugin.replay.capture.write import TENSOR_FILE
from kvplugin.replay.selftest.faults import GQA, MLA
from kvplugin.replay.selftest.synthetic import Shape, make_capture, make_record

MIXED = Shape(latent=32, rope=16, topk=24, world=2, prefix=20)
SHAPES = {"gqa": GQA, "mla": MLA, "bfloat16": Shape(dtype=torch.bfloat16, q_dtype=torch.bfloat16, queries=2)}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_round_trip(shape: Shape, tmp_path: Path) -> None:
    capture = make_capture(shape, layers=2, steps=2)
    assert write_capture(capture, tmp_path / "capture") == 0
    found = read_capture(tmp_path / "capture")
    assert (found.engine, found.model, found.dropped) == (capture.engine, capture.model, 0)
    assert len(found.records) == 4
    for before, after in zip(map(own_pages, capture.records), found.records, strict=True):
        a, b = tensors_of(before), tensors_of(after)
        assert a.keys() == b.keys()
        for role, tensor in a.items():
            assert (tensor.dtype, tensor.shape) == (b[role].dtype, b[role].shape), role
            assert torch.equal(tensor, b[role]), role
        for field in (
            "request",
            "layer",
            "step",
            "index_group",
            "floor",
            "content",
            "chunks",
            "backend",
            "hidden_size",
        ):
            assert getattr(before, field) == getattr(after, field), field
        for field in ("rope", "scale", "prefixes", "final_dtype"):
            assert getattr(before.inputs, field) == getattr(after.inputs, field), field
        assert before.indexer is None or after.indexer is None or before.indexer.rope == after.indexer.rope


def test_fp8_pages_are_kept_as_they_are(tmp_path: Path) -> None:
    record = make_record(Shape(length=30, page=8, latent=512, rope=64, kv_heads=1))
    pages = torch.zeros(7, 8, 656, dtype=torch.uint8)
    pages[..., :512] = torch.randint(0, 120, (7, 8, 512))
    pages[..., 512:528] = torch.full((7, 8, 4), 0.01).view(torch.uint8)
    inputs = replace(record.inputs, pool=KVPool.fp8_ds_mla(pages), head=None)
    bare = replace(record, inputs=inputs, observed=type(record.observed)(), fresh=None, content=None, chunks=())
    write_capture(Capture("engine", "model", (bare,)), tmp_path)
    found = read_capture(tmp_path).records[0]
    assert found.inputs.pool.keys.dtype is torch.uint8
    assert replay_capture(read_capture(tmp_path)).within


def test_the_policy_has_a_field_of_its_own(tmp_path: Path) -> None:
    capture = replace(make_capture(Shape(), layers=1), policy="mode topology_sparse_merge")
    write_capture(capture, tmp_path)
    assert json.loads((tmp_path / MANIFEST_NAME).read_text())["policy"] == "mode topology_sparse_merge"
    report = replay_capture(read_capture(tmp_path))
    assert (report.engine, report.policy) == (capture.engine, capture.policy)


def test_names_hold_nothing_that_a_terminal_obeys(tmp_path: Path) -> None:
    """A request's id is the client's own text."""
    record = replace(make_record(Shape()), request="a\x1b[31mb\n" + "c" * 300)
    write_capture(Capture("engine\x07", "model\r", (record,)), tmp_path)
    found = read_capture(tmp_path)
    assert (found.engine, found.model) == ("engine?", "model?")
    assert found.records[0].request == "a?[31mb?" + "c" * 192


def test_more_fresh_elements_than_tokens(tmp_path: Path) -> None:
    record = make_record(Shape(length=20))
    assert record.fresh is not None
    long = replace(record.fresh, keys=torch.cat([record.fresh.keys, record.fresh.keys[:1]]))
    write_capture(Capture("engine", "model", (replace(record, fresh=long),)), tmp_path)
    with pytest.raises(CaptureFileError, match=r"fresh_keys: 21 tokens; must be the newest of the request's 20"):
        replay_capture(read_capture(tmp_path))


def test_only_the_requests_own_pages_are_kept(tmp_path: Path) -> None:
    record = make_record(Shape(length=20, page=8))
    write_capture(Capture("engine", "model", (record,)), tmp_path)
    found = read_capture(tmp_path).records[0]
    assert found.inputs.pool.keys.shape[0] == 3
    assert found.inputs.block_table.tolist() == [[0, 1, 2]]
    assert found.page_ids is not None
    assert found.page_ids.tolist() == record.inputs.block_table[0].tolist()


def test_a_capture_is_bounded(tmp_path: Path) -> None:
    capture = make_capture(Shape(), layers=6)
    limit = 150_000
    dropped = write_capture(capture, tmp_path / "capture", limit)
    assert 0 < dropped < 6
    found = read_capture(tmp_path / "capture")
    assert (len(found.records), found.dropped) == (6 - dropped, dropped)
    assert (tmp_path / "capture" / TENSOR_FILE).stat().st_size < limit * 1.2


def test_equal_tensors_are_written_once(tmp_path: Path) -> None:
    record = make_record(Shape())
    sizes = []
    for name, layers in (("one", 1), ("many", 5)):
        records = tuple(replace(record, layer=layer) for layer in range(layers))
        write_capture(Capture("engine", "model", records), tmp_path / name)
        sizes.append((tmp_path / name / TENSOR_FILE).stat().st_size)
    assert sizes[0] == sizes[1]


def test_the_writer_keeps_what_it_was_given(tmp_path: Path) -> None:
    """The engine overwrites its tensors long before the file is written."""
    record = make_record(Shape())
    expected = own_pages(record).inputs.pool.keys.clone()
    with CaptureWriter(tmp_path, "engine", "model") as writer:
        writer.add(record)
        record.inputs.pool.keys.zero_()
        record.inputs.q.zero_()
    found = read_capture(tmp_path)
    assert torch.equal(found.records[0].inputs.pool.keys, expected)
    assert replay_capture(found).within


def test_a_writer_that_fails_leaves_no_capture(tmp_path: Path) -> None:
    def engine() -> None:
        with CaptureWriter(tmp_path / "x", "engine", "model") as writer:
            writer.add(make_record(Shape()))
            raise RuntimeError("engine died")

    with pytest.raises(RuntimeError, match="engine died"):
        engine()
    assert not (tmp_path / "x" / MANIFEST_NAME).exists()


def test_a_capture_is_not_overwritten(tmp_path: Path) -> None:
    write_capture(make_capture(Shape(), layers=1), tmp_path)
    with pytest.raises(CaptureFileError, match="already holds a capture; choose an empty folder"):
        CaptureWriter(tmp_path, "engine", "model")


def edit(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """Change the manifest's JSON."""

    def apply(folder: Path) -> None:
        path = folder / MANIFEST_NAME
        manifest = json.loads(path.read_text())
        change(manifest)
        path.write_text(json.dumps(manifest))

    return apply


def entry(role: str, **changes: Any) -> Callable[[Path], None]:
    return edit(lambda manifest: manifest["records"][0]["tensors"][role].update(changes))


def field(**changes: Any) -> Callable[[Path], None]:
    return edit(lambda manifest: manifest["records"][0].update(changes))


def drop(role: str) -> Callable[[Path], None]:
    return edit(lambda manifest: manifest["records"][0]["tensors"].pop(role))


def cut(folder: Path) -> None:
    path = folder / TENSOR_FILE
    path.write_bytes(path.read_bytes()[:-100])


def huge_header(folder: Path) -> None:
    (folder / TENSOR_FILE).write_bytes(struct.pack("<Q", 1 << 60) + b"{}")


def overlapping(folder: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 4]}}).encode()
    (folder / TENSOR_FILE).write_bytes(struct.pack("<Q", len(header)) + header + b"\0\0\0\0")


def link(folder: Path) -> None:
    secret = folder.parent / "secret.safetensors"
    (folder / TENSOR_FILE).rename(secret)
    (folder / TENSOR_FILE).symlink_to(secret)


def pipe(folder: Path) -> None:
    (folder / TENSOR_FILE).unlink()
    os.mkfifo(folder / TENSOR_FILE)


def pickled(folder: Path) -> None:
    import pickle

    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, (f"touch {folder.parent}/executed",)

    (folder / TENSOR_FILE).write_bytes(pickle.dumps(Bomb()))


HOSTILE: list[tuple[Callable[[Path], Any], str]] = [
    (lambda folder: (folder / MANIFEST_NAME).unlink(), r"manifest.json: missing; must be a plain file"),
    (lambda folder: (folder / MANIFEST_NAME).write_text("{"), r"manifest.json: the file: Invalid JSON"),
    (lambda folder: (folder / MANIFEST_NAME).write_text("[" * 100_000), r"manifest.json: the file: Invalid JSON"),
    (lambda folder: (folder / MANIFEST_NAME).write_bytes(b"\xff\xfe\0"), r"manifest.json: the file: Invalid JSON"),
    (lambda folder: (folder / MANIFEST_NAME).write_bytes(b" " * ((64 << 20) + 1)),
     r"manifest.json: \d+ bytes; a manifest has at most"),
    (edit(lambda m: m.update(version=2)), r"version: Input should be 1"),
    (edit(lambda m: m.update(format="other")), r"format: Input should be 'kvplugin.replay.capture'"),
    (edit(lambda m: m.update(surprise=1)), r"surprise: Extra inputs are not permitted"),
    (edit(lambda m: m.update(records=[])), r"no records; a capture has at least one"),
    (edit(lambda m: m.update(engine="x" * 1000)), r"engine: String should have at most 200 characters"),
    (edit(lambda m: m.update(engine="a \x1b[31m")), r"engine: String should match pattern"),
    (edit(lambda m: m.update({"\x1b[31m": 1})), r"json: \?\[31m: Extra inputs are not permitted"),
    (field(layer=-1), r"records.0.layer: Input should be greater than or equal to 0"),
    (field(page_format="other"), r"records.0.page_format: Input should be 'gqa', 'mla' or 'fp8_ds_mla'"),
    (field(scale=float("nan")), r"records.0.scale: Input should be a finite number"),
    (field(content="../../etc/passwd"), r"records.0.content: String should match pattern"),
    (entry("q", file="../secret.safetensors"), r"file '../secret.safetensors'; must be the plain name"),
    (entry("q", file="/etc/passwd"), r"file '/etc/passwd'; must be the plain name"),
    (entry("q", file="a/../b.safetensors"), r"must be the plain name"),
    (entry("q", file=".hidden.safetensors"), r"must be the plain name"),
    (entry("q", file="x.safetensors\n"), r"must be the plain name"),
    (entry("q", file="other.safetensors"), r"other.safetensors: missing; must be a plain file"),
    (entry("q", name="nothing"), r"tensors.safetensors: has no tensor 'nothing'; the manifest names it"),
    (entry("q", dtype="bfloat16"), r"is float32 \[1, 4, 1, 16\]; the manifest says bfloat16 \[1, 4, 1, 16\]"),
    (entry("q", dtype="pickle"), r"records.0.tensors.q.dtype: String should match pattern"),
    (entry("q", shape=[1, 4, 16]), r"is float32 \[1, 4, 1, 16\]; the manifest says float32 \[1, 4, 16\]"),
    (entry("q", shape=[-1]), r"records.0.tensors.q.shape.0: Input should be greater than or equal to 0"),
    (entry("q", shape=[1 << 40]), r"tensors of more than 17179869184 bytes; raise the limit"),
    (drop("q"), r"records.0 \(request r0, layer 0, step 0\): has no q; these tensors are needed"),
    (drop("keys"), r"has no keys; these tensors are needed"),
    (drop("head_mask"), r"has no head_mask; these tensors are needed"),
    (cut, r"tensors.safetensors: .*; must be a whole safetensors file"),
    (huge_header, r"tensors.safetensors: .*; must be a whole safetensors file"),
    (overlapping, r"tensors.safetensors: .*; must be a whole safetensors file"),
    (pickled, r"tensors.safetensors: .*; must be a whole safetensors file"),
    (link, r"tensors.safetensors: a link; must be a plain file in the capture folder"),
    (pipe, r"tensors.safetensors: not a file; must be a plain file in the capture folder"),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "message"), HOSTILE, ids=lambda each: each if isinstance(each, str) else "")
def test_hostile_captures(damage: Callable[[Path], Any], message: str, tmp_path: Path) -> None:
    folder = tmp_path / "capture"
    write_capture(make_capture(Shape(), layers=1), folder)
    damage(folder)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CaptureFileError, match=message) as error:
        read_capture(folder)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 700
    assert sorted(tmp_path.rglob("*")) == before


MALFORMED: list[tuple[Callable[[Path], Any], str]] = [
    (field(scale=-1.0), r"request r0, layer 0, step 0: replay.scale: got -1.0; must be a positive finite number"),
    (field(lse_base=None), r"replay.observed.lse_base: None"),
    (field(latent_dim=4, page_format="mla"), r"replay.pool.values: given; mla pages have none"),
    (drop("values"), r"replay.pool.values: None; GQA pages need values"),
    (field(cp_world_size=10**9), r"context_parallel.world_size: got 1000000000; must be at most 4096"),
    (field(cp_world_size=None), r"context_parallel.world_size: got 0; must be a positive integer"),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "message"), MALFORMED)
def test_records_that_cannot_be_replayed(damage: Callable[[Path], Any], message: str, tmp_path: Path) -> None:
    write_capture(make_capture(GQA, layers=1), tmp_path)
    damage(tmp_path)
    with pytest.raises(CaptureFileError, match=message) as error:
        replay_capture(read_capture(tmp_path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "role", ["fresh_keys", "indexer_keys", "indexer_scores", "physical", "selection_before", "log_probs", "page_ids"]
)
def test_side_tensors_of_the_wrong_shape(role: str, tmp_path: Path) -> None:
    """Tensors that only one stage reads are refused in one line too."""
    write_capture(make_capture(MLA, layers=1), tmp_path)
    manifest = json.loads((tmp_path / MANIFEST_NAME).read_text())
    tensors = manifest["records"][0]["tensors"]
    tensors[role] = tensors["kv_seq_lens"]
    (tmp_path / MANIFEST_NAME).write_text(json.dumps(manifest))
    with pytest.raises(CaptureFileError, match=rf"{role}") as error:
        replay_capture(read_capture(tmp_path))
    assert "\n" not in str(error.value)


def test_nothing_was_executed(tmp_path: Path) -> None:
    folder = tmp_path / "capture"
    write_capture(make_capture(Shape(), layers=1), folder)
    pickled(folder)
    with pytest.raises(CaptureFileError):
        read_capture(folder)
    assert not (tmp_path / "executed").exists()


def test_without_safetensors_the_command_to_install_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_capture(make_capture(Shape(), layers=1), tmp_path / "there")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    message = r"safetensors is not installed; a capture file needs it; pip install 'kvplugin\[replay\]'"
    with pytest.raises(MissingExtra, match=message):
        write_capture(make_capture(Shape(), layers=1), tmp_path / "new")
    with pytest.raises(MissingExtra, match=message):
        read_capture(tmp_path / "there")


def test_importing_replay_loads_no_engine_and_no_compiler() -> None:
    others = ["vllm", "triton", "numba", "safetensors", "jinja2"]
    code = f"import sys, kvplugin.replay; print(*({others} & sys.modules.keys()))".replace("[", "{").replace("]", "}")
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert finished.stdout.split() == []


def problem(act: Callable[[], object]) -> str:
    """The refusal's text; empty if there was none."""
    try:
        act()
    except CaptureFileError as error:
        return str(error)
    return ""


@given(st.data())
def test_mixed_up_tensors_end_in_one_line_or_a_report(data: st.DataObject) -> None:
    """Any tensor in another's place: refused or reported, never a traceback."""
    with TemporaryDirectory() as folder:
        write_capture(make_capture(MIXED, layers=1), Path(folder))
        manifest = json.loads((Path(folder) / MANIFEST_NAME).read_text())
        tensors = manifest["records"][0]["tensors"]
        roles = sorted(tensors)
        for _ in range(data.draw(st.integers(1, 3))):
            tensors[data.draw(st.sampled_from(roles))] = tensors[data.draw(st.sampled_from(roles))]
        (Path(folder) / MANIFEST_NAME).write_text(json.dumps(manifest))
        assert "\n" not in problem(lambda: replay_capture(read_capture(Path(folder))))


@given(st.data())
def test_random_integers_end_in_one_line_or_a_report(data: st.DataObject) -> None:
    record = make_record(MIXED)
    tensors = [record.inputs.block_table, record.inputs.kv_seq_lens, record.inputs.cache_position]
    tensors += [record.inputs.query_position_ids, record.inputs.global_token_positions, record.physical]
    tensors += [record.inputs.selection, record.selection_before, record.inputs.head.targets]  # type: ignore[union-attr]
    for tensor in data.draw(st.lists(st.sampled_from(tensors), min_size=1, max_size=3)):
        index = data.draw(st.integers(0, tensor.numel() - 1))
        tensor.view(-1)[index] = data.draw(st.sampled_from([-(2**63), -2, -1, 0, 1, 89, 90, 2143289344, 2**63 - 1]))
    assert "\n" not in problem(lambda: replay_capture(Capture("engine", "model", (record,))))
