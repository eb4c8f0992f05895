"""The command itself: all subcommands are there and explained, and none is imported for another."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from kvplugin.cli.main import SUBCOMMANDS, app


def run(*arguments: str) -> tuple[int, str]:
    found = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(app, list(arguments))
    return found.exit_code, found.output


def test_help_lists_them_all() -> None:
    status, output = run("--help")
    assert status == 0
    lines = [line.strip("│ ") for line in output.splitlines()]
    explained = [line.split()[0] for line in lines if len(line.split()) > 3 and line.split()[0] in SUBCOMMANDS]
    assert explained == list(SUBCOMMANDS)


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_each_has_its_own_help(name: str) -> None:
    status, output = run(name, "--help")
    assert status == 0
    assert f" {name} " in output
    assert "--install-completion" not in output


def test_an_unknown_one_is_wrong_usage() -> None:
    status, output = run("rolout")
    assert status == 2
    assert "No such command 'rolout'" in output


@pytest.mark.parametrize("name", ["rollout", "dashboards"])
def test_what_an_operator_is_in_a_hurry_for_loads_no_torch(name: str) -> None:
    code = (
        f"import sys; sys.argv = ['kvplugin', '{name}', '--help']\n"
        "from kvplugin.cli.main import main\n"
        "try: main()\n"
        "finally: print(*sorted({module.split('.')[0] for module in sys.modules}), file=sys.stderr)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    loaded = found.stderr.split()
    assert "typer" in loaded
    assert not {"torch", "numba", "vllm"} & set(loaded)
