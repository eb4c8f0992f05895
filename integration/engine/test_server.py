"""The spawned server, as an operator starts it: flag, endpoints, two API servers, metrics, wrong settings."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from integration.demo.metrics_view import settled_scrape
from integration.recipes import cpu_environment, model_arguments, plugin_arguments, tiny_model
from integration.server import VLLM_SERVER, Server, ServerOptions
from integration.tiny_dsa import ModelKind
from kvplugin.config import Mode

GROUPS, LAYERS = 2, 6  # pattern FSSFSS
NO_PREFIX_CACHE = "--no-enable-prefix-caching"  # a cached prompt token is not a row


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """With two API servers; the quick start, whose every expression is looked at, has one."""
    options = ServerOptions(
        arguments=(
            *model_arguments(tiny_model(ModelKind.GLM52)),
            *plugin_arguments(Mode.SPARSE_MERGE),
            *("--api-server-count", "2", NO_PREFIX_CACHE),
        ),
        log=tmp_path_factory.mktemp("server") / "server.log",
        environment=cpu_environment(),
    )
    with Server(options) as running:
        yield running


def test_every_endpoint_is_counted_exactly(server: Server) -> None:
    """Completions, chats and streams at once; rows from the usage that the server itself reports."""
    with httpx.Client(base_url=server.url, timeout=120, trust_env=False) as client, ThreadPoolExecutor(8) as pool:
        tasks = [pool.submit(_complete, client, "x" * (20 + 60 * i)) for i in range(4)]
        tasks += [pool.submit(_chat, client, "tell me of " + "y" * (30 * i), stream=False) for i in range(2)]
        tasks += [pool.submit(_chat, client, "sing of " + "z" * (50 * i), stream=True) for i in range(2)]
        usages = [task.result() for task in tasks]
    scrape = settled_scrape(server.url)
    rows = sum(usage["prompt_tokens"] + usage["completion_tokens"] - 1 for usage in usages)
    prompt_rows = sum(usage["prompt_tokens"] for usage in usages)
    assert scrape.total("kvplugin_policy_rows_total", outcome="seen") == GROUPS * rows
    assert scrape.total("kvplugin_policy_rows_total", outcome="seen", phase="prefill") == GROUPS * prompt_rows
    changed = scrape.total("kvplugin_policy_rows_total", outcome="rewritten")
    same = scrape.total("kvplugin_policy_rows_total", outcome="identity")
    assert changed > 0
    assert changed + same == GROUPS * rows
    conversions = scrape.total("kvplugin_remap_conversions_total", path="grouped")
    assert scrape.total("kvplugin_remap_conversions_total", path="memo") == (LAYERS / GROUPS - 1) * conversions > 0
    assert scrape.total("kvplugin_remap_conversions_total") == LAYERS / GROUPS * conversions
    assert conversions % GROUPS == 0
    assert scrape.total("kvplugin_remap_invalid_total") == 0
    assert scrape.total("kvplugin_active", reason="active") == 1
    assert scrape.total("kvplugin_build_info") == 1


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        pytest.param(
            ("--additional-config.kvplugin.policy.mode=topology_merge",),
            {},
            "kvplugin.policy.mode: 'topology_merge' is unknown; use disabled, observe, topology_sparse_merge, "
            "topology_compress_sparse, topology_only; did you mean 'topology_sparse_merge'?",
            id="wrong mode",
        ),
        pytest.param((), {"VLLM_PLUGINS": ""}, "KVPLUGIN", id="plugins shut out"),
    ],
)
def test_start_up_stops_with_one_message(arguments: tuple[str, ...], environment: dict[str, str], message: str) -> None:
    found = subprocess.run(
        [
            *VLLM_SERVER,
            *model_arguments(tiny_model(ModelKind.GLM52)),
            *("--attention-backend", "KVPLUGIN"),
            *arguments,
        ],
        env=os.environ | cpu_environment() | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert found.returncode != 0
    last = (found.stdout + found.stderr).strip().splitlines()[-1]
    assert message in last, (found.stdout + found.stderr)[-3000:]


def _complete(client: httpx.Client, prompt: str) -> dict[str, int]:
    answer = client.post("/v1/completions", json=_body(prompt=prompt))
    answer.raise_for_status()
    usage: dict[str, int] = answer.json()["usage"]
    return usage


def _chat(client: httpx.Client, text: str, *, stream: bool) -> dict[str, int]:
    body = _body(messages=[{"role": "user", "content": text}])
    if not stream:
        answer = client.post("/v1/chat/completions", json=body)
        answer.raise_for_status()
        usage: dict[str, int] = answer.json()["usage"]
        return usage
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: {")]
    assert len(events) > 2, "the answer came in one piece"
    return dict(json.loads(events[-1])["usage"])


def _body(**content: Any) -> dict[str, Any]:
    return {"model": "tiny", "max_tokens": 8, "temperature": 0, "ignore_eos": True, **content}
