"""Index groups as the layers that a worker has loaded show them, drafts and faults included; no engine is started."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvplugin.config import RemapConfig
from kvplugin.remap import Member
from kvplugin.remap.groups import GroupKind, Inactive
from kvplugin.remap.layer_call import LayerCall
from kvplugin.remap.paths import RemapPath
from kvplugin.vllm.engine_remap import EngineRemap, IndexedLayer, read_layout

BLOCK, BLOCKS, WIDTH = 16, 8, 32


def layer(number: int, letter: str, *, table: str = "table", gap: int = 1, name: str = "self_attn.attn") -> Any:
    """A loaded layer, by name; ``gap`` > 1: pages of other layers lie between its own."""
    impl = IndexedLayer()
    impl.runs_indexer = letter == "F"
    full = f"model.layers.{number}.{name}"
    impl.bind(full, BLOCK, table)
    return full, SimpleNamespace(impl=impl, kv_cache=torch.zeros(BLOCKS * gap, BLOCK, WIDTH)[::gap])


def engine_of(*layers: Any, target_layers: int = 6) -> Any:
    """A vLLM configuration, as far as it is looked at, with a layer of another kind in it."""
    context = dict(layers) | {"model.layers.0.mlp": SimpleNamespace(impl=object())}
    return SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=context),
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(num_hidden_layers=target_layers)),
        device_config=SimpleNamespace(device_type="cpu"),
    )


def test_numbers_decide_whatever_the_order_of_loading() -> None:
    letters = "FSSFSS"
    loaded = [layer(i, letters[i]) for i in (0, 3, 1, 2, 4, 5)]
    assert [group.layers for group in read_layout(engine_of(*loaded)).groups] == [(0, 1, 2), (3, 4, 5)]


def test_a_draft_layer_is_its_own_group() -> None:
    loaded = [layer(0, "F"), layer(1, "S"), layer(2, "F", name="mtp_block.self_attn.attn")]
    target, draft = read_layout(engine_of(*loaded, target_layers=2)).groups
    assert (target.layers, target.kind, target.inactive) == ((0, 1), GroupKind.TARGET, None)
    assert (draft.layers, draft.kind) == ((2,), GroupKind.MTP)


def test_a_later_pipeline_stage() -> None:
    layout = read_layout(engine_of(*(layer(i, "SSFS"[i - 2]) for i in range(2, 6))))
    assert [(group.layers, group.inactive) for group in layout.groups] == [
        ((2,), Inactive.ORPHAN),
        ((3,), Inactive.ORPHAN),
        ((4, 5), None),
    ]


def test_packed_pools_have_strides_of_their_own() -> None:
    layout = read_layout(engine_of(layer(0, "F"), layer(1, "S", gap=3), layer(2, "S", gap=3)))
    assert layout.groups[0].members == (Member(BLOCK), Member(3 * BLOCK))


def convert_all(remap: EngineRemap, *numbers: int) -> dict[RemapPath, int]:
    memo = remap.memo(lambda topk: topk)
    topk = torch.zeros(1, 4, dtype=torch.int32)
    step = memo.begin_step(topk)
    table = torch.zeros(1, 2, dtype=torch.int32)
    for number in numbers:
        memo.convert(LayerCall(step, number, Member(BLOCK), topk, torch.zeros(1).int(), table, BLOCK, BLOCKS))
    return {path: count for path, count in zip(RemapPath, remap.paths.tolist(), strict=True) if count}


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        pytest.param(
            [layer(0, "F"), layer(1, "S", table="other")],
            "kvplugin: remap: layers [0, 1] convert one by one: block_tables_differ",
            id="two block tables",
        ),
        pytest.param(
            [layer(0, "F"), layer(0, "S", name="other.attn")],
            "kvplugin: remap: the index groups cannot be told; each layer converts for itself",
            id="two layers of one number",
        ),
    ],
)
def test_what_does_not_fit_converts_layer_by_layer_and_says_so(
    layers: list[Any], message: str, plugin_log: list[str]
) -> None:
    remap = EngineRemap(engine_of(*layers), RemapConfig())
    assert convert_all(remap, 0, 1) == {RemapPath.PER_LAYER: 2}
    assert message in plugin_log


def test_new_caches_are_looked_at_anew() -> None:
    """As after a profiling run, which has builders and caches of its own."""
    config = engine_of(layer(0, "F"), layer(1, "S"))
    remap = EngineRemap(config, RemapConfig())
    assert convert_all(remap, 0, 1) == {RemapPath.GROUPED: 1, RemapPath.MEMO: 1}
    config.compilation_config.static_forward_context.update([layer(0, "F", gap=2), layer(1, "S", gap=2)])
    remap.expect_layers()
    assert convert_all(remap, 0, 1)[RemapPath.FALLBACK] == 2, "these calls name the places that the layers had before"
