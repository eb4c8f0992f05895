from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvplugin.errors import ConfigError, ConfigProblem
from kvplugin.requests.override import (
    Override,
    clear_override,
    default_state_path,
    read_override,
    update_override,
)
from kvplugin.requests.rollout import Rollout
from kvplugin.requests.watch import RolloutWatcher


def text(share: float, **more: object) -> str:
    arms = {"a": {"mode": "observe"}, "b": {"mode": "topology_sparse_merge"}}
    return json.dumps({"arms": arms, "shares": {"a": 1 - share, "b": share}, "default_arm": "a", **more})


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "rollout.yaml"
    path.write_text(text(0.25))
    return path


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state" / "override.json"


Watch = Callable[..., RolloutWatcher]


@pytest.fixture
def watch(base: Path, state: Path) -> Iterator[Watch]:
    made: list[RolloutWatcher] = []

    def make(**arguments: object) -> RolloutWatcher:
        made.append(RolloutWatcher(base, state, **arguments))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for watcher in made:
        watcher.close()


def share(watcher: RolloutWatcher) -> float:
    return watcher.poll().rollout.share("b")


def test_changes_are_followed_and_counted(watch: Watch, base: Path) -> None:
    watcher = watch()
    first = watcher.current
    assert (first.generation, first.rollout.share("b"), watcher.problem) == (1, 0.25, None)
    assert watcher.poll() is first
    base.write_text(text(0.5))
    assert (watcher.poll().generation, share(watcher)) == (2, 0.5)
    base.write_text(text(0.25))
    assert (watcher.poll().generation, watcher.current.digest) == (3, first.digest)


def test_a_comment_changes_nothing(watch: Watch, base: Path) -> None:
    watcher = watch()
    base.write_text(text(0.25) + "\n# the same\n")
    assert watcher.poll().generation == 1


def test_a_bad_file_leaves_the_last_good_one_and_is_told_once(watch: Watch, base: Path) -> None:
    told: list[str] = []
    watcher = watch(on_failure=told.append)
    for bad in ("arms: [", "arms: [", text(2.0)):
        base.write_text(bad)
        assert share(watcher) == 0.25
    assert len(told) == 2
    assert watcher.status()["problem"] is not None
    assert watcher.status()["failures"] == 2
    base.unlink()
    assert share(watcher) == 0.25
    assert "No such file" in str(watcher.problem)
    base.write_text(text(0.75))
    assert share(watcher) == 0.75
    assert watcher.problem is None


def test_the_switch_works_over_a_broken_file(watch: Watch, base: Path, state: Path) -> None:
    watcher = watch()
    base.write_text("broken")
    update_override(state, lambda _: Override(enabled=False))
    found = watcher.poll()
    assert not found.rollout.enabled
    assert found.rollout.share("b") == 0.25
    assert watcher.problem is not None


def test_a_broken_override_keeps_the_last_good_one(watch: Watch, state: Path, base: Path) -> None:
    watcher = watch()
    update_override(state, lambda _: Override(enabled=False))
    watcher.poll()
    state.write_text("{")
    base.write_text(text(0.5))
    found = watcher.poll()
    assert (found.rollout.enabled, found.rollout.share("b")) == (False, 0.5)
    assert watcher.problem is not None
    clear_override(state)
    assert watcher.poll().rollout.enabled


def test_at_the_start_a_bad_override_is_left_aside_and_a_bad_file_is_not(watch: Watch, state: Path, base: Path) -> None:
    state.parent.mkdir()
    state.write_text('{"shares": {"ghost": 1}}')
    watcher = watch()
    assert watcher.current.rollout.share("b") == 0.25
    assert "ghost" in str(watcher.problem)
    base.write_text("broken")
    with pytest.raises(ConfigError):
        watch()


def test_what_the_engine_cannot_follow_is_a_bad_file(watch: Watch, base: Path, state: Path) -> None:
    def check(rollout: Rollout) -> None:
        if rollout.share("b") > 0.6:
            raise ConfigError([ConfigProblem("rollout.shares.b", "too much", "use less")])

    watcher = watch(check=check)
    base.write_text(text(0.75))
    assert share(watcher) == 0.25
    with pytest.raises(ConfigError, match="too much"):
        watcher.set_override(Override(shares={"a": 0.0, "b": 1.0}))
    assert not state.exists()
    assert watcher.set_override(Override(shares={"a": 0.5, "b": 0.5})).rollout.share("b") == 0.5


def test_a_mounted_config_map_is_followed(watch: Watch, tmp_path: Path, base: Path) -> None:
    """Kubernetes moves a link to another folder; the file itself is a link through it."""
    for name, b in (("one", 0.25), ("two", 0.5)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rollout.yaml").write_text(text(b))
        os.utime(tmp_path / name / "rollout.yaml", (1, 1))
    (tmp_path / "..data").symlink_to("one")
    base.unlink()
    base.symlink_to("..data/rollout.yaml")
    watcher = watch()
    (tmp_path / "..new").symlink_to("two")
    (tmp_path / "..new").replace(tmp_path / "..data")
    assert share(watcher) == 0.5


def test_a_thread_follows_within_its_interval(watch: Watch, base: Path) -> None:
    watcher = watch(poll_s=0.01)
    watcher.start()
    base.write_text(text(0.5))
    until = time.monotonic() + 5
    while watcher.current.rollout.share("b") != 0.5:
        assert time.monotonic() < until, "the change was not seen"
        time.sleep(0.005)


def test_readers_never_see_half_a_change(watch: Watch, state: Path) -> None:
    """Shares and policies that are written together are seen together."""
    watcher = watch()
    pairs = [(0.25, 4), (0.75, 8)]
    stop = threading.Event()

    def write() -> None:
        turn = 0
        while not stop.is_set():
            b, sinks = pairs[turn % 2]
            arms = {"b": {"mode": "topology_sparse_merge", "sink_tokens": sinks}}
            watcher.set_override(Override.model_validate({"shares": {"a": 1 - b, "b": b}, "arms": arms}))
            turn += 1

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        seen = set()
        for _ in range(300):
            rollout = watcher.poll().rollout
            seen.add((rollout.share("b"), rollout.arms["b"].sink_tokens))
        stop.set()
        writing.result()
    assert seen <= set(pairs)
    assert watcher.problem is None


def test_no_writer_loses_anothers_change(state: Path) -> None:
    def add(number: int) -> None:
        def change(old: Override) -> Override:
            return old.model_copy(update={"note": f"{old.note or ''}{number};", "enabled": True})

        update_override(state, change)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(add, range(40)))
    note = read_override(state).note
    assert note is not None
    assert sorted(note.split(";")[:-1], key=int) == [str(n) for n in range(40)]
    assert state.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in state.parent.iterdir() if path.suffix != ".lock"] == [state.name], "drafts remain"


def test_an_empty_override_leaves_no_file(state: Path) -> None:
    update_override(state, lambda _: Override(enabled=False))
    assert state.exists()
    update_override(state, lambda _: Override())
    assert not state.exists()
    clear_override(state)


def test_a_change_that_is_refused_leaves_the_old_one(state: Path) -> None:
    update_override(state, lambda _: Override(enabled=False))

    def refuse(_: Override) -> Override:
        raise ConfigError([ConfigProblem("a", "b", "c")])

    with pytest.raises(ConfigError):
        update_override(state, refuse)
    assert read_override(state).enabled is False


def test_each_rollout_file_has_a_state_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVPLUGIN_STATE_DIR", str(tmp_path))
    one, two = default_state_path(Path("/etc/one.yaml")), default_state_path(Path("/etc/two.yaml"))
    assert one != two
    assert one.parent == two.parent == tmp_path
    assert default_state_path(Path("/etc/../etc/one.yaml")) == one
    monkeypatch.delenv("KVPLUGIN_STATE_DIR")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    assert default_state_path(Path("/etc/one.yaml")).parent == tmp_path / "xdg" / "kvplugin"
