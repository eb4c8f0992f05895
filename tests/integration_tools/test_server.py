"""The server runner, with a stand-in for vLLM: it gets ready, it fails with a reason, and it leaves nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from stand_in import StandIn
from stand_in_server import Behaviour

from integration.server import HOST, Progress, Server, ServerError, ServerOptions
from integration.server_log import LogFollower, Stage, first_exception, stage_of

BLOCK = """
import signal, sys, time
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored, and inherited so, where the tests run under nohup
from integration.server import Server, ServerOptions

def reached(progress):
    Path({reached!r}).touch()

options = ServerOptions((), Path({log!r}), command={command!r}, stop_within_s=1.0)
with Server(options, reached if {while_starting} else lambda progress: None):
    reached(None)
    time.sleep(60)
"""


def test_gets_ready_reports_stages_and_leaves_nothing(stand_in: StandIn) -> None:
    seen: list[Progress] = []
    with Server(stand_in.options(Behaviour.SERVES), seen.append) as server:
        assert httpx.get(f"{server.url}/health", trust_env=False).is_success
        server.check_alive()
        assert len(stand_in.left_behind()) == 3
    assert stand_in.left_behind() == []
    stages = list(dict.fromkeys(progress.stage for progress in seen))
    assert stages[-2:] == [Stage.LOADING, Stage.READY]
    assert stages == sorted(stages, key=list(Stage).index)
    assert [progress.elapsed_s for progress in seen] == sorted(progress.elapsed_s for progress in seen)


@pytest.mark.parametrize("behaviour", [Behaviour.SERVES, Behaviour.STUBBORN])
def test_an_error_in_the_block_comes_out_and_leaves_nothing(behaviour: Behaviour, stand_in: StandIn) -> None:
    with pytest.raises(ZeroDivisionError), Server(stand_in.options(behaviour)):
        _ = 1 / 0
    assert stand_in.left_behind() == []


def test_a_server_that_dies_is_reported_with_its_cause(stand_in: StandIn) -> None:
    with pytest.raises(ServerError) as caught, Server(stand_in.options(Behaviour.DIES)):
        pytest.fail("not reached")
    first, cause, *rest = str(caught.value).splitlines()
    assert first == "the server ended with exit code 1"
    assert cause == "first error: kvplugin.errors.ConfigError: the cause"
    assert rest[-1] == "RuntimeError: Engine core initialization failed. See root cause above."
    assert stand_in.left_behind() == []


def test_a_server_that_does_not_get_ready_is_given_up(stand_in: StandIn) -> None:
    with (
        pytest.raises(ServerError, match=r"not ready after 3 s, still starting the engine"),
        Server(stand_in.options(Behaviour.NEVER_READY, ready_within_s=3.0)),
    ):
        pytest.fail("not reached")
    assert stand_in.left_behind() == []


def test_a_server_killed_while_serving_is_noticed(stand_in: StandIn) -> None:
    with Server(stand_in.options(Behaviour.SERVES)) as server:
        os.kill(int(stand_in.pids.read_text().split()[0]), signal.SIGKILL)
        time.sleep(0.3)
        with pytest.raises(ServerError, match="ended with signal SIGKILL"):
            server.check_alive()
    assert stand_in.left_behind() == []


@pytest.mark.parametrize(
    ("signals", "while_starting", "status"),
    [
        ([signal.SIGINT], True, -signal.SIGINT),
        ([signal.SIGINT], False, -signal.SIGINT),
        ([signal.SIGINT, signal.SIGINT, signal.SIGINT], False, -signal.SIGINT),
        ([signal.SIGTERM], True, 128 + signal.SIGTERM),
        ([signal.SIGHUP], False, 128 + signal.SIGHUP),
    ],
    ids=["ctrl-c-starting", "ctrl-c", "impatient", "term-starting", "hup"],
)
def test_a_signal_ends_the_block_and_leaves_nothing(
    signals: list[signal.Signals], while_starting: bool, status: int, stand_in: StandIn
) -> None:
    behaviour = Behaviour.NEVER_READY if while_starting else Behaviour.SERVES
    reached = stand_in.directory / "reached"
    program = BLOCK.format(
        reached=str(reached),
        log=str(stand_in.directory / "log"),
        command=stand_in.command(behaviour),
        while_starting=while_starting,
    )
    process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL)
    wait_for(reached)
    wait_for(stand_in.pids)
    for number in signals:
        process.send_signal(number)
        time.sleep(0.2)
    assert process.wait(timeout=20) == status
    assert stand_in.left_behind() == []


def test_a_program_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    options = ServerOptions((), tmp_path / "log", command=(str(tmp_path / "nothing"),))
    with pytest.raises(FileNotFoundError), Server(options):
        pytest.fail("not reached")


def test_a_busy_port_is_refused(stand_in: StandIn) -> None:
    with socket.socket() as other:
        other.bind((HOST, 0))
        other.listen()
        port = other.getsockname()[1]
        with (
            pytest.raises(ServerError, match=rf"port {port} cannot be used: Address already in use; choose another"),
            Server(stand_in.options(Behaviour.SERVES, port=port)),
        ):
            pytest.fail("not reached")


def test_a_given_port_is_used(stand_in: StandIn) -> None:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = probe.getsockname()[1]
    with Server(stand_in.options(Behaviour.SERVES, port=port)) as server:
        assert server.url == f"http://{HOST}:{port}"


def test_the_server_gets_the_environment_on_top_of_ours(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INHERITED", "yes")
    with Server(stand_in.options(Behaviour.SERVES, environment={"GIVEN": "too"})):
        environment = stand_in.left_behind()[0].environ()
    assert (environment["INHERITED"], environment["GIVEN"]) == ("yes", "too")


@pytest.mark.parametrize(
    ("line", "stage"),
    [
        ("(APIServer pid=1) INFO 01-01 00:00:00 [api_utils.py:286] non-default args: {'port': 1}", Stage.CONFIGURING),
        ("(EngineCore pid=2) INFO 01-01 00:00:00 [core.py:133] Initializing a V1 LLM engine (v0.32.0)", Stage.ENGINE),
        ("(Worker pid=3) INFO 01-01 00:00:00 [cpu_model_runner.py:68] Starting to load model /m...", Stage.LOADING),
        ("(Worker pid=3) INFO 01-01 00:00:00 [default_loader.py:501] Loading weights took 0.03 s", Stage.PROFILING),
        ("(APIServer pid=1) INFO 01-01 00:00:00 [cpu.py:224] something else", None),
    ],
)
def test_stage_of(line: str, stage: Stage | None) -> None:
    assert stage_of(line) is stage


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        ("INFO fine\nValueError: one\nRuntimeError: two", "ValueError: one"),
        (
            "(W pid=3) ERROR 01-01 00:00:00 [a.py:1] Traceback\n(W pid=3) ERROR 01-01 00:00:00 [a.py:1] KeyError: 'x'",
            "KeyError: 'x'",
        ),
        ("(W pid=3) kvplugin.errors.EngineMismatch: vllm.x: gone", "kvplugin.errors.EngineMismatch: vllm.x: gone"),
        ("(A pid=1) WARNING 01-01 00:00:00 [s.py:2] can cause errors like `OSError: [Errno 24]`", None),
        ("", None),
    ],
)
def test_first_exception(log: str, cause: str | None) -> None:
    assert first_exception(log) == cause


def test_follower_returns_complete_lines_once(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("one\ntw")
    follower = LogFollower(path)
    assert follower.new_lines() == ["one"]
    assert follower.new_lines() == []
    with path.open("a") as file:
        file.write("o\n\nthree\n")
    assert follower.new_lines() == ["two", "", "three"]
    follower.close()


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} was never written"
        time.sleep(0.05)
