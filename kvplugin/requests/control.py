"""Two ways to a rollout's override: its file, or a running server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, Request, build_opener

from kvplugin.errors import ConfigError, KvpluginError
from kvplugin.requests.override import Override, clear_override, read_override, update_override
from kvplugin.requests.rollout import Rollout, read_rollout, rollout_of

ROLLOUT_ROUTE, STATUS_ROUTE = "/v1/kvplugin/rollout", "/v1/kvplugin/status"
PATIENCE_S = 30.0


class ControlFailed(KvpluginError):
    """The server could not be asked, or refused; the text says why."""


@dataclass(frozen=True)
class View:
    """What is in force.

    Attributes:
        rollout: with the override over it.
        override: what stands over the file.
        problem: what is wrong with the files, if anything.
        source: where all this comes from.
        workers: what each worker of the asked engine goes by; nothing where a file was asked.
    """

    rollout: Rollout
    override: Override
    problem: str | None
    source: str
    workers: tuple[Mapping[str, Any], ...] = ()


class Control(Protocol):
    """A way to the override."""

    def view(self) -> View:
        """What is in force."""

    def change(self, change: Callable[[Rollout, Override], Override]) -> View:
        """Put another override in force, made from the rollout in force and the override before."""

    def clear(self) -> View:
        """Take the override away."""


class FileControl:
    """Changes the override's file; every server over it follows within a second.

    Args:
        rollout: the rollout file.
        state: the override's.
    """

    def __init__(self, rollout: Path, state: Path) -> None:
        self._rollout, self._state = rollout, state

    def view(self) -> View:
        """See :class:`Control`; a bad override is a problem, a bad rollout file an error.

        Raises:
            ConfigError: the rollout file is bad.
        """
        base = read_rollout(self._rollout)
        try:
            override = read_override(self._state)
            return View(override.over(base), override, None, f"{self._rollout}, {self._state}")
        except ConfigError as error:
            return View(base, Override(), str(error), f"{self._rollout}, {self._state}")

    def change(self, change: Callable[[Rollout, Override], Override]) -> View:
        """See :class:`Control`.

        Raises:
            ConfigError: the rollout would be bad with it, or is bad.
            ControlFailed: the file cannot be written.
        """
        base = read_rollout(self._rollout)

        def checked(old: Override) -> Override:
            new = change(old.over(base), old)
            new.over(base)
            return new

        with _writing(self._state):
            update_override(self._state, checked)
        return self.view()

    def clear(self) -> View:
        """See :class:`Control`.

        Raises:
            ControlFailed: the file cannot be removed.
        """
        with _writing(self._state):
            clear_override(self._state)
        return self.view()


class ServerControl:
    """Asks a server that has the endpoint plugin; proxies are left aside.

    Args:
        url: of the server.
        key: its API key, if it has one.
    """

    def __init__(self, url: str, key: str | None) -> None:
        self._url, self._key = url.rstrip("/"), key
        self._opener = build_opener(ProxyHandler({}))

    def view(self) -> View:
        """See :class:`Control`.

        Raises:
            ControlFailed: the server does not answer, or has no rollout.
        """
        found, status = self._ask("GET", ROLLOUT_ROUTE), self._ask("GET", STATUS_ROUTE)
        override = Override.model_validate(found["override"] or {})
        problem, workers = status["rollout"]["problem"], tuple(status["workers"])
        return View(rollout_of(found["rollout"]), override, problem, self._url, workers)

    def change(self, change: Callable[[Rollout, Override], Override]) -> View:
        """See :class:`Control`.

        Raises:
            ControlFailed: the server does not answer, or refuses; the text is its own.
        """
        now = self.view()
        new = change(now.rollout, now.override)
        body = new.model_dump(mode="json", exclude_none=True, exclude={"set_at", "guard"})
        if new.guard != now.override.guard:
            # Left out otherwise: the guard may have acted since this override was read.
            body["guard"] = new.model_dump(mode="json")["guard"] or {}
        self._ask("PUT", ROLLOUT_ROUTE, body)
        return self.view()

    def clear(self) -> View:
        """See :class:`Control`.

        Raises:
            ControlFailed: the server does not answer, or refuses.
        """
        self._ask("PUT", ROLLOUT_ROUTE, {"guard": {}})
        return self.view()

    def _ask(self, method: str, route: str, body: Any = None) -> Any:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        data = None if body is None else json.dumps(body).encode()
        request = Request(self._url + route, data, headers, method=method)
        try:
            with self._opener.open(request, timeout=PATIENCE_S) as answer:
                return json.load(answer)
        except HTTPError as error:
            raise ControlFailed(f"{self._url}: {_reason(error)}") from None
        except (URLError, OSError, ValueError) as error:
            raise ControlFailed(f"{self._url}: {getattr(error, 'reason', error)}; is a server there?") from None


def _reason(error: HTTPError) -> str:
    text = error.read(1 << 16).decode(errors="replace")
    if error.code == 404 and "kvplugin" not in text:
        return "no such route; start the server with VLLM_PLUGINS=kvplugin,kvplugin_endpoints"
    if error.code == 401:
        return "wants an API key; give --api-key or VLLM_API_KEY"
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {error.code}: {text[:200]}"


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turns an error of the file system into one that names the file and the cure."""
    try:
        yield
    except OSError as error:
        cure = "make it writable, or name another with --state"
        raise ControlFailed(f"{path}: {error.strerror}; {cure}") from None
