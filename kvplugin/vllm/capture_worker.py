"""Worker methods for ``collective_rpc``: arm a capture, ask for it, fetch its files, let go of it.

They take strings and answer dictionaries, as vLLM's HTTP endpoint asks for; a refusal is ``{"error": [where, found,
allowed]}``, because an exception in a worker may end the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from kvplugin.errors import ArgumentError
from kvplugin.vllm.capture import StepCapture
from kvplugin.vllm.capture_files import CaptureFiles
from kvplugin.vllm.capture_identity import read_identity
from kvplugin.vllm.capture_request import CaptureRequest
from kvplugin.vllm.engine_state import EngineState, engine_state
from kvplugin.vllm.log import logger

Answer = dict[str, Any]


def _answering(method: Callable[..., Answer]) -> Callable[..., Answer]:
    """Turn whatever goes wrong into an answer."""

    @wraps(method)
    def answer(self: CaptureMethods, *args: str) -> Answer:
        try:
            return method(self, *args)
        except ArgumentError as error:
            return {"error": [error.where, error.found, error.allowed]}
        except Exception as error:
            logger.exception("kvplugin: capture: %s", method.__name__)
            return {"error": ["capture", f"{type(error).__name__}: {error}"[:500], "see the worker's log"]}

    return answer


class CaptureMethods:
    """Mixed into a worker. One capture at a time; arming another one lets go of the first, whose owner is told.

    ``owner`` is any text that the client chose; a method that is called with another one leaves the capture alone.
    What the worker must do: call :meth:`step_is_over` after sampling, in the step that ``kvplugin_capture`` is in.
    """

    kvplugin_capture: StepCapture | None = None
    _files: CaptureFiles | None = None
    _wanted: CaptureRequest | None = None
    _owner = ""
    vllm_config: Any
    model_runner: Any

    @_answering
    def kvplugin_capture_arm(self, request: str = "{}", owner: str = "") -> Answer:
        """Wait for a step; ``request`` is the JSON of a :class:`CaptureRequest`."""
        wanted = CaptureRequest.parse(request)
        if not hasattr(getattr(self.model_runner, "input_batch", None), "req_ids"):
            raise ArgumentError("capture", "this model runner does not name its requests", "use model runner V1")
        identity = read_identity(self.vllm_config, self.model_runner.get_model())
        capture = StepCapture(wanted, self.model_runner, identity)
        self._let_go()
        self._wanted, self._owner = wanted, owner
        self.kvplugin_capture = self._engine.capture = capture
        return {"state": "armed", "layers": sorted(capture.layers)}

    @_answering
    def kvplugin_capture_result(self, owner: str = "") -> Answer:
        """What has come of it: ``state`` is ``idle``, ``armed``, ``failed`` (with ``problem``) or ``captured``."""
        self._check_owner(owner)
        capture = self.kvplugin_capture
        if capture is None or self._wanted is None:
            return {"state": "idle"}
        if capture.problem is not None:
            return {"state": "failed", "problem": capture.problem}
        if capture.recorder is None or not capture.over:
            return {"state": "armed", "request": capture.request}
        if self._files is None:
            self._files = CaptureFiles(capture.recorder, capture.identity, self._wanted.limit)
        target, files = capture.recorder.target, self._files
        return {
            "state": "captured",
            "request": target.request,
            "step": target.step,
            "length": target.length,
            "rows": target.rows.stop - target.rows.start,
            "layers": files.written,
            "left_out": files.left_out,
            "files": files.sizes,
        }

    @_answering
    def kvplugin_capture_read(self, name: str, offset: str = "0", owner: str = "") -> Answer:
        """A piece of a captured file, base64 in ``data``; from byte ``offset`` on."""
        self._check_owner(owner)
        if self._files is None:
            raise ArgumentError("capture.read", "there is no capture to read", "ask for the result first")
        if not offset.isdecimal():
            raise ArgumentError("capture.read", f"offset {offset[:20]!r}", "must be a number of bytes")
        return {"data": self._files.read(name, int(offset))}

    @_answering
    def kvplugin_capture_disarm(self, owner: str = "") -> Answer:
        """Stop waiting, and delete what was captured; another owner's capture stays."""
        if owner in (self._owner, ""):
            self._let_go()
        return {"state": "idle"}

    def _let_go(self) -> None:
        if self._files is not None:
            self._files.close()
        self.kvplugin_capture = self._files = self._wanted = self._engine.capture = None
        self._owner = ""

    def _check_owner(self, owner: str) -> None:
        if owner not in (self._owner, "") and self._owner:
            raise ArgumentError("capture", "another capture was armed, and has taken this one's place", "capture again")

    def step_is_over(self, logits: Any, output: Any) -> None:
        """End the captured step.

        Args:
            logits: floating ``[R, V]`` of the batch's requests before sampling changed them, or None.
            output: the runner's output for the step.
        """
        capture = self.kvplugin_capture
        if capture is None or capture.recorder is None:
            return
        place = capture.recorder.target.place
        tokens = getattr(output, "sampled_token_ids", None) or []
        drawn = tokens[place] if place < len(tokens) else []
        row = logits[place] if logits is not None and len(drawn) == 1 else None
        capture.finish(row, int(drawn[0]) if len(drawn) == 1 else None)
        if capture.over:
            self._engine.capture = None  # the hot path is as before; the records stay with the worker

    @property
    def _engine(self) -> EngineState:
        return engine_state(self.vllm_config)
