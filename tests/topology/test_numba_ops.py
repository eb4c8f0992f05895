"""What is special to the compiled form: scratch memory, threads, row order, long rows, a cache it may not write."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import kvplugin
from kvplugin.config import PolicyConfig
from kvplugin.topology import apply_topology_policy
from kvplugin.topology.numba_workspace import workspace

POLICY = PolicyConfig(mode="topology_sparse_merge", local_tokens=8)


def batch(rows: int, width: int, length: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Top-k buffer, row lengths and scores of random rows."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(rows, length, generator=generator)
    topk = scores.topk(width).indices.int()
    return topk, torch.full((rows,), length), scores


def sets(topk: Tensor) -> list[set[int]]:
    return [set(row) - {-1} for row in topk.tolist()]


def test_repeated_calls_use_the_same_scratch() -> None:
    topk, lengths, scores = batch(16, 64, 500)

    def addresses() -> list[int]:
        lanes = workspace().lanes(1, 64, 0, np.dtype(np.int32))
        return [array.ctypes.data for array in lanes[0]]

    apply_topology_policy(topk.clone(), lengths, config=POLICY, scores=scores)
    first = addresses()
    for rows in (16, 3, 1):
        apply_topology_policy(topk[:rows].clone(), lengths[:rows], config=POLICY, scores=scores[:rows])
    assert addresses() == first


def test_a_row_of_two_billion_tokens_needs_no_memory_to_match() -> None:
    """Bypassed for want of scores with `lowest_score`; the other rules go through with it."""
    length = 2**31 - 1
    topk = torch.arange(length - 4096, length, 2)[:2048].int().unsqueeze(0)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    counters = apply_topology_policy(
        topk, torch.tensor([length]), config=POLICY.model_copy(update={"eviction": "oldest"})
    )
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
    assert sets(topk)[0] >= {0, 1, 2, 3, length - 1, length - 2}
    assert len(sets(topk)[0]) == 2048
    assert int(counters.sum()) > 0
    assert grown < 256 << 10, f"{grown} KiB more than before"


def test_a_row_does_not_depend_on_the_others() -> None:
    topk, lengths, scores = batch(65, 64, 700)
    alone = topk.clone()
    apply_topology_policy(topk, lengths, config=POLICY, scores=scores)
    for row in range(65):
        part = slice(row, row + 1)
        apply_topology_policy(alone[part], lengths[part], config=POLICY, scores=scores[part])
    assert sets(alone) == sets(topk)


def test_threads_share_no_scratch() -> None:
    batches = [batch(40, 128, 900, seed) for seed in range(8)]
    expected = []
    for topk, lengths, scores in batches:
        once = topk.clone()
        apply_topology_policy(once, lengths, config=POLICY, scores=scores)
        expected.append(sets(once))

    def work(index: int) -> list[set[int]]:
        topk, lengths, scores = batches[index]
        for _ in range(20):
            again = topk.clone()
            apply_topology_policy(again, lengths, config=POLICY, scores=scores)
        return sets(again)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(8))) == expected


def test_works_where_nothing_can_be_cached(tmp_path: Path) -> None:
    package = tmp_path / "kvplugin"
    shutil.copytree(Path(kvplugin.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "topology" / "__pycache__").touch()  # a file where numba would make its folder
    code = (
        "import torch; from kvplugin.config import PolicyConfig; from kvplugin.topology import apply_topology_policy\n"
        "t = torch.arange(8).int().unsqueeze(0)\n"
        "p = PolicyConfig(mode='topology_sparse_merge', sink_tokens=1, local_tokens=1)\n"
        "apply_topology_policy(t, torch.tensor([20]), config=p, scores=torch.rand(1, 20)); print(sorted(t[0].tolist()))"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "HOME": "/proc/none", "XDG_CACHE_HOME": "/proc/none"}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.strip().endswith("19]"), found.stderr
