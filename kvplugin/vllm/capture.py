"""One armed capture in one worker: waits for its step, lends the step's layers a recorder, and keeps the records."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from kvplugin.errors import ArgumentError
from kvplugin.vllm.capture_identity import EngineIdentity
from kvplugin.vllm.capture_recorder import IndexerRows, LayerStep, StepRecorder
from kvplugin.vllm.capture_request import ALL, CaptureRequest
from kvplugin.vllm.capture_target import NeverComes, running_request, target_rows
from kvplugin.vllm.log import logger

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata


class StepCapture:
    """Waits for one step of one request. It never disturbs the engine: what goes wrong here becomes :attr:`problem`.

    Args:
        wanted: what to capture.
        runner: the worker's model runner; it knows the requests of a batch.
        identity: of the engine.

    Attributes:
        layers: numbers of the layers that are captured.
        request: the engine's id of the request, once it has been seen.
        recorder: the step's recorder, once the step has come.
        problem: why nothing more will come.
        over: the step is over.

    Raises:
        ArgumentError: a layer is not one that can be captured.
    """

    def __init__(self, wanted: CaptureRequest, runner: Any, identity: EngineIdentity) -> None:
        known = identity.rotations.keys()
        self.layers: frozenset[int] = frozenset(known if wanted.layers == ALL else wanted.layers)
        unknown = sorted(self.layers - known)
        if unknown or not known:
            held = f"this worker holds layers {min(known)} to {max(known)}" if known else "no layer runs on our backend"
            raise ArgumentError("capture.layers", f"got {unknown or wanted.layers}", held)
        self._wanted, self._runner, self.identity = wanted, runner, identity
        self.request: str | None = None
        self.recorder: StepRecorder | None = None
        self.problem: str | None = None
        self.over = False
        self._batch: Tensor | None = None

    @property
    def in_step(self) -> bool:
        """The step that was waited for is running."""
        return self.recorder is not None and not self.over

    def begin_step(self, common: CommonAttentionMetadata) -> GuardedRecorder | None:
        """The recorder for a batch that is being described, or None where it is not the step that is waited for.

        Leaders, followers and indexers describe one batch each for themselves.
        """
        if common.query_start_loc is not self._batch:
            self._batch = common.query_start_loc
            with self.unharmed():
                self._look(common)
        return GuardedRecorder(self) if self.in_step and self.problem is None else None

    def finish(self, logits: Tensor | None, token: int | None) -> None:
        """The step is over.

        Args:
            logits: floating ``[V]``, what the request's next token was drawn from; None where it drew none.
            token: the one drawn.
        """
        if self.recorder is None or self.over:
            return
        self.over = True
        with self.unharmed():
            if logits is not None and token is not None and self.recorder.target.samples:
                self.recorder.add_log_prob(float(logits.float().log_softmax(-1)[token]))

    @contextmanager
    def unharmed(self) -> Iterator[None]:
        """Turn an exception into :attr:`problem`."""
        try:
            yield
        except NeverComes as reason:
            self.problem = str(reason)
        except Exception as error:
            logger.exception("kvplugin: capture: gave up")
            self.problem = f"{type(error).__name__}: {error}"

    def _look(self, common: CommonAttentionMetadata) -> None:
        if self.recorder is not None:  # a later batch, which nothing ended the step before
            self.over = True
            return
        self.request = self.request or running_request(self._wanted, self._runner)
        if self.request is None:
            return
        target = target_rows(self._wanted, self.request, self._runner, common)
        if target is not None:
            self.recorder = StepRecorder(target, self.layers, self.identity, self._wanted.limit)


class GuardedRecorder:
    """A capture's recorder as the forward pass sees it: it raises nothing."""

    def __init__(self, capture: StepCapture) -> None:
        assert capture.recorder is not None
        self._capture, self._recorder = capture, capture.recorder
        self.target = self._recorder.target

    def within(self, rows: slice) -> slice | None:
        """See :class:`StepRecorder`."""
        return self._recorder.within(rows)

    def indexer(self, layer: int, rows: IndexerRows, keys: Tensor) -> None:
        """See :class:`StepRecorder`."""
        with self._capture.unharmed():
            self._recorder.indexer(layer, rows, keys)

    def attention(self, step: LayerStep) -> None:
        """See :class:`StepRecorder`."""
        with self._capture.unharmed():
            self._recorder.attention(step)
