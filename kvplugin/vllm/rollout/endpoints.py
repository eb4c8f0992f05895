"""Endpoint plugin: the rollout over HTTP, beside vLLM's own API. Loaded only if ``VLLM_PLUGINS`` names it.

    GET /v1/kvplugin/status    what front end and engine have in force
    GET /v1/kvplugin/rollout   the rollout in force, and the override
    PUT /v1/kvplugin/rollout   another override, whole; ``{}`` clears it

Everything under ``/v1`` asks for vLLM's API key where one is set.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse

from kvplugin import __version__
from kvplugin.errors import ConfigError, ConfigProblem
from kvplugin.requests.control import ROLLOUT_ROUTE, STATUS_ROUTE
from kvplugin.requests.override import parse_override
from kvplugin.vllm.log import logger
from kvplugin.vllm.rollout.arm_echo import ArmHeader
from kvplugin.vllm.rollout.front_end import FrontEnd
from kvplugin.vllm.rollout.wrap_input_processor import FRONT_END

MOST_BYTES = 256 << 10
"""Largest override that is read."""
ENGINE_PATIENCE_S = 5.0
WORKER_STATUS = "kvplugin_rollout_status"

router = APIRouter()


class Engine(Protocol):
    """What is used of vLLM's engine client."""

    input_processor: Any

    async def collective_rpc(self, method: str, timeout: float | None = None) -> Sequence[Any]:
        """Call a method of every worker."""


class RolloutEndpoints:
    """What ``vllm.endpoint_plugins`` finds."""

    name = "kvplugin_endpoints"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes, and the header that names a request's arm."""
        app.include_router(router)
        app.add_middleware(ArmHeader)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Remember the engine that the routes speak for."""
        state.kvplugin_engine = engine_client


@router.get(STATUS_ROUTE)
async def status(request: Request) -> JSONResponse:
    """What is in force, in this front end and in the engine's workers."""
    engine: Engine | None = request.app.state.kvplugin_engine
    front_end = _front_end(engine)
    return JSONResponse(
        {
            "version": __version__,
            "rollout": None if front_end is None else front_end.status(),
            "workers": [] if engine is None or front_end is None else await _workers(engine),
        }
    )


@router.get(ROLLOUT_ROUTE)
async def show(request: Request) -> JSONResponse:
    """The rollout in force, and the override that stands over the file."""
    front_end = _front_end(request.app.state.kvplugin_engine)
    if front_end is None:
        return _no_rollout()
    return JSONResponse(await asyncio.to_thread(front_end.describe))


@router.put(ROLLOUT_ROUTE)
async def put(request: Request) -> JSONResponse:
    """Put another override in force."""
    front_end = _front_end(request.app.state.kvplugin_engine)
    if front_end is None:
        return _no_rollout()
    if not front_end.writable:
        return _error(403, "this server's rollout can be read only; set kvplugin.rollout_writable to change it", None)
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MOST_BYTES:
            return _error(413, f"the override is larger than {MOST_BYTES} bytes", None)
    try:
        override = parse_override(body.decode(errors="replace"), "request body")
        found = await asyncio.to_thread(front_end.put, override)
    except ConfigError as error:
        return _error(400, str(error), error.problems)
    except OSError as error:
        logger.exception("kvplugin: the override could not be written")
        return _error(500, f"the override could not be written: {error.strerror}", None)
    return JSONResponse(found)


async def _workers(engine: Engine) -> list[Any]:
    try:
        return list(await asyncio.wait_for(engine.collective_rpc(WORKER_STATUS), ENGINE_PATIENCE_S))
    except Exception as error:
        return [{"problem": f"the engine did not answer: {type(error).__name__}"}]


def _front_end(engine: Engine | None) -> FrontEnd | None:
    return getattr(getattr(engine, "input_processor", None), FRONT_END, None)


def _no_rollout() -> JSONResponse:
    return _error(404, "this server has no rollout; start it with --additional-config.kvplugin.rollout=FILE", None)


def _error(code: int, message: str, problems: Sequence[ConfigProblem] | None) -> JSONResponse:
    """An error in the shape of vLLM's own."""
    param = problems[0].key if problems else None
    body = {"message": message, "type": "BadRequestError" if code < 500 else "InternalServerError"}
    return JSONResponse({"error": {**body, "param": param, "code": code}}, status_code=code)
