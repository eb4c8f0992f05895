"""Which backend serves a layer, what it is made of, and why the policy stays inactive in some engines."""

from __future__ import annotations

import sys
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from batches import Batch, Request
from rig import HEADS, LATENT, POLICY, ROPE, Rig
from standins import BLACKWELL, HOPPER, WORKSTATION, Ranks, card

from kvplugin.errors import ConfigError
from kvplugin.metrics.definitions import InactiveReason

pytestmark = pytest.mark.usefixtures("gpu")


def selector(**changes: Any) -> Any:
    from vllm.v1.attention.selector import AttentionSelectorConfig

    given = {
        "head_size": LATENT + ROPE,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": "auto",
        "block_size": 64,
        "use_mla": True,
        "use_sparse": True,
    }
    return AttentionSelectorConfig(**given | changes)


def chosen(member: Any, **changes: Any) -> str:
    from vllm.platforms import current_platform

    return str(current_platform.get_attn_backend_cls(member, selector(**changes), HEADS))


def members() -> list[Any]:
    """Every name of ours that this vLLM knows."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from kvplugin.vllm.backend_names import register_names, takes_new_names

    register_names()
    return [AttentionBackendEnum[name] for name in ("CUSTOM", *(["KVPLUGIN"] if takes_new_names() else []))]


CARDS = pytest.mark.parametrize("capability", [HOPPER, BLACKWELL, WORKSTATION], ids=str)


@CARDS
@pytest.mark.parametrize("cache", ["auto", "fp8_ds_mla"])
def test_ours_stands_for_what_vllm_picks(
    capability: tuple[int, int], cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvplugin.vllm.gpu.backends import BACKENDS

    # Asks for memory of the GPU when it is imported; it is not for sparse attention.
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.mla.cutlass_mla", None)
    rig = Rig()
    with card(capability), rig.current():
        stock = answer(None, cache)
        if stock not in BACKENDS:
            assert capability == WORKSTATION, stock
            assert stock.startswith("No valid attention backend found"), stock
        for member in members():
            assert answer(member, cache) == BACKENDS.get(stock, stock)


def answer(member: Any, cache: str) -> str:
    """The backend's path, or why there is none."""
    try:
        return chosen(member, kv_cache_dtype=cache)
    except ValueError as refused:
        return str(refused)


def test_vllms_refusals_pass_through() -> None:
    rig = Rig()
    with rig.current():
        for member in members():
            with pytest.raises(ValueError, match="No valid attention backend found"):
                chosen(member, dtype=torch.float64)


def test_other_layers_and_other_names_are_vllms() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    rig = Rig()
    with rig.current():
        dense = chosen(None, use_sparse=False)
        assert [chosen(member, use_sparse=False) for member in members()] == [dense] * len(members())
        assert chosen(AttentionBackendEnum.FLASHMLA_SPARSE).startswith("vllm.")


def test_switched_off_ours_is_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPLUGIN_DISABLE", "1")
    rig = Rig()
    with rig.current():
        stock = chosen(None)
        assert [chosen(member) for member in members()] == [stock] * len(members())
        assert stock.startswith("vllm.")


def test_shorter_rows_are_refused_where_lengths_are_planned_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms.cuda import CudaPlatform

    from kvplugin.vllm.gpu.backends import HOST_PLANNED

    monkeypatch.setattr(CudaPlatform, "get_attn_backend_cls", classmethod(lambda cls, *args: HOST_PLANNED))
    rig = Rig({"mode": "topology_only", "sink_tokens": 4, "local_tokens": 12, "fill": "none"})
    with rig.current(), pytest.raises(ConfigError, match="plans the tokens of each row on the host"):
        chosen(members()[0])
    rig = Rig()
    with rig.current():
        assert chosen(members()[0]).startswith("kvplugin.")


def backend_paths() -> list[tuple[str, str]]:
    from kvplugin.vllm.gpu.backends import BACKENDS

    return list(BACKENDS.items())


def has_fa4() -> bool:
    from vllm.v1.attention.backends.mla import flashattn_mla_sparse

    return hasattr(flashattn_mla_sparse, "FlashAttnMLASparseFA4Backend")


@pytest.mark.parametrize(("stock", "ours"), backend_paths(), ids=lambda path: path.rpartition(".")[2])
def test_backend_class(stock: str, ours: str) -> None:
    """Ours keeps vLLM's name, which vLLM compares, and everything but the implementation and the builder."""
    if "FA4" in stock and not has_fa4():
        pytest.skip("FlashAttention 4 has sparse MLA from vLLM 0.33 on")
    module, _, name = stock.rpartition(".")
    theirs = getattr(import_module(module), name)
    module, _, name = ours.rpartition(".")
    backend = getattr(import_module(module), name)
    assert issubclass(backend, theirs)
    assert backend.get_name() == theirs.get_name()
    for part in ("get_impl_cls", "get_builder_cls"):
        own, stocks = getattr(backend, part)(), getattr(theirs, part)()
        assert own.__module__.startswith("kvplugin."), f"{part}: {own}"
        assert issubclass(own, stocks), f"{part}: {own} is no {stocks}"
    overridden = {name for name in vars(backend) if not name.startswith("__")}
    assert overridden == {"get_impl_cls", "get_builder_cls"} | (overridden & {"_abc_impl"})


def outcome(**options: Any) -> Any:
    rig = Rig(**options)
    assert rig.hook is None
    return rig.engine.state._outcome


def test_reasons_for_staying_inactive(monkeypatch: pytest.MonkeyPatch) -> None:
    assert outcome(policy=None) == InactiveReason.NOT_CONFIGURED
    assert outcome(policy={"mode": "disabled"}) == InactiveReason.POLICY_DISABLED
    assert outcome(context=Ranks(2, 0), cache_dtype="fp8_ds_mla") == InactiveReason.NO_SCORES


def test_host_backed_caches_are_an_obstacle() -> None:
    rig = Rig()
    rig.config.attention_config.hisparse_config = SimpleNamespace()
    assert rig.engine.obstacle() == InactiveReason.HISPARSE


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ({"model_type": "deepseek_v4", "index_topk": 512}, InactiveReason.PRIVATE_INDEXER),
        ({"model_type": "glm5next", "index_topk": 512}, InactiveReason.PRIVATE_INDEXER),
        ({"model_type": "deepseek_v3"}, InactiveReason.NO_SPARSE_ATTENTION),
    ],
    ids=lambda value: value.get("model_type") if isinstance(value, dict) else "",
)
def test_models_with_indexers_of_their_own(
    text: dict[str, Any], reason: InactiveReason, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are served as without the plugin, and it says why."""
    from kvplugin.vllm import startup
    from kvplugin.vllm.gpu.step import ATTRIBUTE
    from kvplugin.vllm.gpu.wrap_indexer_metadata import STATE

    told: list[InactiveReason] = []
    monkeypatch.setattr(startup, "report_active", told.append)
    rig = Rig()
    rig.config.model_config.hf_text_config = SimpleNamespace(**text)
    rig.config.attention_config.backend = members()[0]
    assert not startup.wants_sparse_mla(rig.config)
    startup.report_unused(rig.config)
    assert told == [reason]
    with rig.current():
        metadata = rig.indexer_builder.build(0, Batch((Request(1, 300),)).common())
    assert getattr(rig.indexer_builder, STATE, None) is None
    assert not hasattr(metadata, ATTRIBUTE)


def test_the_self_test_notices_a_wrap_that_is_not_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers import sparse_attn_indexer

    from kvplugin.vllm.gpu import wrap_decode_topk

    monkeypatch.setattr(sparse_attn_indexer, "get_indexer_topk", wrap_decode_topk.original)
    assert outcome(policy=POLICY) == InactiveReason.SELF_TEST_FAILED


def test_the_engine_is_prepared_by_the_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    """Configuration is checked where vLLM settles its own, and the plugin's worker is put in place."""
    from vllm.platforms import current_platform
    from vllm.platforms.cuda import CudaPlatform

    monkeypatch.setattr(CudaPlatform, "check_and_update_config", classmethod(lambda cls, vllm_config: None))
    for member in members():
        rig = Rig()
        rig.config.attention_config.backend = member
        current_platform.check_and_update_config(rig.config)
        assert rig.config.parallel_config.worker_cls == "kvplugin.vllm.gpu.worker.KvpluginGpuWorker"
