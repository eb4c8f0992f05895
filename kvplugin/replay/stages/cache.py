"""Identity and cache stages: is the cached content what it was, and what a fresh prefill would have cached?"""

from __future__ import annotations

import torch
from torch import Tensor

from kvplugin.replay.capture.records import FreshCache, Record
from kvplugin.replay.drift import measure
from kvplugin.replay.pages import PageFormat
from kvplugin.replay.reconstruct import CHUNK_TOKENS, Request, logical_slots, requests
from kvplugin.replay.report import Fingerprints, Stage, StageReport, Status
from kvplugin.replay.rope import RopeState, rotate
from kvplugin.replay.tolerance import storage_tolerance


def identity_stage(record: Record, found: Fingerprints) -> StageReport:
    """The digests taken at capture against those of the content as it is now."""
    if record.content is None:
        return StageReport(
            stage=Stage.IDENTITY, status=Status.MATCH, reason="the capture holds no fingerprints; positions agree"
        )
    if record.content == found.content:
        return StageReport(stage=Stage.IDENTITY, status=Status.MATCH)
    findings = [
        f"cached content of tokens {_span(chunk)} is not what was captured{_origin(record.chunks, chunk, digest)}"
        for chunk, digest in enumerate(found.chunks)
        if chunk < len(record.chunks) and digest != record.chunks[chunk]
    ]
    if len(record.chunks) != len(found.chunks) and record.chunks:
        findings.append(f"{len(found.chunks)} chunks of content, {len(record.chunks)} when it was captured")
    if not findings:
        findings.append("positions, dtypes or RoPE state are not what was captured; the cached elements are")
    return StageReport(stage=Stage.IDENTITY, status=Status.DRIFT, findings=findings)


def _span(chunk: int) -> str:
    return f"[{chunk * CHUNK_TOKENS}, {(chunk + 1) * CHUNK_TOKENS})"


def _origin(captured: tuple[str, ...], chunk: int, digest: str) -> str:
    if digest in captured:
        return f": it holds what tokens {_span(captured.index(digest))} held"
    return ""


def cache_stage(record: Record) -> StageReport:
    """Cached elements against those of a fresh prefill, or of the step that cached them, token by token."""
    if record.fresh is None:
        return StageReport(
            stage=Stage.CACHE,
            status=Status.UNAVAILABLE,
            reason="the capture holds no fresh cache elements to compare with",
        )
    request = next(requests(record.inputs))
    first = request.length - len(record.fresh.keys)
    origin = f"the step wrote for tokens from {first} on" if first else "a fresh prefill gives"
    drifts, findings = [], []
    for name, cached, fresh in _pairs(record, request, record.fresh):
        drift = measure(
            f"{name}, cached vs what {origin}",
            cached,
            fresh,
            _tolerance(name, fresh, record),
            ("token", "head", "element"),
        )
        drifts.append(drift)
        if not drift.within:
            findings += _token_findings(name, cached, fresh, record, request)
    status = Status.DRIFT if findings else Status.MATCH
    return StageReport(stage=Stage.CACHE, status=status, drifts=drifts, findings=findings)


def _pairs(record: Record, request: Request, fresh: FreshCache) -> list[tuple[str, Tensor, Tensor]]:
    """(name, cached, fresh), each ``[n, heads, D]`` in float32, of the newest n tokens."""
    pool = record.inputs.pool
    slots = logical_slots(record.inputs.block_table[0], request.length, pool.page_size)[-len(fresh.keys) :]
    keys = pool.decode_keys(pool.keys.flatten(0, 1)[slots]).float()
    fresh_keys = fresh.keys.float().view(keys.shape)
    if pool.values is None or fresh.values is None:
        split = pool.latent_dim
        parts = [
            ("latents", keys[..., :split], fresh_keys[..., :split]),
            ("rope keys", keys[..., split:], fresh_keys[..., split:]),
        ]
        return [part for part in parts if part[1].shape[-1]]
    values = pool.values.flatten(0, 1)[slots].float()
    return [("keys", keys, fresh_keys), ("values", values, fresh.values.float().view(values.shape))]


def _tolerance(name: str, fresh: Tensor, record: Record) -> Tensor:
    dtype = record.inputs.pool.keys.dtype
    if record.inputs.pool.format is PageFormat.FP8_DS_MLA:
        dtype = torch.float8_e4m3fn if name == "latents" else torch.bfloat16
    return storage_tolerance(fresh, dtype)


def _token_findings(name: str, cached: Tensor, fresh: Tensor, record: Record, request: Request) -> list[str]:
    difference = (cached - fresh).abs()
    close = difference.isfinite() & (difference <= _tolerance(name, fresh, record))
    over = ((cached != fresh) & ~close).flatten(1).any(1)
    tokens = over.nonzero().flatten().tolist()
    newest = request.positions[-len(fresh) :]
    positions = [int(newest[token]) for token in tokens]
    many = f" and {len(tokens) - 1} more" if len(tokens) > 1 else ""
    origin = "those of a fresh prefill" if len(fresh) == request.length else "those that the step wrote"
    findings = [f"{name} at position {positions[0]}{many} are not {origin}"]
    if name in ("keys", "rope keys") and record.inputs.rope.k_state is RopeState.POST:
        shown = zip(tokens[:CHUNK_TOKENS], positions, strict=False)
        for token, position in shown:
            other = _other_rotation(cached[token], fresh[token], request.positions - position, record)
            if other is not None:
                findings.append(f"the key at position {position} is rotated for position {position + other}")
    return findings


def _other_rotation(cached: Tensor, fresh: Tensor, offsets: Tensor, record: Record) -> int | None:
    """The offset among ``offsets`` by which rotating the fresh key gives the cached one; ``[heads, D]`` each.

    Rotations add up, so a key that was rotated for another position is the right key, rotated further.
    """
    if cached.shape[-1] != record.inputs.rope.rotary_dim:
        return None
    turned = rotate(fresh.unsqueeze(0), offsets.unsqueeze(1), record.inputs.rope)
    off = (turned - cached).abs().flatten(1).amax(1)
    best = int(off.argmin())
    # Angles of far offsets are float32, so a few more roundings than storage alone.
    allowed = 4 * float(storage_tolerance(fresh, record.inputs.pool.keys.dtype).max()) + 1e-3 * float(fresh.abs().max())
    return int(offsets[best]) if float(off[best]) <= allowed and int(offsets[best]) else None
