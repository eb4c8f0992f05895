from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

import pytest
import torch
from prometheus_client import CollectorRegistry
from scrapes import run_python, scrape, value
from torch import Tensor

from kvplugin.errors import ArgumentError
from kvplugin.metrics import export
from kvplugin.metrics.collector import register_collector
from kvplugin.metrics.definitions import DEFAULT_ARM, EXACT, REMAP_INVALID, REMAP_PATHS, SAMPLED
from kvplugin.metrics.directory import DIRECTORY_VARIABLE
from kvplugin.metrics.export import CounterExporter
from kvplugin.metrics.files import MetricFile
from kvplugin.metrics.metric import Buffer
from kvplugin.metrics.series import counter_series
from kvplugin.remap import RemapCounter, new_remap_counters
from kvplugin.remap.paths import RemapPath, new_path_counters
from kvplugin.topology.counters import BYPASS_REASONS, Counter, new_counters

ROWS, TOKENS = "kvplugin_policy_rows_total", "kvplugin_policy_tokens_total"
SAMPLED_ROWS, BYPASS = "kvplugin_policy_sampled_rows_total", "kvplugin_policy_bypass_total"
DECODE_SEEN = {"arm": "default", "phase": "decode", "outcome": "seen"}


def numbered() -> Tensor:
    """A buffer whose cells all differ."""
    counters = new_counters()
    counters += torch.arange(1, counters.numel() + 1).reshape(counters.shape)
    return counters


ALL = {EXACT: new_counters, SAMPLED: new_counters, REMAP_PATHS: lambda: new_path_counters()[None]}
ALL |= {REMAP_INVALID: lambda: new_remap_counters()[None]}


@pytest.mark.parametrize("kinds", [[EXACT], [REMAP_PATHS, REMAP_INVALID], list(ALL)], ids=["policy", "remap", "all"])
def test_every_series_exists_at_zero_from_the_start(registry: CollectorRegistry, kinds: list[Buffer]) -> None:
    exporter = CounterExporter({kind: ALL[kind]() for kind in kinds})
    found = {series: value for series, value in scrape(registry).items() if series[0] != "kvplugin_active"}
    exporter.close()
    assert len(found) == len(counter_series(kinds, DEFAULT_ARM))
    assert set(found.values()) == {0.0}


def test_scrape_is_exact(registry: CollectorRegistry) -> None:
    counters, sampled = numbered(), numbered() * 1000
    exporter = CounterExporter({EXACT: counters, SAMPLED: sampled})
    counters[1, Counter.SEEN] += 2**52
    exporter.publish()
    found = scrape(registry)
    exporter.close()
    prefill, decode = counters.tolist()
    labels = {"arm": "default", "phase": "prefill"}
    assert value(found, ROWS, **DECODE_SEEN) == decode[Counter.SEEN]
    assert value(found, TOKENS, kind="segments_empty_after", **labels) == prefill[Counter.SEGMENTS_EMPTY_AFTER]
    assert value(found, SAMPLED_ROWS, outcome="seen", **labels) == 1000 * prefill[Counter.SEEN]
    assert value(found, ROWS, outcome="bypassed", **labels) == sum(prefill[c] for c in BYPASS_REASONS.values())
    for reason, column in BYPASS_REASONS.items():
        assert value(found, BYPASS, reason=reason) == prefill[column] + decode[column]


def test_remap_counters_are_exact(registry: CollectorRegistry) -> None:
    paths, invalid = new_path_counters(), new_remap_counters()
    exporter = CounterExporter({REMAP_PATHS: paths[None], REMAP_INVALID: invalid[None]})
    for column in RemapPath:
        paths[column] += 2**40 + column
    invalid += torch.arange(len(RemapCounter))
    exporter.close()
    found = scrape(registry)
    for path in RemapPath:
        assert value(found, "kvplugin_remap_conversions_total", path=path.name.lower()) == 2**40 + path
    for reason in RemapCounter:
        assert value(found, "kvplugin_remap_invalid_total", reason=reason.name.lower()) == reason
    assert value(found, ROWS, **DECODE_SEEN) is None, "a series of a buffer that was not given"


@pytest.mark.parametrize("leading", [(), (1,), (3,), (4, 3)])
def test_leading_dimensions_are_added_up(registry: CollectorRegistry, leading: tuple[int, ...]) -> None:
    """Of arms, or of stripes and arms, which a GPU's atomic additions are spread over."""
    counters = new_counters().expand(*leading, -1, -1).clone()
    exporter = CounterExporter({EXACT: counters})
    counters += torch.arange(1, counters.numel() + 1).reshape(counters.shape)
    exporter.close()
    expected = counters[..., 1, Counter.SEEN].sum().item()
    assert value(scrape(registry), ROWS, **DECODE_SEEN) == expected


def test_arms_have_series_of_their_own_from_the_start(registry: CollectorRegistry) -> None:
    counters = new_counters("cpu", 3)
    exporter = CounterExporter({EXACT: counters, REMAP_PATHS: new_path_counters()[None]}, arms=["a", None, "b"])
    assert arms_seen(registry) == {"a": 0, "b": 0}
    counters[0, 1, Counter.SEEN], counters[2, 1, Counter.SEEN] = 3, 4
    counters[0, 0, Counter.BYPASS_PHASE], counters[2, 0, Counter.BYPASS_PHASE] = 10, 20
    exporter.close()
    assert arms_seen(registry) == {"a": 3, "b": 4}
    assert value(scrape(registry), BYPASS, reason="phase") == 30, "a series without the label is of all arms"


def test_what_is_counted_stays_with_the_arm_that_held_the_row_then(registry: CollectorRegistry) -> None:
    counters = new_counters("cpu", 2)
    exporter = CounterExporter({EXACT: counters}, arms=["a", "b"])
    counters[0, 1, Counter.SEEN] += 5
    exporter.rename_arms(["c", "b"])
    counters[:, 1, Counter.SEEN] += 7
    exporter.rename_arms(["c", "a"])
    counters[1, 1, Counter.SEEN] += 100
    exporter.rename_arms([None, "a"])
    counters[0, 1, Counter.SEEN] += 1000  # of nobody
    exporter.close()
    assert arms_seen(registry) == {"a": 105, "b": 7, "c": 7}


def arms_seen(registry: CollectorRegistry) -> dict[str, float]:
    found = scrape(registry)
    wanted = {"phase": "decode", "outcome": "seen"}
    return {
        dict(labels)["arm"]: number
        for (name, labels), number in found.items()
        if name == ROWS and wanted.items() <= dict(labels).items()
    }


def test_changes_are_told_with_their_buffer(registry: CollectorRegistry) -> None:
    paths, told = new_path_counters(), []
    exporter = CounterExporter(
        {EXACT: new_counters(), REMAP_PATHS: paths[None]}, on_change=lambda *change: told.append(change)
    )
    exporter.publish()
    assert told == []
    paths[RemapPath.MEMO] += 3
    exporter.close()
    assert told == [(REMAP_PATHS, [[[0, 3, 0, 0]]])]


def test_exporters_add_up_and_keep_their_values_after_the_end(registry: CollectorRegistry) -> None:
    first = CounterExporter({EXACT: numbered()})
    expected = 2 * numbered()[1, Counter.SEEN].item()
    first.close()
    second = CounterExporter({EXACT: numbered()})
    assert value(scrape(registry), ROWS, **DECODE_SEEN) == expected
    second.close()
    assert value(scrape(registry), ROWS, **DECODE_SEEN) == expected


WORKER = """
import multiprocessing
from kvplugin.metrics.definitions import EXACT
from kvplugin.metrics.export import CounterExporter
from kvplugin.topology.counters import Counter, new_counters

def work(tokens):
    counters = new_counters()
    exporter = CounterExporter({EXACT: counters}, interval_s=0.01)
    exporter.start()
    for _ in range(1000):
        counters[1, Counter.SEEN] += 1
        counters[0, Counter.KEPT] += tokens
    # No close(): the exit hook publishes what the last interval has not.

if __name__ == "__main__":
    workers = [multiprocessing.get_context(method).Process(target=work, args=(3,)) for method in ("spawn", "fork")]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
"""


def test_dead_workers_values_stay_exact(layout: dict[str, str], registry: CollectorRegistry, tmp_path: Path) -> None:
    script = tmp_path / "workers.py"
    script.write_text(WORKER)
    run_python(str(script), environment=layout)
    found = scrape(registry)
    assert value(found, ROWS, **DECODE_SEEN) == 2 * 1000
    assert value(found, TOKENS, arm="default", phase="prefill", kind="kept") == 2 * 1000 * 3


FORKED = """
import multiprocessing
from kvplugin.metrics.definitions import EXACT
from kvplugin.metrics.export import CounterExporter
from kvplugin.topology.counters import Counter, new_counters

counters = new_counters()
exporter = CounterExporter({EXACT: counters})

def meddle():
    counters[1, Counter.SEEN] += 100
    exporter.publish()
    exporter.close()

counters[1, Counter.SEEN] += 5
exporter.publish()
child = multiprocessing.get_context("fork").Process(target=meddle)
child.start()
child.join()
"""


def test_a_forked_child_publishes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    registry = CollectorRegistry()
    register_collector(registry)
    run_python("-c", FORKED, environment={DIRECTORY_VARIABLE: str(tmp_path)})
    assert value(scrape(registry), ROWS, **DECODE_SEEN) == 5


def test_drain_follows_a_busy_writer(registry: CollectorRegistry) -> None:
    counters = new_counters()
    exporter = CounterExporter({EXACT: counters}, interval_s=0.001)
    exporter.start()
    enough = threading.Event()
    written = 0

    def write() -> None:
        nonlocal written
        while not enough.is_set():
            counters[1, Counter.SEEN] += 1
            written += 1

    writer = threading.Thread(target=write)
    writer.start()
    seen = [0.0]
    deadline = time.monotonic() + 60
    while len(set(seen)) < 5 and time.monotonic() < deadline:
        seen.append(scrape(registry)[ROWS, frozenset(DECODE_SEEN.items())])
    enough.set()
    writer.join()
    exporter.close()
    assert len(set(seen)) == 5
    assert seen == sorted(seen)
    assert value(scrape(registry), ROWS, **DECODE_SEEN) == written


class ScriptedReader:
    """Gives the answers of a device buffer: nothing yet, a value, and an older one than that."""

    def __init__(self, counters: Tensor, arms: int) -> None:
        self.answers: list[int | None] = [None, 7, 5]

    def read(self, *, wait: bool = False) -> list[list[list[int]]] | None:
        answer = self.answers.pop(0)
        return None if answer is None else [torch.full_like(new_counters(), answer).tolist()]


def test_values_never_go_back(monkeypatch: pytest.MonkeyPatch, registry: CollectorRegistry) -> None:
    monkeypatch.setattr(export, "reader_for", ScriptedReader)
    exporter = CounterExporter({EXACT: new_counters()})  # reads once
    assert value(scrape(registry), ROWS, **DECODE_SEEN) == 0
    exporter.publish()
    assert value(scrape(registry), ROWS, **DECODE_SEEN) == 7
    exporter.close()
    assert value(scrape(registry), ROWS, **DECODE_SEEN) == 7


def test_a_failing_read_ends_the_drain_and_says_so(
    monkeypatch: pytest.MonkeyPatch, layout: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    exporter = CounterExporter({EXACT: new_counters()}, interval_s=0.001)

    def fail(*, wait: bool = False) -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr(exporter._readers[EXACT], "read", fail)
    exporter.start()
    assert exporter._thread is not None
    exporter._thread.join(timeout=10)
    assert not exporter._thread.is_alive()
    assert "reading the counters failed" in caplog.text
    assert "device lost" in caplog.text


@pytest.mark.usefixtures("layout")
def test_close_twice_and_publish_after() -> None:
    counters = new_counters()
    exporter = CounterExporter({EXACT: counters})
    exporter.start()
    exporter.close()
    exporter.close()
    exporter.publish()
    assert not exporter.exports


def test_unwritable_directory_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path / "file" / "metrics"))
    registry = CollectorRegistry()
    register_collector(registry)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            exporter = CounterExporter({EXACT: new_counters()})
            exporter.start()
            exporter.publish()
            exporter.close()
    assert [record.message.partition(" (")[0] for record in caplog.records] == [
        f"kvplugin metrics: {tmp_path}/file/metrics cannot be written"
    ]
    assert not exporter.exports
    assert [name for name, _ in scrape(registry)] == ["kvplugin_active"]


def test_full_disk_is_an_error_not_a_crash(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def full(path: Path, data: bytes) -> int:
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    monkeypatch.setattr(Path, "write_bytes", full)
    assert not CounterExporter({EXACT: new_counters()}).exports
    assert "No space left on device" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_a_scrape_never_meets_half_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    visible: list[Path] = []
    monkeypatch.setattr(MetricFile, "set", lambda file, key, value, time=0.0: visible.extend(tmp_path.glob("*.db")))
    CounterExporter({EXACT: new_counters()}).close()
    assert visible == []
    assert len(list(tmp_path.glob("*.db"))) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"counters": {EXACT: torch.zeros(2, 3)}},
            f"CounterExporter.counters[exact]: got float32 [2, 3]; must be int64 [..., 2, {len(Counter)}]",
        ),
        (
            {"counters": {EXACT: new_counters(), SAMPLED: new_counters()[:1]}},
            f"CounterExporter.counters[sampled]: got int64 [1, {len(Counter)}]; must be int64 [..., 2, {len(Counter)}]",
        ),
        (
            {"counters": {REMAP_PATHS: new_path_counters()}},
            "CounterExporter.counters[remap_paths]: got int64 [4]; must be int64 [..., 1, 4]",
        ),
        (
            {"arms": ["a", None, "b"]},
            f"CounterExporter.counters[exact]: got int64 [2, {len(Counter)}]; "
            f"must be int64 [..., 3, 2, {len(Counter)}]",
        ),
        ({"interval_s": 0.0}, "CounterExporter.interval_s: 0.0 is not positive; give seconds"),
        ({"interval_s": float("nan")}, "CounterExporter.interval_s: nan is not positive; give seconds"),
    ],
)
def test_refuses(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError) as refusal:
        CounterExporter(**({"counters": {EXACT: new_counters()}} | arguments))  # type: ignore[arg-type]
    assert str(refusal.value) == message
