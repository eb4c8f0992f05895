"""One conversion for a group: who shares, who converts alone, and what is counted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from batches import Batch, Request
from expected import assert_selected, expected
from requests_known import tell_prompts
from rig import POLICY, Rig
from standins import LOG

from integration.parity.interpreter import scalar_conditions_as_masks
from kvplugin.remap.paths import RemapPath

pytestmark = pytest.mark.usefixtures("gpu")

MIXED = Batch((Request(1, 300, prompt=200), Request(4, 520, 20, prompt=600)))


class Conversion:
    """A conversion that counts its calls, and returns a new object each time."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, requests: torch.Tensor, table: torch.Tensor, topk: torch.Tensor, **options: Any) -> object:
        self.calls += 1
        return object()


@pytest.fixture
def paths() -> torch.Tensor:
    return torch.zeros(len(RemapPath), dtype=torch.int64)


def layers(
    paths: torch.Tensor, convert: Callable[..., object], *asked: dict[str, Any], grouped: bool = True, size: int = 3
) -> list[object]:
    """Let the layers of a group ask one after the other; ``place``, ``batch`` and arguments as given."""
    from kvplugin.vllm.gpu.conversions import SharedConversions, converted

    shared = SharedConversions(grouped=grouped, paths=paths)
    group = SimpleNamespace(num_layers=size)
    results = []
    for number, each in enumerate(asked):
        given = {"group": group, "place": number, "batch": BATCHES[0], "rows": 2, "table": TABLE, "topk": TOPK} | each
        with shared.of_layer(given["group"], given["place"], given["batch"]):
            requests = torch.zeros(given["rows"], dtype=torch.int32)
            results.append(converted(convert, requests, given["table"], given["topk"], **given.get("options", {})))
    return results


BATCHES = (object(), object())
TABLE, OTHER_TABLE = torch.zeros(2, 4), torch.zeros(2, 4)
TOPK = torch.zeros(2, 128)


def counts(paths: torch.Tensor) -> dict[RemapPath, int]:
    return {path: int(paths[path]) for path in RemapPath if paths[path]}


def test_followers_read_what_their_leader_left(paths: torch.Tensor) -> None:
    convert = Conversion()
    first, *rest = layers(paths, convert, {}, {}, {})
    assert convert.calls == 1
    assert all(found is first for found in rest)
    assert counts(paths) == {RemapPath.GROUPED: 1, RemapPath.MEMO: 2}


@pytest.mark.parametrize(
    "follower",
    [
        {"batch": BATCHES[1]},
        {"table": OTHER_TABLE},
        {"topk": TOPK[:, :64]},
        {"rows": 1},
        {"options": {"BLOCK_STRIDE_ROWS": 192}},
        {"group": SimpleNamespace(num_layers=3)},
    ],
    ids=["batch", "table", "shape", "rows", "stride", "group"],
)
def test_a_follower_that_asks_for_something_else_converts(follower: dict[str, Any], paths: torch.Tensor) -> None:
    convert = Conversion()
    first, second = layers(paths, convert, {}, follower)
    assert convert.calls == 2
    assert second is not first
    assert counts(paths) == {RemapPath.GROUPED: 1, RemapPath.FALLBACK: 1}


def test_a_follower_before_its_leader_converts(paths: torch.Tensor) -> None:
    convert = Conversion()
    layers(paths, convert, {"place": 1}, {"place": 0}, {"place": 1})
    assert convert.calls == 2
    assert counts(paths) == {RemapPath.FALLBACK: 1, RemapPath.GROUPED: 1, RemapPath.MEMO: 1}


def test_nothing_is_left_after_the_last_layer(paths: torch.Tensor) -> None:
    convert = Conversion()
    layers(paths, convert, {}, {}, {}, {"place": 1})
    assert convert.calls == 2
    assert counts(paths)[RemapPath.FALLBACK] == 1


@pytest.mark.parametrize("alone", [{"grouped": False}, {"size": 1}], ids=["switched-off", "single"])
def test_layers_alone_convert_each(alone: dict[str, Any], paths: torch.Tensor) -> None:
    convert = Conversion()
    layers(paths, convert, {"place": 0}, {"place": 0}, **alone)
    assert convert.calls == 2
    assert counts(paths) == {RemapPath.PER_LAYER: 2}


def test_vllms_own_memory_is_not_shared(paths: torch.Tensor) -> None:
    """vLLM converts into a group's own memory where it shares by itself."""
    convert = Conversion()
    layers(paths, convert, {"options": {"out": TOPK}}, {"options": {"out": TOPK}})
    assert convert.calls == 2
    assert counts(paths) == {}


def test_threads_do_not_see_each_other(paths: torch.Tensor) -> None:
    """Micro-batches run in threads: what attends in one is nothing to the other."""
    from kvplugin.vllm.gpu.conversions import SharedConversions, converted

    shared, convert = SharedConversions(grouped=True, paths=paths), Conversion()
    group = SimpleNamespace(num_layers=2)

    def alone() -> None:
        converted(convert, torch.zeros(2), TABLE, TOPK)

    with shared.of_layer(group, 0, BATCHES[0]):
        thread = threading.Thread(target=alone)
        thread.start()
        thread.join()
    assert convert.calls == 1
    assert counts(paths) == {}


def test_switched_off_each_layer_converts_as_vllm_does() -> None:
    rig = Rig(options={"remap": {"grouped": False}})
    tell_prompts(rig, MIXED)
    assert_selected(rig.step(MIXED), expected(MIXED.rows, POLICY, rig.width).selections)
    assert LOG.count("conversion") == 3


def test_context_parallel_conversions_are_shared_too(paths: torch.Tensor) -> None:
    """Each layer filters its rank's tokens from the merged selection, with a function of its own module."""
    from vllm.v1.attention.backends.mla import flashmla_sparse, sparse_utils

    from kvplugin.vllm.gpu.conversions import SharedConversions

    selection = torch.randperm(500, generator=torch.Generator().manual_seed(0))[:256].reshape(2, 128).to(torch.int32)
    tables = torch.arange(32, dtype=torch.int32).reshape(2, 16)
    given = {"dcp_size": 2, "dcp_rank": 1, "cp_kv_cache_interleave_size": 16, "BLOCK_SIZE": 64, "NUM_TOPK_TOKENS": 128}
    requests = torch.tensor([0, 1], dtype=torch.int32)
    shared, group = SharedConversions(grouped=True, paths=paths), SimpleNamespace(num_layers=2)
    LOG.clear()
    found = []
    with scalar_conditions_as_masks():
        for place in range(2):
            with shared.of_layer(group, place, BATCHES[0]):
                found.append(flashmla_sparse.triton_filter_and_convert_dcp_index(requests, tables, selection, **given))
        alone = sparse_utils.triton_filter_and_convert_dcp_index(requests, tables, selection, **given)
    assert LOG.count("conversion") == 2, "one for the group, one for comparison"
    assert found[0] is found[1]
    assert torch.equal(found[0], alone)
    assert 0 < int((alone >= 0).sum()) < alone.numel()


def test_wraps_come_and_go() -> None:
    from kvplugin.vllm.gpu import parts, wrap_convert, wrap_decode_topk, wrap_indexer_metadata, wrap_prefill_topk

    parts.install()
    held = wrap_convert.holders()
    assert len(held) >= 5, [f"{module.__name__}.{name}" for module, name in held]
    wraps = (wrap_prefill_topk, wrap_decode_topk, wrap_indexer_metadata, wrap_convert)
    try:
        for wrap in wraps:
            wrap.uninstall()
        for module, name in held:
            assert getattr(module, name) is wrap_convert.ORIGINALS[name], f"{module.__name__}.{name}"
    finally:
        for wrap in (*wraps, *wraps):
            wrap.install()
    for module, name in held:
        assert getattr(module, name) is wrap_convert.WRAPS[name], f"{module.__name__}.{name}"
