"""The directory through which the processes of one server hand on their metrics."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import re
import secrets
import shutil
import tempfile
from pathlib import Path

PROMETHEUS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""prometheus_client's own variable. vLLM sets it for several API servers, and then its ``/metrics`` reads every file
found there: ours must be there too, and nowhere else."""

DIRECTORY_VARIABLE = "KVPLUGIN_METRICS_DIR"
"""Directory to use where the variable above is unset; an operator may set it, else a private one is chosen."""

_PRIVATE_NAME = re.compile(r"kvplugin-metrics-(?P<owner>\d+)-[0-9a-f]{16}")


def prepare_directory() -> None:
    """Choose the directory and leave its name in the environment, so that child processes inherit it.

    To be called before the first child starts, in every process, as often as one likes. Nothing is created: the first
    writer does that. The process that chooses a private directory removes it at exit.
    """
    inherited = os.environ.get(DIRECTORY_VARIABLE)
    if inherited and not _belongs_to_another_program(inherited):
        return
    chosen = Path(tempfile.gettempdir()) / f"kvplugin-metrics-{os.getpid()}-{secrets.token_hex(8)}"
    os.environ[DIRECTORY_VARIABLE] = str(chosen)
    atexit.register(_remove, chosen, os.getpid())


def metrics_directory() -> Path:
    """Where this process writes its metrics; asked at each use, because vLLM may set its variable after the choice."""
    if read_by_prometheus_client():
        return Path(os.environ[PROMETHEUS_VARIABLE])
    prepare_directory()
    return Path(os.environ[DIRECTORY_VARIABLE])


def read_by_prometheus_client() -> bool:
    """True where ``/metrics`` is served from prometheus_client's own directory and needs no collector of ours."""
    return bool(os.environ.get(PROMETHEUS_VARIABLE))


def _belongs_to_another_program(directory: str) -> bool:
    """True for a private directory inherited from a program that merely started this one.

    A test run or a notebook that imported vLLM and then starts two servers would otherwise add up their counters.
    vLLM's own children are multiprocessing children, and they do share their parent's directory. Their name tells, and
    tells it early: a spawned child asks while it is being unpickled, when ``parent_process()`` still says None.
    """
    private = _PRIVATE_NAME.fullmatch(Path(directory).name)
    return (
        private is not None
        and int(private["owner"]) != os.getpid()
        and multiprocessing.current_process().name == "MainProcess"
    )


def _remove(directory: Path, owner: int) -> None:
    # A forked child inherits the exit handler too.
    if os.getpid() == owner:
        shutil.rmtree(directory, ignore_errors=True)
