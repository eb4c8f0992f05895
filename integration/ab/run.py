"""The load run: traffic while shares change, the switch is pulled, a bad file is written, and a client leaves."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from integration.ab.traffic import Answered, Asked, Traffic, in_parallel

ARMS: Mapping[str, Any] = {
    "control": {"mode": "observe"},
    "candidate": {"mode": "topology_sparse_merge"},
    "scratch": {"mode": "topology_sparse_merge", "sink_tokens": 2},
}
"""``scratch`` has no share; the client that aborts asks for it, so that the other arms can be counted exactly."""
SHARES = (0.05, 0.25, 0.5, 0.75, 1.0, 0.3)
"""Of the candidate: at the start, and after each of five changes."""
IN_FORCE_S = 1.0
"""The delay that is promised between an override and the first step it reaches."""
SETTLED_S = 1.0
"""After which a request that was sent has its arm, on a loaded machine too."""
ROUTE = "/v1/kvplugin/rollout"


@dataclass(frozen=True)
class LoadOptions:
    """How much of everything."""

    requests: int = 300
    at_once: int = 16
    tokens: int = 12
    prompts: int = 16
    seed: int = 0
    key: str | None = None

    @property
    def headers(self) -> dict[str, str]:
        """With the server's API key, if it has one."""
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}


@dataclass
class LoadLog:
    """What happened.

    Attributes:
        answers: of all requests but the aborted ones.
        off: when the switch was pulled (the time at which that was asked) and released (asked, answered).
        aborted: streams that were left.
        failures: of the reload counter before and after the bad file, as status shows it.
    """

    answers: list[Answered] = field(default_factory=list)
    off: list[tuple[float, float, float]] = field(default_factory=list)
    aborted: int = 0
    bad_files: int = 0


def rollout_text(candidate: float) -> str:
    """A rollout file."""
    shares = {"control": 1 - candidate, "candidate": candidate, "scratch": 0}
    return json.dumps({"arms": ARMS, "shares": shares, "default_arm": "control"})


def prompts(count: int, seed: int) -> list[str]:
    """Texts of 40 to 400 characters, a byte tokenizer's tokens; some begin alike."""
    draw = random.Random(seed)
    letters = "abcdefghijklmnopqrstuvwxyz     "
    stem = "".join(draw.choice(letters) for _ in range(60))
    texts = ["".join(draw.choice(letters) for _ in range(draw.randrange(40, 340))) for _ in range(count)]
    return [stem + text if place % 2 else text for place, text in enumerate(texts)]


class LoadRun:
    """One run against one server whose rollout file is at hand."""

    def __init__(self, url: str, file: Path, options: LoadOptions) -> None:
        self._url, self._file, self._options = url, file, options
        self._traffic = self._new_traffic()
        self._draw = random.Random(options.seed)
        self._todo = options.requests
        self._candidate = SHARES[0]
        self._open = asyncio.Event()
        self.log = LoadLog()

    async def run(self) -> LoadLog:
        """Send everything while the script runs.

        Raises:
            TimeoutError: a change is not in force in time.
        """
        self._open.set()
        over = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            aborting = group.create_task(self._abort(over))
            changing = group.create_task(self._change())
            await in_parallel(self._options.at_once, self._send)
            await changing
            over.set()
            await aborting
        await self._traffic.close()
        return self.log

    async def alone(self) -> dict[tuple[int, str], tuple[int, ...]]:
        """Tokens of every prompt by every arm, each asked alone on an idle server."""
        traffic, found = self._new_traffic(), {}
        for prompt in range(self._options.prompts):
            for arm in ("control", "candidate"):
                answer = await traffic.ask(Asked(prompt, None, False, arm, {}))
                found[prompt, arm] = answer.tokens
        await traffic.close()
        return found

    def _new_traffic(self) -> Traffic:
        options = self._options
        return Traffic(self._url, prompts(options.prompts, options.seed), options.tokens, options.headers)

    def _client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self._url, timeout=30, trust_env=False, headers=self._options.headers)

    async def _send(self) -> None:
        while self._todo:
            self._todo -= 1
            await self._open.wait()
            candidate = self._candidate
            asked = Asked(
                self._draw.randrange(self._options.prompts),
                f"session-{self._draw.randrange(60)}" if self._draw.random() < 0.8 else None,
                self._draw.random() < 0.3,
                None,
                {"control": 1 - candidate, "candidate": candidate, "scratch": 0},
            )
            self.log.answers.append(await self._traffic.ask(asked))

    async def _abort(self, over: asyncio.Event) -> None:
        draw = random.Random(self._options.seed + 1)
        while not over.is_set():
            await self._traffic.abort("scratch", draw)
            self.log.aborted += 1
            await asyncio.sleep(draw.uniform(0, 0.3))

    async def _change(self) -> None:
        """Changes at even distances over the requests: five of shares, two pulls of the switch, one bad file."""
        steps = [*(("share", share) for share in SHARES[1:])]
        steps.insert(2, ("switch", 0.0))
        steps.insert(4, ("bad", 0.0))
        steps.insert(6, ("switch", 0.0))
        for place, (kind, share) in enumerate(steps, start=1):
            await self._sent(place * self._options.requests // (len(steps) + 1))
            if kind == "share":
                await self._move(share)
            elif kind == "bad":
                await self._break()
            else:
                await self._pull()

    async def _sent(self, count: int) -> None:
        while self._options.requests - self._todo < count:
            await asyncio.sleep(0.01)

    async def _move(self, candidate: float) -> None:
        """New requests wait until every front end has the new shares; those under way go on."""
        self._open.clear()
        await asyncio.sleep(SETTLED_S)
        replace(self._file, rollout_text(candidate))
        await self._until(lambda status: abs(status["shares"]["candidate"] - candidate) < 1e-9)
        self._candidate = candidate
        self._open.set()

    async def _break(self) -> None:
        replace(self._file, "arms: [")
        await self._until(lambda status: status["problem"] is not None)
        self.log.bad_files += 1
        await asyncio.sleep(0.5)
        replace(self._file, rollout_text(self._candidate))
        await self._until(lambda status: status["problem"] is None)

    async def _pull(self) -> None:
        async with self._client() as client:
            pulled = time.monotonic()
            (await client.put(ROUTE, json={"enabled": False, "note": "load test"})).raise_for_status()
            await asyncio.sleep(2 * IN_FORCE_S)
            released = time.monotonic()
            (await client.put(ROUTE, json={})).raise_for_status()
            self.log.off.append((pulled, released, time.monotonic()))

    async def _until(self, holds: Any) -> None:
        """Ask for the status until it holds a dozen times in a row: there may be several front ends."""
        async with self._client() as client:
            until, row = time.monotonic() + 20, 0
            while row < 12:
                status = (await client.get("/v1/kvplugin/status", headers={"Connection": "close"})).json()["rollout"]
                row = row + 1 if holds(status) else 0
                if time.monotonic() > until:
                    raise TimeoutError(f"not in force after 20 s: {status}")
                await asyncio.sleep(0.02)


def replace(path: Path, text: str) -> None:
    """As editors and mounts do it: the file is there at all times, old or new."""
    draft = path.with_suffix(".draft")
    draft.write_text(text)
    draft.replace(path)


def rollout_file(folder: Path) -> Path:
    """Write the rollout file of a run into a folder."""
    path = folder / "rollout.yaml"
    replace(path, rollout_text(SHARES[0]))
    return path
