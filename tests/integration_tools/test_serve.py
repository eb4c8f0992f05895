"""``python -m integration.serve`` with a stand-in for vLLM."""

from __future__ import annotations

import functools
import json
import re
import shlex

import pytest
from stand_in import StandIn
from stand_in_server import Behaviour
from typer.testing import CliRunner, Result

from integration import serve
from integration.server import ServerOptions


def run_command(stand_in: StandIn, behaviour: Behaviour, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Result:
    """Serve until the first pause, where the user presses Ctrl-C."""

    def ctrl_c(seconds: float) -> None:
        raise KeyboardInterrupt

    options = functools.partial(ServerOptions, command=stand_in.command(behaviour))
    monkeypatch.setattr(serve, "ServerOptions", options)
    monkeypatch.setattr(serve, "require_vllm", lambda: None)
    monkeypatch.setattr(serve, "tiny_model", lambda kind: stand_in.directory / kind)
    monkeypatch.setattr(serve, "pause", ctrl_c)
    return CliRunner().invoke(serve.app, ["--port", "0", *arguments])


def test_serves_until_ctrl_c_and_tells_how_to_try_it(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run_command(stand_in, Behaviour.SERVES, monkeypatch)
    assert result.exit_code == 0, result.output
    assert "glm52 topology_sparse_merge" in result.stderr
    assert "Starting to load model" in result.stderr, "the log is shown"
    (command,) = re.findall(r"curl .*completions.*", result.stdout)
    program, url, _, header, _, body = shlex.split(command)
    assert (program, header) == ("curl", "Content-Type: application/json")
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/v1/completions", url)
    assert json.loads(body)["model"] == "tiny"
    assert stand_in.left_behind() == []


def test_hands_mode_and_further_arguments_to_vllm(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[ServerOptions] = []
    monkeypatch.setattr(serve, "_serve", lambda options, *rest: started.append(options))
    run_command(stand_in, Behaviour.SERVES, monkeypatch, "--mode", "observe", "--", "--api-server-count", "2")
    arguments = started[0].arguments
    assert arguments[-2:] == ("--api-server-count", "2")
    assert "--additional-config.kvplugin.policy.mode=observe" in arguments
    assert arguments[arguments.index("--attention-backend") + 1] == "KVPLUGIN"


def test_a_model_without_dsa_is_served_without_the_plugin(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[ServerOptions] = []
    monkeypatch.setattr(serve, "_serve", lambda options, *rest: started.append(options))
    run_command(stand_in, Behaviour.SERVES, monkeypatch, "--kind", "llama")
    assert not [argument for argument in started[0].arguments if "kvplugin" in argument.lower()]


def test_a_server_that_dies_is_an_error(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run_command(stand_in, Behaviour.DIES, monkeypatch)
    assert result.exit_code == 1
    assert result.stderr.endswith("See root cause above.\n\n")
    assert "serve failed: the server ended with exit code 1\nfirst error: kvplugin.errors" in result.stderr
    assert stand_in.left_behind() == []


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--kind", "gpt"], ["--kind", "'glm52'"]),
        (["--mode", "merge"], ["--mode", "'observe'"]),
        (["--port", "-1"], ["--port"]),
    ],
)
def test_refuses(arguments: list[str], named: list[str]) -> None:
    result = CliRunner().invoke(serve.app, arguments)
    assert result.exit_code == 2
    assert all(word in result.stderr for word in named), result.stderr
