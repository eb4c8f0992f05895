"""Arms on a real server with two API servers and an API key: entry points, endpoints, load, Prometheus."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from string import ascii_lowercase
from typing import Any, NamedTuple

import httpx
import pytest
from typer.testing import CliRunner

from integration.ab.check import summarize
from integration.ab.expected import documented_arm
from integration.ab.run import LoadLog, LoadOptions, rollout_file
from integration.ab.traffic import Answered, Asked
from integration.ab_load import run_load, server_options
from integration.demo.scrape import scrape
from integration.observability import fault
from integration.observability.services import free_port, running
from integration.recipes import SERVED_NAME
from integration.server import Server
from kvplugin.cli.main import app
from kvplugin.vllm.rollout.endpoints import MOST_BYTES

KEY = "a-key"
HEADER = "x-kvplugin-arm"
MERGING = "topology_sparse_merge"
SHORT = LoadOptions(requests=120, at_once=16, tokens=6, prompts=8, key=KEY)
CHAT = {"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]}
ENTRIES = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 2},
    "/v1/chat/completions": {**CHAT, "max_tokens": 2},
    "/v1/responses": {"input": "hello", "max_output_tokens": 2},
}
ENTRY = pytest.mark.parametrize("path", ENTRIES)
STREAM = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


class Served(NamedTuple):
    """A server, its rollout file and the file of its override."""

    server: Server
    rollout: Path
    state: Path
    client: httpx.Client

    @property
    def fault(self) -> Path:
        """The file that breaks the indexer while it is there."""
        return self.rollout.parent / "fault"

    def post(self, path: str, body: dict[str, Any], **xargs: Any) -> httpx.Response:
        return self.client.post(path, json={"model": SERVED_NAME, "temperature": 0, **body, "vllm_xargs": xargs})

    def settled(self, **expected: Any) -> dict[str, Any]:
        """The status, once it is as expected a dozen times in a row; connections are spread over the API servers."""
        until, row = time.monotonic() + 20, 0
        while row < 12:
            status = self.client.get("/v1/kvplugin/status", headers={"Connection": "close"}).json()
            row = row + 1 if all(status["rollout"][name] == value for name, value in expected.items()) else 0
            assert time.monotonic() < until, f"wanted {expected}, found {status}"
        return dict(status)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("ab")
    rollout = rollout_file(folder)
    options = server_options(rollout, folder, 2)
    fault.entry_point(folder)
    options = options.__class__(
        (*options.arguments, "--api-key", KEY, "--additional-config.kvplugin.metrics.signals_every=2"),
        options.log,
        {
            **options.environment,
            **fault.environment(folder, options.environment["VLLM_PLUGINS"]),
            "VLLM_LOGGING_LEVEL": "INFO",
        },
    )
    with Server(options) as server:
        headers = {"Authorization": f"Bearer {KEY}"}
        with httpx.Client(base_url=server.url, timeout=60, trust_env=False, headers=headers) as client:
            yield Served(server, rollout, folder / "state" / "override.json", client)


@ENTRY
@STREAM
def test_every_entry_point_follows_the_arm_and_says_so(served: Served, path: str, stream: bool) -> None:
    response = served.post(path, {**ENTRIES[path], "stream": stream}, kvplugin_arm="candidate")
    assert response.status_code == 200, response.text
    # The first event of a response stream leaves before the engine is called.
    if path != "/v1/responses" or not stream:
        assert response.headers[HEADER] == "candidate"


@ENTRY
@STREAM
def test_a_wrong_key_is_refused_before_anything_is_sent(served: Served, path: str, stream: bool) -> None:
    for xargs, message in (
        ({"kvplugin_arm": "ghost"}, "kvplugin_arm: 'ghost' is an unknown arm; use control, candidate, scratch"),
        ({"kvplugin_arn": "control"}, "kvplugin_arn: unknown key; use kvplugin_arm, "),
        ({"kvplugin_scaffold_tokens": -1}, "kvplugin_scaffold_tokens: -1; give a number of tokens, 0 or more"),
        ({"kvplugin_arm": {"deep": 1}}, "kvplugin_arm"),
    ):
        response = served.post(path, {**ENTRIES[path], "stream": stream}, **xargs)
        assert response.status_code == 400, response.text
        assert message in response.json()["error"]["message"]


def test_prompts_of_one_request_have_one_arm(served: Served) -> None:
    for number in range(6):
        response = served.post(
            "/v1/completions", {"prompt": [f"{number}{letter}" for letter in "abcd"], "max_tokens": 1}
        )
        shares = {"control": 0.95, "candidate": 0.05}
        assert response.headers[HEADER] == documented_arm(shares, response.json()["id"])


def test_a_session_keeps_its_arm_however_it_is_named(served: Served) -> None:
    body = {"prompt": "hello", "max_tokens": 1}
    shares = {"control": 0.95, "candidate": 0.05}
    for number in range(8):
        session = f"user-{number}"
        named = [
            served.post("/v1/completions", body, kvplugin_session=session),
            served.post("/v1/completions", {**body, "session_id": session}),
            served.client.post(
                "/v1/completions",
                json={"model": SERVED_NAME, **body},
                headers={"X-Session-ID": session},
            ),
        ]
        assert {response.headers[HEADER] for response in named} == {documented_arm(shares, session)}


def test_a_chat_of_a_session_has_a_stable_prefix(served: Served) -> None:
    def hits() -> float:
        return scrape(served.server.url).total("kvplugin_fingerprints_total", result="hit")

    before = hits()
    for question in ("what?", "where?", "when?"):
        body = {"messages": [CHAT["messages"][0], {"role": "user", "content": question}], "max_tokens": 1}
        assert served.post("/v1/chat/completions", body, kvplugin_session="chatter").status_code == 200
    assert hits() == before + 2


def test_the_endpoints_want_the_key(served: Served) -> None:
    for method, path in (("GET", "status"), ("GET", "rollout"), ("PUT", "rollout")):
        response = httpx.request(method, f"{served.server.url}/v1/kvplugin/{path}", trust_env=False)
        assert response.status_code == 401


def test_an_override_by_http_is_in_force_everywhere_and_a_bad_one_nowhere(served: Served) -> None:
    put = served.client.put("/v1/kvplugin/rollout", json={"shares": {"candidate": 0.5, "control": 0.5}, "note": "half"})
    assert put.status_code == 200, put.text
    status = served.settled(shares={"control": 0.5, "candidate": 0.5, "scratch": 0})
    assert status["rollout"]["override"]["note"] == "half"
    served.post("/v1/completions", ENTRIES["/v1/completions"])
    (worker,) = served.client.get("/v1/kvplugin/status").json()["workers"]
    assert worker["digest"] == status["rollout"]["digest"]
    for body, status_code, message in (
        ({"shares": {"ghost": 1}}, 400, "rollout.shares.ghost: unknown arm"),
        ({"shares": {"control": 0.9}}, 400, "rollout.shares: add up to 0.9"),
        ({"enable": False}, 400, "override.enable: unknown key; use enabled"),
        ({"arms": {"control": {"mode": "topology_sparse_merge", "sink_tokens": 9999}}}, 400, "rollout.arms.control"),
        ([], 400, "override: [] is not a mapping"),
    ):
        refused = served.client.put("/v1/kvplugin/rollout", json=body)
        assert refused.status_code == status_code
        assert message in refused.json()["error"]["message"]
    assert served.client.put("/v1/kvplugin/rollout", content=b" " * (MOST_BYTES + 1)).status_code == 413
    served.settled(shares={"control": 0.5, "candidate": 0.5, "scratch": 0})
    assert served.client.put("/v1/kvplugin/rollout", json={}).status_code == 200
    served.settled(override=None)
    assert not served.state.exists()


def test_the_command_changes_the_same_override(served: Served) -> None:
    by_url = ["--url", served.server.url, "--api-key", KEY]
    by_file = ["--file", str(served.rollout), "--state", str(served.state)]
    for share in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6):  # whichever API server answers
        assert command("set", f"candidate={share}", *by_url)["arms"]["candidate"]["share"] == share
        assert command("show", *by_url)["override"]["shares"]["candidate"] == share
    found = command("set", "candidate=0.25", *by_url)
    assert found["arms"]["candidate"]["share"] == 0.25
    assert found["arms"]["control"]["share"] == 0.75
    assert command("show", *by_file)["override"]["shares"] == found["override"]["shares"]
    command("disable", "--note", "a test", *by_file)
    served.settled(enabled=False)
    assert command("show", *by_url)["override"]["note"] == "a test"
    command("enable", *by_url)
    served.settled(enabled=True)
    command("clear", *by_file)
    served.settled(override=None)


GUARD = {"window": 80, "windows": 2, "conditions": [{"signal": "eviction_margin", "above": 0.0125}]}
"""Healthy 0.008, with scores that mean nothing 0.017: measured on this model, whose weights are random."""
WITHIN = 25
"""Requests within which the guard is to act; a healthy run has ten times as many."""


def test_the_guard_takes_a_policy_away_and_nobody_notices(served: Served) -> None:
    """Healthy traffic, then an indexer whose scores mean nothing: one fallback, and no failed request in all."""
    shares = {"control": 0.0, "candidate": 1.0, "scratch": 0.0}
    served.client.put("/v1/kvplugin/rollout", json={"shares": shares}).raise_for_status()
    plain = served.rollout.read_text()
    served.rollout.write_text(json.dumps(json.loads(plain) | {"guard": GUARD}))
    served.settled(shares=shares)
    try:
        with ThreadPoolExecutor(8) as pool:
            assert set(pool.map(lambda number: _ask_at_length(served, number), range(10 * WITHIN))) == {200}
        assert served.settled(guard={})["rollout"]["guard"] == {}
        served.fault.write_text(fault.NOISE)
        asked, statuses = 0, set()
        while not (trips := served.client.get("/v1/kvplugin/status").json()["rollout"]["guard"]):
            assert asked < WITHIN, "the guard did not act"
            statuses.add(_ask_at_length(served, asked))
            asked += 1
        assert statuses == {200}
        assert trips["candidate"]["reason"].startswith("decode eviction_margin above 0.0125: 0.0")
        status = served.settled(arms={"control": "observe", "candidate": "observe", "scratch": "topology_sparse_merge"})
        assert list(status["rollout"]["guard"]) == ["candidate"]
        assert _ask_at_length(served, 0) == 200
        by_url = ["--url", served.server.url, "--api-key", KEY]
        assert command("show", *by_url)["override"]["guard"]["candidate"]["signal"] == "eviction_margin"
        time.sleep(1)
        found = scrape(served.server.url)
        assert found.total("kvplugin_guard_tripped", arm="candidate") == 1
        assert found.total("kvplugin_guard_trips_total", arm="candidate", signal="eviction_margin") == 1
        assert found.total("kvplugin_guard_trips_total") == 1
        served.fault.unlink()
        assert "guard" not in command("rearm", "candidate", *by_url)["override"]
        served.settled(guard={}, arms={"control": "observe"} | dict.fromkeys(shares.keys() - {"control"}, MERGING))
    finally:
        served.fault.unlink(missing_ok=True)
        served.rollout.write_text(plain)
        served.client.put("/v1/kvplugin/rollout", json={"guard": {}})
        served.settled(override=None)


def _ask_at_length(served: Served, number: int) -> int:
    """Status of a request whose rows see four times as many tokens as the top-k holds."""
    prompt = "".join(random.Random(number).choices(ascii_lowercase + " ", k=280))
    return served.post("/v1/completions", {"prompt": prompt, "max_tokens": 16}).status_code


def command(*arguments: str) -> dict[str, Any]:
    found = CliRunner().invoke(app, ["rollout", *arguments, "--json"], catch_exceptions=False)
    assert found.exit_code == 0, found.output
    return dict(json.loads(found.stdout))


def test_load_and_comparison(served: Served, tmp_path: Path) -> None:
    with prometheus(served.server, tmp_path) as url:
        summary = run_load(served.server.url, served.rollout, SHORT)
        assert summary.is_good, "\n".join(summary.lines())
        assert (summary.requests, summary.switched_off, summary.bad_files) == (SHORT.requests, 2, 1)
        assert min(summary.by_arm.values()) > 10
        assert summary.tokens_compared > SHORT.requests / 2
        assert summary.aborted_streams > 3
        if url is None:
            return
        time.sleep(2)
        found = command("compare", "--prometheus", url, "--window", "10m", "--baseline", "control")
    for arm, figures in found["arms"].items():
        mean = figures["latencies"]["end to end"]["mean_s"]
        assert mean["low"] <= mean["value"] <= mean["high"], arm
        rate = figures["rates"]["sinks the indexer found"]
        assert 0 <= rate["low"] <= rate["value"] <= rate["high"] <= 1, arm
    assert {"control", "candidate"} <= found["arms"].keys()
    assert any("too few requests" in line for line in found["verdict"]), found["verdict"]
    few = CliRunner().invoke(app, ["rollout", "compare", "--prometheus", "http://127.0.0.1:9"])
    assert few.exit_code != 0


@contextmanager
def prometheus(server: Server, folder: Path) -> Iterator[str | None]:
    """A real Prometheus that scrapes the server; None where the program is not installed."""
    program = shutil.which("prometheus")
    if program is None:
        yield None
        return
    job = {"job_name": "vllm", "static_configs": [{"targets": [server.url.removeprefix("http://")]}]}
    (folder / "prometheus.yml").write_text(json.dumps({"global": {"scrape_interval": "1s"}, "scrape_configs": [job]}))
    address = f"127.0.0.1:{free_port()}"
    command = [program, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with running([*command, f"--web.listen-address={address}"], f"http://{address}", folder / "prometheus.log") as url:
        yield url


def test_a_run_that_went_wrong_is_not_called_good() -> None:
    """The check itself: a failed request, a wrong arm, a wrong token and a wrong count are all seen."""
    asked = Asked(0, "s", False, None, {"control": 1.0, "candidate": 0.0})
    good = Answered(asked, 200, "cmpl-1", "control", (1, 2), 5, 0.0, 1.0)
    alone = {(0, "control"): (1, 2), (0, "candidate"): (3, 4)}

    def look(answers: list[Answered], prompts: float = 5, tokens: float = 2) -> Any:
        return summarize(LoadLog(answers), alone, {"control": prompts}, {"control": tokens})

    assert look([good]).is_good
    assert look([good, Answered(asked, 500, "", None, (), 0, 0.0, 1.0)]).failed == 1
    assert look([replace(good, arm="candidate")]).wrong_arms == 1
    assert look([replace(good, tokens=(1, 3))]).wrong_tokens == 1
    assert look([good], prompts=6).wrong_prompt_counts == 1
    assert look([good], tokens=3).wrong_generation_counts == 1
    flipped = LoadLog([good], off=[(0.5, 0.8, 0.9)])
    assert summarize(flipped, alone, {"control": 5}, {"control": 2}).tokens_compared == 0
