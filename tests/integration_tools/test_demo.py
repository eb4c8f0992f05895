"""The demo against a stand-in for vLLM: every figure, every verdict, and no process left."""

from __future__ import annotations

import functools
import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console
from stand_in import StandIn
from stand_in_server import (
    EVICTED,
    FORGETFUL,
    INJECTED,
    KEPT,
    LOCAL_HITS,
    LOCALS,
    ROWS_PER_REQUEST,
    SINK_HITS,
    SINKS,
    Behaviour,
)
from typer.testing import CliRunner, Result

from integration.demo import __main__ as command_line
from integration.demo import metrics_view
from integration.demo.arms import ARMS, write_rollout
from integration.demo.client import Answer, ask_all
from integration.demo.metrics_view import PolicyCounts, read_counts
from integration.demo.questions import COPIED, LENGTHS, TEXTS, Question, demo_questions
from integration.demo.report import ArmRun, DemoReport
from integration.demo.run import DemoOptions
from integration.demo.scrape import MetricsError, parse
from integration.recipes import cpu_environment
from integration.server import Server
from integration.tiny_dsa.training.evaluation import questions
from integration.tiny_dsa.training.word_tokenizer import build_word_tokenizer
from kvplugin.requests.rollout import read_rollout

PHASES = 2
ASKED = (
    *(Question("recall", f"recall text {word}", (word,)) for word in ("one", "two", "three")),
    Question("copy", "copy a b c", ("b", "c")),
    Question("header", "header text one", ("one",)),
)
"""The stand-in answers with the last words of the prompt."""


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
    monkeypatch.setattr(command_line, "trained_model", lambda: stand_in.directory / "model")
    monkeypatch.setattr(command_line, "Console", functools.partial(Console, width=80))
    monkeypatch.setattr("integration.demo.run.demo_questions", lambda: ASKED)
    return CliRunner().invoke(command_line.app, list(arguments))


def test_json_report(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run_command(stand_in, Behaviour.SERVES, monkeypatch, "--json")
    assert result.exit_code == 0, result.output
    assert stand_in.left_behind() == []
    report = json.loads(result.stdout)
    assert list(report["arms"]) == ["observe", "merge", "merge_input_order", "merge_oldest", "topology_only"]
    rows = len(ASKED) * PHASES
    for arm, facts in report["arms"].items():
        right = {"recall": 0, "copy": 0, "header": 1} if arm == FORGETFUL else {"recall": 3, "copy": 1, "header": 1}
        assert facts == {
            "right": sum(right.values()),
            "questions": len(ASKED),
            "by_task": {
                task: {"right": right[task], "total": total}
                for task, total in (("recall", 3), ("copy", 1), ("header", 1))
            },
            "requests": len(ASKED),
            "rows_seen": rows * ROWS_PER_REQUEST,
            "rows_rewritten": rows * (ROWS_PER_REQUEST - 1),
            "learned_kept": rows * KEPT,
            "learned_evicted": rows * EVICTED,
            "structural_injected": rows * INJECTED,
            "sink_hits": rows * SINK_HITS,
            "sinks_possible": rows * SINKS,
            "local_hits": rows * LOCAL_HITS,
            "locals_possible": rows * LOCALS,
            "sink_hit_rate": SINK_HITS / SINKS,
            "local_hit_rate": LOCAL_HITS / LOCALS,
        }
    assert (report["texts_that_vary"], report["top_k"]) == (0, 32)
    assert report["versions"] == {"kvplugin": "1.2.3", "vllm": "0.32.0"}
    assert report["problems"] == []


def test_table(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = stand_in.directory / "logs"
    result = run_command(stand_in, Behaviour.SERVES, monkeypatch, "--keep-logs", str(folder))
    assert result.exit_code == 0, result.output
    rows = table_rows(result.stdout)
    assert rows["arm"] == ["observe", "merge", "order", "oldest", "only"]
    assert rows["questions right"] == ["5 of 5"] * 4 + ["1 of 5"]
    assert rows["recall"] == ["3 of 3"] * 4 + ["0 of 3"]
    assert rows["learned kept"] == [f"{len(ASKED) * PHASES * KEPT:,}"] * 5
    assert rows["pre-merge sink hit rate"] == ["75.0%"] * 5
    assert rows["pre-merge local hit rate"] == ["12.5%"] * 5
    assert rows["share right"] == ["100%"] * 4 + ["20%"]
    assert "Asked again, observe answered 0 of 5 differently." in " ".join(result.stdout.split())
    assert "starting" not in result.stdout, "progress belongs to stderr"
    assert "merge_oldest  5 questions" in result.stderr
    assert {path.name for path in folder.iterdir()} == {"server.log", "rollout.json"}


def test_counts_in_the_millions_fit_80_columns() -> None:
    counts = PolicyCounts(99, *[9_999_999] * 9)
    asked = ASKED * 9
    answers = tuple(Answer(" ".join(question.right)) for question in asked)
    report = DemoReport(asked, {arm: ArmRun(arm, answers, counts) for arm in ARMS}, answers, 32, {"vllm": "0.32.0"})
    console = Console(width=80)
    with console.capture() as captured:
        console.print(report.table())
    rows = table_rows(captured.get())
    assert rows["pre-merge local hit rate"] == ["100.0%"] * 5
    assert rows["structural injected"] == ["9,999,999"] * 5


@pytest.mark.parametrize(
    ("behaviour", "complaints"),
    [
        (Behaviour.DIES, ["demo failed: the server ended with exit code 1\nfirst error: kvplugin.errors.ConfigError"]),
        (Behaviour.DIES_ON_REQUEST, ["demo failed: the server ended with exit code 7"]),
        (Behaviour.INACTIVE, ["demo failed: the policy is inactive: self_test_failed; run 'kvplugin doctor'"]),
        (Behaviour.WITHOUT_PLUGIN, ["demo failed: /metrics has no kvplugin_active: the server runs without kvplugin"]),
        (Behaviour.REWRITES_NOTHING, ["problem: merge: the policy rewrote no row"]),
        (Behaviour.ANSWERS_BADLY, ["problem: observe: 0 of 5 questions right; at least 90% are needed"]),
        (
            Behaviour.REFUSES,
            [
                'problem: merge: 5 of 5 requests failed; the first: HTTP 400: {"error": "refused"}',
                "problem: observe, asked again: 5 of 5 requests failed",
            ],
        ),
        (
            Behaviour.IGNORES_ARMS,
            [
                "problem: topology_only: /metrics counts 0 of 5 requests",
                "problem: merge_oldest: the policy saw no row",
            ],
        ),
    ],
)
def test_failures_are_told_and_leave_nothing(
    behaviour: Behaviour, complaints: list[str], stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run_command(stand_in, behaviour, monkeypatch)
    assert result.exit_code == 1
    assert [complaint for complaint in complaints if complaint not in result.stderr] == []
    assert stand_in.left_behind() == []


def test_texts_that_vary_are_counted(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second request is answered wrongly, in a round of five other questions than in the next."""
    result = run_command(stand_in, Behaviour.WAVERS, monkeypatch, "--json")
    assert 0 < json.loads(result.stdout)["texts_that_vary"] <= len(ASKED)


def test_ctrl_c_exits_with_130_and_leaves_nothing(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(url: str, arm: str, questions: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("integration.demo.run.ask_all", interrupted)
    result = run_command(stand_in, Behaviour.SERVES, monkeypatch)
    assert (result.exit_code, result.stdout) == (130, "")
    assert stand_in.left_behind() == []


def test_refuses_a_log_directory_that_is_a_file(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    path = stand_in.directory / "file"
    path.touch()
    result = run_command(stand_in, Behaviour.SERVES, monkeypatch, "--keep-logs", str(path))
    assert result.exit_code == 2
    assert "--keep-logs" in result.stderr


def test_questions_are_the_same_in_every_run_and_their_texts_are_the_tasks_tokens() -> None:
    """The tokenizer makes of each prompt the very tokens of the task, and the right words are the ones that follow."""
    asked = demo_questions()
    assert asked == demo_questions()
    assert len(asked) == len(LENGTHS) * sum(TEXTS.values())
    tokenizer = build_word_tokenizer()
    texts = [
        (task, text)
        for length in LENGTHS
        for task, batch in ((task, questions(length)[task]) for task in TEXTS)
        for text in batch.tokens[: TEXTS[task]].tolist()
    ]
    for question, (task, text) in zip(asked, texts, strict=True):
        assert question.task == task
        prompt = tokenizer.encode(question.prompt).ids
        right = tokenizer.encode(" ".join(question.right), add_special_tokens=False).ids
        assert prompt + right == text[: len(prompt) + len(right)]
        assert len(right) == (COPIED if task == "copy" else 1)
        assert task == "copy" or len(prompt) + 1 == len(text)


def test_the_rollout_is_valid_and_its_arms_are_told_apart(tmp_path: Path) -> None:
    rollout = read_rollout(write_rollout(tmp_path / "rollout.json"))
    assert list(rollout.arms) == list(ARMS)
    assert all(one != other for one, other in pairwise(rollout.arms.values()))


def test_counts_are_summed_over_phases_and_ways_to_an_arm() -> None:
    text = "\n".join(
        [
            'kvplugin_requests_total{arm="a",choice="explicit"} 2',
            'kvplugin_requests_total{arm="a",choice="session"} 3',
            'kvplugin_requests_total{arm="b",choice="explicit"} 100',
            'kvplugin_policy_rows_total{arm="a",phase="prefill",outcome="seen"} 10',
            'kvplugin_policy_rows_total{arm="a",phase="decode",outcome="seen"} 20',
            'kvplugin_policy_rows_total{arm="b",phase="decode",outcome="seen"} 1000',
            'kvplugin_policy_rows_total{arm="a",phase="decode",outcome="rewritten"} 4',
            *(
                f'kvplugin_policy_tokens_total{{arm="a",phase="decode",kind="{kind}"}} {value}'
                for value, kind in enumerate(
                    ("kept", "evicted", "injected", "sink_hit", "sink_possible", "local_hit", "local_possible")
                )
            ),
            "",
        ]
    )
    counts = read_counts(parse(text), "a")
    assert (counts.requests, counts.rows_seen, counts.rows_rewritten) == (5, 30, 4)
    assert (counts.learned_kept, counts.learned_evicted, counts.structural_injected) == (0, 1, 2)
    assert (counts.sink_hit_rate, counts.local_hit_rate) == (3 / 4, 5 / 6)


def test_a_missing_series_is_named() -> None:
    with pytest.raises(MetricsError, match=r'no kvplugin_policy_rows_total\{outcome="seen"\}'):
        parse("").total("kvplugin_policy_rows_total", outcome="seen")


def test_no_structure_has_no_hit_rate() -> None:
    nothing = PolicyCounts(*([0] * 10))
    assert (nothing.sink_hit_rate, nothing.local_hit_rate) == (None, None)


@pytest.mark.parametrize(
    ("base", "expected"),
    [({}, "localhost,127.0.0.1"), ({"no_proxy": "intra.example"}, "intra.example,localhost,127.0.0.1")],
)
def test_the_server_is_reached_past_any_proxy(base: dict[str, str], expected: str) -> None:
    environment = cpu_environment(base)
    assert environment["no_proxy"] == environment["NO_PROXY"] == expected


def test_answers_come_in_the_order_of_the_questions(stand_in: StandIn) -> None:
    with Server(stand_in.options(Behaviour.SERVES)) as server:
        answers = ask_all(server.url, "default", ASKED)
    assert [answer.text for answer in answers] == [f" {' '.join(question.right)}" for question in ASKED]


def table_rows(output: str) -> dict[str, list[str]]:
    """Cells by their row's label; columns stand two spaces apart at least."""
    rows = [re.split(r"\s{2,}", line.strip()) for line in output.splitlines()]
    return {label: cells for label, *cells in rows}
