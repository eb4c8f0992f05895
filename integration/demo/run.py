"""Run the demo: one server, and the same questions to each of its arms."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from integration.demo.arms import ARMS, OBSERVE, write_rollout
from integration.demo.client import Answer, ask_all
from integration.demo.metrics_view import difference, read_counts, require_active, settled_scrape
from integration.demo.questions import Question, demo_questions
from integration.demo.report import ArmRun, DemoReport
from integration.recipes import TRAINED_TOPK, cpu_environment, model_arguments, rollout_arguments
from integration.server import VLLM_SERVER, Server, ServerOptions
from integration.startup_view import StartupView

_TITLE = "server"


@dataclass(frozen=True)
class DemoOptions:
    """How to run the demo.

    Attributes:
        model: checkpoint directory.
        files: directory that receives the server's log and its rollout file.
        port: port of the server; 0 = any free one.
        command: the server program; a stand-in for tests.
    """

    model: Path
    files: Path
    port: int = 0
    command: tuple[str, ...] = VLLM_SERVER


def run_demo(options: DemoOptions, console: Console) -> DemoReport:
    """Ask every arm the demo's questions, ``observe`` twice.

    Raises:
        ServerError: the server could not be started, or died.
        MetricsError: the policy is not active, or ``/metrics`` does not say what it did.
    """
    questions = demo_questions()
    with StartupView(console, _TITLE) as view, Server(_server_options(options), view) as server:
        view.close()
        require_active(server.url)
        before = settled_scrape(server.url)
        answers = {arm: _asked(server, arm, questions, console) for arm in ARMS}
        after = settled_scrape(server.url)
        repeated = _asked(server, OBSERVE, questions, console)
    runs = {
        arm: ArmRun(arm, answers[arm], difference(read_counts(before, arm), read_counts(after, arm))) for arm in ARMS
    }
    return DemoReport(questions, runs, repeated, TRAINED_TOPK, after.versions())


def _server_options(options: DemoOptions) -> ServerOptions:
    files = options.files.resolve()
    rollout = write_rollout(files / "rollout.json")
    return ServerOptions(
        arguments=(
            *model_arguments(options.model),
            *rollout_arguments(rollout, files / "override.json"),
        ),
        log=files / "server.log",
        environment=cpu_environment(),
        port=options.port,
        command=options.command,
    )


def _asked(server: Server, arm: str, questions: tuple[Question, ...], console: Console) -> tuple[Answer, ...]:
    console.print(f"{arm}  {len(questions)} questions at once", highlight=False)
    answers = ask_all(server.url, arm, questions)
    server.check_alive()
    return answers
