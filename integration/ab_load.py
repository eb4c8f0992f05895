"""Two arms under load on a real server: ``python -m integration.ab_load``; exits 1 if anything is wrong."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from integration.ab.check import Summary, summarize
from integration.ab.run import LoadOptions, LoadRun, rollout_file
from integration.demo.metrics_view import settled_scrape
from integration.recipes import cpu_environment, model_arguments, rollout_arguments, tiny_model
from integration.server import Server, ServerOptions
from integration.tiny_dsa import ModelKind

PROMPT_TOKENS, GENERATION_TOKENS = "kvplugin_request_prompt_tokens_total", "kvplugin_request_generation_tokens_total"
ARMS = ("control", "candidate")


def server_options(rollout: Path, folder: Path, api_servers: int) -> ServerOptions:
    """A server with a rollout and its endpoints."""
    return ServerOptions(
        arguments=(
            *model_arguments(tiny_model(ModelKind.GLM52)),
            *rollout_arguments(rollout, folder / "state" / "override.json"),
            *("--api-server-count", str(api_servers)),
        ),
        log=folder / "server.log",
        environment={**cpu_environment(), "VLLM_PLUGINS": "kvplugin,kvplugin_endpoints"},
    )


def run_load(url: str, rollout: Path, options: LoadOptions) -> Summary:
    """One run against a server that is up."""
    before = {name: _by_arm(url, name) for name in (PROMPT_TOKENS, GENERATION_TOKENS)}
    run = LoadRun(url, rollout, options)
    log = asyncio.run(run.run())
    for answer in log.answers:
        if answer.status != 200:
            print(f"failed: {answer}", file=sys.stderr)
    grown = {
        name: {arm: count - before[name][arm] for arm, count in _by_arm(url, name).items()}
        for name in (PROMPT_TOKENS, GENERATION_TOKENS)
    }
    return summarize(log, asyncio.run(run.alone()), grown[PROMPT_TOKENS], grown[GENERATION_TOKENS])


def _by_arm(url: str, metric: str) -> dict[str, float]:
    scrape = settled_scrape(url)
    return {arm: scrape.total(metric, arm=arm) for arm in ARMS}


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(prog="python -m integration.ab_load", description=__doc__)
    parser.add_argument("--requests", type=int, default=LoadOptions.requests)
    parser.add_argument("--at-once", type=int, default=LoadOptions.at_once)
    parser.add_argument("--tokens", type=int, default=LoadOptions.tokens)
    parser.add_argument("--api-servers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=LoadOptions.seed)
    given = parser.parse_args()
    options = LoadOptions(requests=given.requests, at_once=given.at_once, tokens=given.tokens, seed=given.seed)
    with tempfile.TemporaryDirectory(prefix="kvplugin-ab-") as name:
        rollout = rollout_file(Path(name))
        with Server(server_options(rollout, Path(name), given.api_servers)) as server:
            summary = run_load(server.url, rollout, options)
    print("\n".join(summary.lines()))
    return 0 if summary.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
