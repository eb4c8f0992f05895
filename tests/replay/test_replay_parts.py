"""The parts that a replay is made of: slots, windows, merge, rotation, page decoding, log-probabilities."""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from kvplugin.replay import (
    KVPool,
    LogProbHead,
    RopeLayout,
    RopeRecord,
    compare,
    decode_fp8_ds_mla,
    decode_replay,
    full_prefill,
    logical_slots,
    merge_groups,
    merge_states,
    reconstruct,
    rotate,
)
from kvplugin.replay.log_probs import selected_log_probs
from kvplugin.replay.merge import rank_groups, split_groups
from kvplugin.replay.reconstruct import CHUNK_TOKENS, WINDOW_TOKENS, requests, windows
from kvplugin.replay.selftest.synthetic import Shape, make_inputs


class HostReads(TorchDispatchMode):
    """Counts values that come to the host one by one."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "_local_scalar_dense" in str(function)
        return function(*args, **(kwargs or {}))


@given(st.integers(1, 80), st.sampled_from([1, 3, 16]))
def test_slots(length: int, page: int) -> None:
    table = torch.randperm(-(-length // page) + 2)
    expected = [int(table[token // page]) * page + token % page for token in range(length)]
    assert logical_slots(table, length, page).tolist() == expected


@pytest.mark.parametrize("page", [1, 3, 16, 24, 64, 2048])
def test_windows_are_the_tokens_in_order(page: int) -> None:
    inputs = make_inputs(Shape(length=WINDOW_TOKENS + 333, page=page, heads=1, kv_heads=1, dim=2))
    request = next(requests(inputs))
    parts = list(windows(inputs.pool.keys, request))
    keys, _ = reconstruct(inputs, 0)
    assert torch.equal(torch.cat([part.raw for part in parts]), keys)
    assert [part.start for part in parts[1:]] == [part.stop for part in parts[:-1]]
    assert all(part.start % CHUNK_TOKENS == part.start % page == 0 for part in parts)


def test_reading_is_not_token_by_token() -> None:
    """Host reads do not grow with the context."""
    counts = []
    for length in (64, 320):
        inputs = make_inputs(Shape(length=length, page=8, heads=1, kv_heads=1, dim=2))
        with HostReads() as reads:
            decode_replay(inputs)
        counts.append(reads.count)
    assert counts[0] == counts[1]


def test_a_pool_of_any_strides() -> None:
    inputs = make_inputs(Shape(world=2))
    pool = inputs.pool
    assert pool.values is not None
    packed = torch.stack([pool.keys, pool.values], dim=1)
    strided = replace(inputs, pool=KVPool.gqa(packed[:, 0], packed[:, 1]))
    assert not strided.pool.keys.is_contiguous()
    assert torch.equal(decode_replay(strided).out, decode_replay(inputs).out)
    assert torch.equal(reconstruct(strided, 0)[0], reconstruct(inputs, 0)[0])
    assert compare(strided).report.fingerprints == compare(inputs).report.fingerprints


@given(st.integers(1, 40), st.integers(0, 2**16))
def test_merge_is_the_sum_over_all_states(count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    out = torch.randn(count, 3, 5, generator=generator)
    lse = torch.randn(count, 3, generator=generator) * 20
    lse[torch.rand(count, 3, generator=generator) < 0.2] = -torch.inf
    found = merge_states(out, lse)
    total = lse.double().logsumexp(0)
    weights = (lse.double() - total.nan_to_num(neginf=0.0)).exp().unsqueeze(-1)
    torch.testing.assert_close(found.lse.double(), total, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.out.double(), (weights * out.double()).sum(0), rtol=1e-5, atol=1e-5)


def test_merge_follows_the_order_given() -> None:
    """Sums in another order round otherwise, so the order can be told from the bits."""
    generator = torch.Generator().manual_seed(0)
    out, lse = torch.randn(50, 64, 8, generator=generator), torch.randn(50, 64, generator=generator)
    forward = merge_states(out, lse)
    assert torch.equal(merge_groups(out, lse, [range(50)]).out, forward.out)
    assert not torch.equal(merge_groups(out, lse, [range(49, -1, -1)]).out, forward.out)


def test_states_that_saw_nothing_change_no_bit() -> None:
    out, lse = torch.randn(3, 4, 8), torch.randn(3, 4)
    padded_out = torch.cat([out[:1], torch.zeros(1, 4, 8), out[1:]])
    padded = torch.cat([lse[:1], torch.full((1, 4), -torch.inf), lse[1:]])
    assert torch.equal(merge_states(padded_out, padded).out, merge_states(out, lse).out)
    empty = merge_states(torch.zeros(2, 4, 8), torch.full((2, 4), -torch.inf))
    assert not empty.out.any()
    assert torch.isneginf(empty.lse).all()


def test_groups() -> None:
    assert [list(group) for group in split_groups(5, 2)] == [[0, 1], [2, 3], [4]]
    assert [list(group) for group in split_groups(5, None)] == [[0, 1, 2, 3, 4]]
    assert rank_groups([1, 0, 1, 3], 4) == [[1], [0, 2], [], [3]]


@pytest.mark.parametrize("layout", list(RopeLayout))
@pytest.mark.parametrize("rotary", [4, 8])
@pytest.mark.parametrize("first", [False, True])
def test_rotation_element_by_element(layout: RopeLayout, rotary: int, first: bool) -> None:
    record = RopeRecord(100.0, layout, rotary, rotary_first=first)
    x, position = torch.randn(8), 13
    found = rotate(x, torch.tensor(position), record)
    expected = x.tolist()
    for pair in range(rotary // 2):
        angle = position * 100.0 ** (-2 * pair / rotary)
        base = 0 if first else 8 - rotary
        a, b = (
            (base + pair, base + pair + rotary // 2)
            if layout is RopeLayout.NEOX
            else (base + 2 * pair, base + 2 * pair + 1)
        )
        expected[a] = float(x[a]) * math.cos(angle) - float(x[b]) * math.sin(angle)
        expected[b] = float(x[b]) * math.cos(angle) + float(x[a]) * math.sin(angle)
    torch.testing.assert_close(found, torch.tensor(expected))


def encoded_token(latent: list[int], scales: list[float], rope: list[float]) -> bytes:
    """One token of vLLM's fp8_ds_mla, byte by byte: fp8 codes, float32 scales, bfloat16 rope elements."""
    bfloat16 = [struct.pack("<f", value)[2:] for value in rope]
    return bytes(latent) + struct.pack("<4f", *scales) + b"".join(bfloat16)


def fp8_value(code: int) -> float:
    """float8_e4m3fn by its definition."""
    sign, exponent, mantissa = -1 if code & 0x80 else 1, code >> 3 & 15, code & 7
    return sign * (mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def fp8_pages(pages: int, page: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random fp8_ds_mla pages, and what they hold."""
    generator = torch.Generator().manual_seed(seed)
    data, meaning = bytearray(), []
    for _ in range(pages * page):
        codes = torch.randint(0, 256, (512,), generator=generator).tolist()
        codes = [code if code & 0x7F != 0x7F else 0 for code in codes]
        scales = [2.0**-9, 2.0**-10, 0.0013427734375, 2.0**-8]
        rope = torch.randn(64, generator=generator).bfloat16().tolist()
        data += encoded_token(codes, scales, rope)
        meaning.append([fp8_value(code) * scales[index // 128] for index, code in enumerate(codes)] + rope)
    raw = torch.frombuffer(data, dtype=torch.uint8).clone().view(pages, page, 656)
    return raw, torch.tensor(meaning).view(pages, page, 576)


def test_fp8_pages_decode_to_what_they_hold() -> None:
    raw, meaning = fp8_pages(2, 4)
    assert torch.equal(decode_fp8_ds_mla(raw), meaning)


def test_fp8_pages_replay_like_their_values() -> None:
    raw, meaning = fp8_pages(5, 8)
    inputs = make_inputs(Shape(length=16, page=8, latent=512, rope=64, kv_heads=1))
    plain = replace(inputs, pool=KVPool.mla(meaning, 512))
    quantised = replace(inputs, pool=KVPool.fp8_ds_mla(raw))
    found, expected = decode_replay(quantised), decode_replay(plain)
    assert torch.equal(found.out, expected.out)
    assert torch.equal(found.lse, expected.lse)
    torch.testing.assert_close(found.out, full_prefill(quantised).out, rtol=1e-4, atol=1e-5)
    assert compare(quantised).report.within


def test_a_nan_code_in_fp8_pages_is_refused() -> None:
    raw, _ = fp8_pages(5, 8)
    inputs = make_inputs(Shape(length=16, page=8, latent=512, rope=64, kv_heads=1))
    raw[int(inputs.block_table[0, 1]), 2, 7] = 0x7F
    with pytest.raises(ValueError, match=r"pool.keys, row 0: token 10, head 0, element 7: nan; must be finite"):
        compare(replace(inputs, pool=KVPool.fp8_ds_mla(raw)))


def test_log_probabilities_of_the_targets() -> None:
    out = torch.randn(2, 3, 2, 4)
    head = LogProbHead(torch.randn(7, 12), torch.tensor([[0, 6], [3, 99]]), torch.tensor([[True, True], [True, False]]))
    found = selected_log_probs(out, head).log_probs
    logits = torch.einsum("bhqd,vhd->bqv", out, head.weight.view(7, 3, 4))
    for row, query, target in ((0, 0, 0), (0, 1, 6), (1, 0, 3)):
        expected = logits[row, query].log_softmax(-1)[target]
        torch.testing.assert_close(found[row, query], expected)
