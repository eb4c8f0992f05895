"""The runtime override: what an operator set while the server runs. A small file that stands over the rollout file."""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from kvplugin.config import MOST_ARMS, Mode, Settings, validated
from kvplugin.errors import ConfigError, ConfigProblem
from kvplugin.requests.guard import ArmName, GuardTrip
from kvplugin.requests.rollout import Arms, Rollout, Shares, rollout_of
from kvplugin.requests.text import read_mapping

ROOT = "override"
STATE_VARIABLE = "KVPLUGIN_STATE_DIR"


class Override(Settings):
    """What differs from the rollout file; whatever is null stays as the file has it."""

    enabled: bool | None = None
    """The kill switch."""
    arms: Annotated[Arms, Field(max_length=MOST_ARMS)] | None = None
    """Arms to add, or to put in the place of those of the same name."""
    shares: Annotated[Shares, Field(min_length=1)] | None = None
    """All shares, in the place of the file's."""
    default_arm: ArmName | None = None
    """The default arm."""
    guard: dict[ArmName, GuardTrip] | None = None
    """Arms whose policy the guard took away, until they are re-armed."""
    note: Annotated[str, Field(max_length=500)] | None = None
    """Why, for whoever looks at the status."""
    set_at: datetime | None = None
    """When it was set."""

    @property
    def is_empty(self) -> bool:
        """True where nothing stands over the file."""
        return all(
            value is None for value in (self.enabled, self.arms, self.shares, self.default_arm, self.guard or None)
        )

    def over(self, base: Rollout) -> Rollout:
        """The rollout that results.

        Raises:
            ConfigError: it does not fit together.
        """
        raw: dict[str, Any] = base.model_dump(mode="python")
        if self.arms is not None:
            raw["arms"] = {**raw["arms"], **{name: arm.model_dump() for name, arm in self.arms.items()}}
        arms = raw["arms"]
        # All at once: one arm's fallback may be another arm that fell back itself.
        raw["arms"] = arms | {name: _fallen_back(arms, name, trip) for name, trip in self._trips(arms)}
        for name in ("enabled", "shares", "default_arm"):
            if getattr(self, name) is not None:
                raw[name] = getattr(self, name)
        return rollout_of(raw)

    def _trips(self, arms: Mapping[str, Any]) -> list[tuple[str, GuardTrip]]:
        """Of arms that are still there: a rollout file may go on without them."""
        return [(name, trip) for name, trip in (self.guard or {}).items() if name in arms]

    def stamped(self) -> Override:
        """The same, set now."""
        return self.model_copy(update={"set_at": datetime.now(UTC).replace(microsecond=0)})


def _fallen_back(arms: Mapping[str, Any], name: str, trip: GuardTrip) -> dict[str, Any]:
    """The policy that an arm falls back to."""
    if trip.fallback is not None and trip.fallback != name and trip.fallback in arms:
        fallback: dict[str, Any] = arms[trip.fallback]
        return fallback
    return {**arms[name], "mode": Mode.OBSERVE}


def parse_override(text: str, source: str) -> Override:
    """Read an override, YAML or JSON.

    Raises:
        ConfigError: listing everything that is wrong with it.
    """
    return validated(Override, read_mapping(text, source), ROOT, "shares")


def default_state_path(rollout: Path) -> Path:
    """Where the override of a rollout file is kept if nobody says: one place per file and user."""
    folder = os.environ.get(STATE_VARIABLE)
    state = Path(folder) if folder else Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state") / "kvplugin"
    # The path as it is called, not what it leads to: a mounted ConfigMap leads elsewhere after each change.
    name = sha256(os.path.abspath(rollout).encode()).hexdigest()[:16]
    return state.expanduser() / f"rollout-{name}.json"


def read_override(path: Path) -> Override:
    """The override kept in a file; an empty one where there is none.

    Raises:
        ConfigError: the file cannot be read, or is bad.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return Override()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([ConfigProblem(str(path), f"cannot be read: {error}", "make it readable")]) from None
    return parse_override(text, str(path))


def update_override(path: Path, change: Callable[[Override], Override]) -> Override:
    """Change the override; whoever reads the file sees the old or the new one, and no two writers lose a change.

    Args:
        path: the file; missing folders are made.
        change: gives the new override for the old one; what it raises leaves the file as it was.

    Raises:
        OSError: the file cannot be written.
        ConfigError: the old one is bad; :func:`clear_override` removes it.
    """
    with _locked(path):
        new = change(read_override(path))
        if new.is_empty and new.note is None:
            path.unlink(missing_ok=True)
            return Override()
        new = new.stamped()
        _replace(path, new.model_dump_json(exclude_none=True, indent=2) + "\n")
        return new


def clear_override(path: Path) -> None:
    """Remove the override, good or bad.

    Raises:
        OSError: the file cannot be removed.
    """
    with _locked(path):
        path.unlink(missing_ok=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # A file of its own: the override itself is replaced, and a lock would stay with the one that is gone.
    with path.with_name(path.name + ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _replace(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with os.fdopen(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
