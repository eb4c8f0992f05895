"""What is in force, kept up to date from two files: the rollout and the override over it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from kvplugin.errors import ConfigError
from kvplugin.requests.override import Override, read_override, update_override
from kvplugin.requests.rollout import Rollout, read_rollout

logger = logging.getLogger(__name__)

POLL_S = 0.2


@dataclass(frozen=True)
class InForce:
    """What a process goes by until the next change.

    Attributes:
        rollout: the file's, with the override over it.
        generation: 1, then one more with each change; a count of this process alone.
        digest: of the rollout; equal in all processes that have the same in force.
        override: what stands over the file.
    """

    rollout: Rollout
    generation: int
    digest: str
    override: Override


class RolloutWatcher:
    """Looks at both files now and then, by content: symbolic links that move and times that lie are no matter.

    A file that turns bad, or goes away, leaves its last good content in force; the other one is still followed, so that
    the kill switch works over a broken rollout file. A bad override at the start is left aside and reported: the server
    has to start.

    Args:
        base: the rollout file.
        state: the override's file, which need not exist.
        check: raises ConfigError for a rollout that this engine cannot follow.
        poll_s: seconds between two looks, once started.
        on_failure: called with each new problem; must not raise.

    Attributes:
        current: what is in force; replaced, never changed.
        problem: what is wrong with the files as they are now; None = nothing.
        failures: problems so far.

    Raises:
        ConfigError: the rollout file is bad.
    """

    def __init__(
        self,
        base: Path,
        state: Path,
        *,
        check: Callable[[Rollout], None] = lambda rollout: None,
        poll_s: float = POLL_S,
        on_failure: Callable[[str], None] = lambda problem: None,
    ) -> None:
        self.base, self.state = base, state
        self._check, self._poll_s, self._on_failure = check, poll_s, on_failure
        self.problem: str | None = None
        self.failures = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._good_base, self._good_override = read_rollout(self.base), Override()
        self._check(self._good_base)
        self.current = InForce(self._good_base, 1, digest_of(self._good_base), self._good_override)
        rollout = self._look()
        self.current = InForce(rollout, 1, digest_of(rollout), self._good_override)

    def start(self) -> None:
        """Look every ``poll_s`` seconds from a daemon thread, until :meth:`close`."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="kvplugin-rollout", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop looking; what is in force stays."""
        self._stop.set()

    def poll(self) -> InForce:
        """Look now. Thread-safe."""
        with self._lock:
            rollout, before = self._look(), self.current
            digest = digest_of(rollout)
            if digest != before.digest or self._good_override != before.override:
                generation = before.generation + int(digest != before.digest)
                self.current = InForce(rollout, generation, digest, self._good_override)
            return self.current

    def set_override(self, override: Override) -> InForce:
        """Put an override in the place of the one before, and in force here at once.

        Where it says nothing of the guard, arms that fell back stay so.

        Raises:
            ConfigError: the rollout would be bad with it, or one that this engine cannot follow.
            OSError: it cannot be written.
        """

        def change(old: Override) -> Override:
            guard = (old if override.guard is None else override).guard or None
            new = override.model_copy(update={"guard": guard})
            self._check(new.over(self._good_base))
            return new

        update_override(self.state, change)
        return self.poll()

    def status(self) -> dict[str, Any]:
        """What is in force, where it comes from and what is wrong with it; JSON-able."""
        current, override = self.current, self.current.override
        return {
            "generation": current.generation,
            "digest": current.digest,
            "enabled": current.rollout.enabled,
            "arms": {name: str(policy.mode) for name, policy in current.rollout.arms.items()},
            "shares": {name: current.rollout.share(name) for name in current.rollout.arms},
            "default_arm": current.rollout.default,
            "guard": {name: trip.model_dump(mode="json") for name, trip in (override.guard or {}).items()},
            "override": None if override.is_empty else override.model_dump(mode="json", exclude_none=True),
            "file": str(self.base),
            "override_file": str(self.state),
            "problem": self.problem,
            "failures": self.failures,
        }

    def _watch(self) -> None:
        while not self._stop.wait(self._poll_s):
            try:
                self.poll()
            except Exception:
                logger.exception("kvplugin: looking at the rollout failed; what is in force stays")

    def _look(self) -> Rollout:
        """What is to be in force; keeps the last good contents, and :attr:`problem`."""
        problems: list[str] = []
        try:
            base = read_rollout(self.base)
            self._check(base)
            self._good_base = base
        except ConfigError as error:
            problems.append(str(error))
        try:
            override = read_override(self.state)
            rollout = override.over(self._good_base)
            self._check(rollout)
            self._good_override = override
        except ConfigError as error:
            problems.append(str(error))
            rollout = self._with_good_override()
        self._note("\n".join(problems) or None)
        return rollout

    def _with_good_override(self) -> Rollout:
        """The last good contents together, or what is in force where even these do not go together."""
        try:
            rollout = self._good_override.over(self._good_base)
            self._check(rollout)
        except ConfigError:
            return self.current.rollout
        return rollout

    def _note(self, problem: str | None) -> None:
        if problem == self.problem:
            return
        self.problem = problem
        if problem is None:
            logger.info("kvplugin: the rollout is good again")
            return
        self.failures += 1
        logger.error("kvplugin: the rollout is bad, the last good one stays in force: %s", problem)
        self._on_failure(problem)


def digest_of(rollout: Rollout) -> str:
    """Digest of what a rollout says; 16 hexadecimal digits."""
    return sha256(rollout.model_dump_json().encode()).hexdigest()[:16]
