"""The demo against a stand-in for vLLM: every figure, every verdict, and no process left."""

from __future__ import annotations

import functools
import json

import pytest
from rich.console import Console
from stand_in import StandIn
from stand_in_server import EVICTED, INJECTED, KEPT, ROWS_PER_REQUEST, SINK_HITS, SINKS, TOKENS_PER_ANSWER, Behaviour
from typer.testing import CliRunner, Result

from integration.demo import __main__ as command_line
from integration.demo import metrics_view
from integration.demo.client import send_all
from integration.demo.metrics_view import read_counts
from integration.demo.prompts import TEXT_LENGTHS, Endpoint, demo_requests
from integration.demo.run import DemoOptions
from integration.demo.scrape import MetricsError, parse
from integration.recipes import cpu_environment
from integration.server import Server
from integration.tiny_dsa.tokenizer import build_tokenizer

REQUESTS = len(TEXT_LENGTHS)
BEYOND_BUDGET = sum(length > 64 for length in TEXT_LENGTHS)
PHASES = 2


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in's counters never lag."""
    monkeypatch.setattr(metrics_view, "_SETTLED_S", 0.2)
    monkeypatch.setattr(metrics_view, "_ACTIVE_WITHIN_S", 0.2)
    monkeypatch.setattr(metrics_view, "_POLL_S", 0.05)


def run_command(stand_in: StandIn, behaviour: Behaviour, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Result:
    """``python -m integration.demo`` with the stand-in for vLLM, and no real model."""
    options = functools.partial(DemoOptions, command=stand_in.command(behaviour))
    monkeypatch.setattr(command_line, "DemoOptions", options)
    monkeypatch.setattr(command_line, "require_vllm", lambda: None)
    monkeypatch.setattr(command_line, "tiny_model", lambda kind: stand_in.directory / kind)
    monkeypatch.setattr(command_line, "Console", functools.partial(Console, width=120))
    return CliRunner().invoke(command_line.app, list(arguments))


def test_json_report(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run_command(stand_in, Behaviour.SERVES, monkeypatch, "--json")
    assert result.exit_code == 0, result.output
    assert stand_in.left_behind() == []
    report = json.loads(result.stdout)
    assert list(report["modes"]) == ["topology_sparse_merge", "observe"]
    for counts in report["modes"].values():
        seconds, rate = counts.pop("seconds"), counts.pop("tokens_per_second")
        assert rate == pytest.approx(REQUESTS * TOKENS_PER_ANSWER / seconds, rel=0.05)
        assert counts == {
            "requests": REQUESTS,
            "sent": REQUESTS,
            "prompt_tokens": REQUESTS * 100,
            "generated_tokens": REQUESTS * TOKENS_PER_ANSWER,
            "rows_seen": REQUESTS * PHASES * ROWS_PER_REQUEST,
            "rows_rewritten": REQUESTS * PHASES * (ROWS_PER_REQUEST - 1),
            "learned_kept": REQUESTS * PHASES * KEPT,
            "learned_evicted": REQUESTS * PHASES * EVICTED,
            "structural_injected": REQUESTS * PHASES * INJECTED,
            "sink_hits": REQUESTS * PHASES * SINK_HITS,
            "sinks_possible": REQUESTS * PHASES * SINKS,
            "sink_hit_rate": SINK_HITS / SINKS,
        }
    assert (report["texts_that_differ"], report["texts_that_vary"]) == (BEYOND_BUDGET, 0)
    assert report["versions"] == {"kvplugin": "1.2.3", "vllm": "0.32.0"}
    assert report["problems"] == []


def test_table(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run_command(stand_in, Behaviour.SERVES, monkeypatch, "--keep-logs", str(stand_in.directory / "logs"))
    assert result.exit_code == 0, result.output
    rows = {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in table_rows(result.stdout)}
    kept = f"{REQUESTS * PHASES * KEPT:,}"
    assert rows["learned kept"] == [kept, kept]
    assert rows["pre-merge sink hit rate"] == ["75.0%", "75.0%"]
    assert rows["requests whose text differs"] == [f"{BEYOND_BUDGET} of {REQUESTS}", "-"]
    assert "starting" not in result.stdout, "progress belongs to stderr"
    assert "topology_sparse_merge" in result.stderr
    logs = {path.name for path in (stand_in.directory / "logs").iterdir()}
    assert logs == {"topology_sparse_merge.log", "observe.log"}


@pytest.mark.parametrize(
    ("behaviour", "complaint"),
    [
        (Behaviour.DIES, "demo failed: the server ended with exit code 1\nfirst error: kvplugin.errors.ConfigError"),
        (Behaviour.DIES_ON_REQUEST, "demo failed: the server ended with exit code 7"),
        (Behaviour.INACTIVE, "demo failed: the policy is inactive: self_test_failed; run 'kvplugin doctor'"),
        (Behaviour.WITHOUT_PLUGIN, "demo failed: /metrics has no kvplugin_active: the server runs without kvplugin"),
        (Behaviour.REWRITES_NOTHING, "problem: topology_sparse_merge: the policy rewrote no row"),
        (Behaviour.REFUSES, 'problem: observe: request 11: HTTP 400: {"error": "refused"}'),
    ],
)
def test_failures_are_told_and_leave_nothing(
    behaviour: Behaviour, complaint: str, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run_command(stand_in, behaviour, monkeypatch)
    assert result.exit_code == 1
    assert complaint in result.stderr
    assert stand_in.left_behind() == []


def test_ctrl_c_exits_with_130_and_leaves_nothing(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(url: str, requests: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("integration.demo.run.send_all", interrupted)
    result = run_command(stand_in, Behaviour.SERVES, monkeypatch)
    assert (result.exit_code, result.stdout) == (130, "")
    assert stand_in.left_behind() == []


def test_refuses_a_log_directory_that_is_a_file(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    path = stand_in.directory / "file"
    path.touch()
    result = run_command(stand_in, Behaviour.SERVES, monkeypatch, "--keep-logs", str(path))
    assert result.exit_code == 2
    assert "--keep-logs" in result.stderr


def test_requests_are_the_same_in_every_run_and_span_the_lengths() -> None:
    requests = demo_requests()
    assert requests == demo_requests()
    assert len(requests) >= 8
    assert {request.endpoint for request in requests} == set(Endpoint)
    tokens = [len(build_tokenizer().encode(request.text).ids) for request in requests]
    assert tokens == list(TEXT_LENGTHS)
    assert (min(tokens), max(tokens) + 18) == (20, 1498)


def test_counts_are_summed_over_phases_engines_and_reasons() -> None:
    text = "\n".join(
        [
            'vllm:request_success_total{engine="0",finished_reason="stop"} 2',
            'vllm:request_success_total{engine="1",finished_reason="length"} 3',
            "vllm:prompt_tokens_total 7",
            "vllm:generation_tokens_total 8",
            'kvplugin_policy_rows_total{arm="default",phase="prefill",outcome="seen"} 10',
            'kvplugin_policy_rows_total{arm="default",phase="decode",outcome="seen"} 20',
            'kvplugin_policy_rows_total{arm="default",phase="decode",outcome="rewritten"} 4',
            *(
                f'kvplugin_policy_tokens_total{{phase="decode",kind="{kind}"}} {value}'
                for value, kind in enumerate(("kept", "evicted", "injected", "sink_hit", "sink_possible"))
            ),
            "",
        ]
    )
    counts = read_counts(parse(text))
    assert (counts.requests, counts.rows_seen, counts.rows_rewritten) == (5, 30, 4)
    assert (counts.learned_kept, counts.learned_evicted, counts.structural_injected) == (0, 1, 2)
    assert counts.sink_hit_rate == 3 / 4


def test_a_missing_series_is_named() -> None:
    with pytest.raises(MetricsError, match=r'no kvplugin_policy_rows_total\{outcome="seen"\}'):
        parse("").total("kvplugin_policy_rows_total", outcome="seen")


def test_no_sinks_have_no_hit_rate() -> None:
    nothing = metrics_view.PolicyCounts(*([0] * 10))
    assert nothing.sink_hit_rate is None


@pytest.mark.parametrize(
    ("base", "expected"),
    [({}, "localhost,127.0.0.1"), ({"no_proxy": "intra.example"}, "intra.example,localhost,127.0.0.1")],
)
def test_the_server_is_reached_past_any_proxy(base: dict[str, str], expected: str) -> None:
    environment = cpu_environment(base)
    assert environment["no_proxy"] == environment["NO_PROXY"] == expected


def test_answers_follow_their_endpoint(stand_in: StandIn) -> None:
    """Completions and chats come back in the order of the requests."""
    requests = demo_requests()
    with Server(stand_in.options(Behaviour.SERVES)) as server:
        batch = send_all(server.url, requests)
    assert [answer.text for answer in batch.answers] == [
        f"{'none' if len(request.text) > 64 else ''} {request.text[:8]}" for request in requests
    ]


def table_rows(output: str) -> list[list[str]]:
    return [line.strip("│┃ ").replace("┃", "│").split("│") for line in output.splitlines() if "│" in line]
