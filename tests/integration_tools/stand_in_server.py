"""A program that behaves like a vLLM server, in milliseconds: log lines, children, endpoints, metrics.

Started as ``stand_in_server.py PIDS BEHAVIOUR --host H --port P …``. Appends the ids of its processes to the file PIDS.
Its children are the worst there are: both ignore signals, one leaves for a session of its own, one hides its
environment (as a process that sets its title does).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from enum import StrEnum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

ROWS_PER_REQUEST = 10
KEPT, EVICTED, INJECTED, SINK_HITS, SINKS, LOCAL_HITS, LOCALS = 520, 120, 130, 30, 40, 10, 80
LEFT_OVER = 5
"""Counted before the first request, such as a self-test leaves."""
FORGETFUL = "topology_only"
"""This arm answers ``none``, except to prompts that begin with ``header``."""


class Behaviour(StrEnum):
    SERVES = "serves"
    DIES = "dies"
    NEVER_READY = "never-ready"
    STUBBORN = "stubborn"
    DIES_ON_REQUEST = "dies-on-request"
    REFUSES = "refuses"
    REWRITES_NOTHING = "rewrites-nothing"
    ANSWERS_BADLY = "answers-badly"
    WAVERS = "wavers"
    IGNORES_ARMS = "ignores-arms"
    INACTIVE = "inactive"
    WITHOUT_PLUGIN = "without-plugin"


CHILD = """
import os, signal, sys, time
if "leave" in sys.argv:
    os.setsid()
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(600)
"""


class State:
    """What the server has counted."""

    lock = threading.Lock()
    requests: ClassVar[Counter[str]] = Counter()


def main(pids: str, behaviour_name: str, *arguments: str) -> None:
    behaviour = Behaviour(behaviour_name)
    if behaviour is Behaviour.STUBBORN:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    children = [start_child({**os.environ}, "leave"), start_child({})]
    with Path(pids).open("a") as file:
        file.writelines(f"{pid}\n" for pid in (os.getpid(), *children))
    print("(APIServer pid=1) INFO 01-01 00:00:00 [api_utils.py:286] non-default args: {}", flush=True)
    print("(EngineCore pid=2) INFO 01-01 00:00:00 [core.py:133] Initializing a V1 LLM engine (v0.32.0)", flush=True)
    if behaviour is Behaviour.DIES:
        print("(Worker pid=3) ERROR 01-01 00:00:00 [worker.py:1] kvplugin.errors.ConfigError: the cause", flush=True)
        sys.exit("RuntimeError: Engine core initialization failed. See root cause above.")
    if behaviour is Behaviour.NEVER_READY:
        time.sleep(600)
    # Long enough for the client to see this stage between two polls.
    print("(Worker pid=3) INFO 01-01 00:00:00 [runner.py:68] Starting to load model tiny...", flush=True)
    time.sleep(0.5)
    port = int(arguments[arguments.index("--port") + 1])
    ThreadingHTTPServer(("127.0.0.1", port), handler(behaviour, served_arms(arguments))).serve_forever()


def served_arms(arguments: tuple[str, ...]) -> list[str]:
    """Those of the rollout file, the default one first."""
    files = [a.partition("=")[2] for a in arguments if a.startswith("--additional-config.kvplugin.rollout=")]
    if not files:
        return ["default"]
    rollout = json.loads(Path(files[0]).read_text())
    return sorted(rollout["arms"], key=lambda arm: arm != rollout["default_arm"])


def start_child(environment: dict[str, str], *arguments: str) -> int:
    """Start a child and wait until it ignores signals; returns its id."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    child.stdout.readline()
    return child.pid


def handler(behaviour: Behaviour, arms: list[str]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(200, metrics(behaviour, arms) if self.path == "/metrics" else "")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if behaviour is Behaviour.DIES_ON_REQUEST:
                os._exit(7)
            arm = body.get("vllm_xargs", {}).get("kvplugin_arm", arms[0])
            if self.path != "/v1/completions" or arm not in arms or behaviour is Behaviour.REFUSES:
                self.answer(400, '{"error": "refused"}')
                return
            with State.lock:
                State.requests[arms[0] if behaviour is Behaviour.IGNORES_ARMS else arm] += 1
                text = reply(behaviour, arm, body["prompt"].split(), body["max_tokens"])
            self.answer(200, json.dumps({"choices": [{"text": text}]}))

        def answer(self, status: int, text: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: object) -> None:
            """Stay quiet."""

    return Handler


def reply(behaviour: Behaviour, arm: str, prompt: list[str], max_tokens: int) -> str:
    """The last words of the prompt, which are right by agreement, or not."""
    forgets = arm == FORGETFUL and prompt[0] != "header"
    wavers = behaviour is Behaviour.WAVERS and State.requests.total() % 2 == 0
    if forgets or wavers or behaviour is Behaviour.ANSWERS_BADLY:
        return " none"
    return " " + " ".join(prompt[-max_tokens:])


def metrics(behaviour: Behaviour, arms: list[str]) -> str:
    served = f'vllm:request_success_total{{finished_reason="length"}} {State.requests.total()}\n'
    if behaviour is Behaviour.WITHOUT_PLUGIN:
        return served
    if behaviour is Behaviour.INACTIVE:
        return served + 'kvplugin_active{reason="self_test_failed"} 0\n'
    lines = ['kvplugin_active{reason="active"} 1', 'kvplugin_build_info{version="1.2.3",vllm_version="0.32.0"} 1']
    for arm in arms:
        lines += arm_metrics(behaviour, arm)
    return served + "\n".join(lines) + "\n"


def arm_metrics(behaviour: Behaviour, arm: str) -> list[str]:
    rewritten = 0 if behaviour is Behaviour.REWRITES_NOTHING else ROWS_PER_REQUEST - 1
    outcomes = {"seen": ROWS_PER_REQUEST, "rewritten": rewritten}
    kinds = {"kept": KEPT, "evicted": EVICTED, "injected": INJECTED, "sink_hit": SINK_HITS, "sink_possible": SINKS}
    kinds |= {"local_hit": LOCAL_HITS, "local_possible": LOCALS}
    lines = [f'kvplugin_requests_total{{arm="{arm}",choice="explicit"}} {State.requests[arm]}']
    for phase in ("prefill", "decode"):
        for name, values, label in (("rows", outcomes, "outcome"), ("tokens", kinds, "kind")):
            lines += [
                f'kvplugin_policy_{name}_total{{arm="{arm}",phase="{phase}",{label}="{key}"}} '
                f"{LEFT_OVER + value * State.requests[arm]}"
                for key, value in values.items()
            ]
    return lines


if __name__ == "__main__":
    main(*sys.argv[1:])
