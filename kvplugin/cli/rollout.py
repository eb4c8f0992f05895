"""``kvplugin rollout``: what is in force, and changing it while the server runs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from kvplugin.cli.rollout_compare import compare
from kvplugin.errors import ArgumentError
from kvplugin.requests.control import Control, FileControl, ServerControl, View
from kvplugin.requests.override import Override, default_state_path
from kvplugin.requests.rollout import Rollout, parse_rollout

app = typer.Typer(no_args_is_help=True, help="Shares, kill switch and comparison of the arms of a rollout.")
app.command("compare")(compare)

URL = typer.Option(None, "--url", help="A server with VLLM_PLUGINS=kvplugin,kvplugin_endpoints.")
KEY = typer.Option(None, "--api-key", envvar="VLLM_API_KEY", help="The server's API key.")
FILE = typer.Option(None, "--file", help="Or the rollout file, where the server's files are at hand.")
STATE = typer.Option(None, "--state", help="With --file: the override, if the server names one.")
NOTE = typer.Option(None, "--note", help="Why, for the status.")
JSON = typer.Option(False, "--json", help="Print JSON.")


def control_of(url: str | None, key: str | None, file: Path | None, state: Path | None) -> Control:
    """The way to the override that the options name.

    Raises:
        BadParameter: none, or two.
    """
    if (url is None) == (file is None):
        raise typer.BadParameter("give --url of a server, or --file of its rollout")
    if url is not None:
        return ServerControl(url, key)
    assert file is not None
    return FileControl(file, default_state_path(file) if state is None else state)


def as_json(view: View) -> dict[str, Any]:
    """A view as plain data."""
    rollout = view.rollout
    return {
        "enabled": rollout.enabled,
        "default_arm": rollout.default,
        "key": str(rollout.key),
        "arms": {
            name: {"share": rollout.share(name), "policy": policy.model_dump(mode="json", exclude_defaults=True)}
            for name, policy in rollout.arms.items()
        },
        "override": view.override.model_dump(mode="json", exclude_none=True),
        "problem": view.problem,
        "source": view.source,
        "workers": [dict(worker) for worker in view.workers],
    }


def render(view: View) -> Table:
    """A view for people."""
    rollout, override = view.rollout, view.override
    switch = "enabled" if rollout.enabled else "SWITCHED OFF: every arm selects as without the plugin"
    lines = [switch, f"from {view.source}"]
    set_ = override.model_dump(exclude_none=True, exclude={"note", "set_at", "guard"})
    if set_:
        why = f" ({override.note})" if override.note else ""
        lines.append(f"override of {', '.join(set_)}, set at {override.set_at}{why}")
    for name, trip in (override.guard or {}).items():
        lines.append(f"GUARD: {name} fell back to {trip.fallback or 'observe'} at {trip.at}: {trip.reason}")
    if view.problem:
        lines.append(f"PROBLEM: {view.problem}")
    lines += [f"worker {number}: {_worker(worker)}" for number, worker in enumerate(view.workers)]
    table = Table(title="\n".join(lines), title_justify="left", title_style="", caption_justify="left")
    for heading in ("arm", "share", "mode", "settings"):
        table.add_column(heading)
    for name, policy in rollout.arms.items():
        settings = policy.model_dump(mode="json", exclude_defaults=True, exclude={"mode"})
        default = " (default)" if name == rollout.default else ""
        shown = ", ".join(f"{key}={value}" for key, value in settings.items()) or "-"
        table.add_row(f"{name}{default}", f"{rollout.share(name):.4g}", str(policy.mode), shown)
    return table


def _worker(worker: Any) -> str:
    if "problem" in worker:
        return str(worker["problem"])
    if not worker.get("generation"):
        return "no step has run yet"
    return f"rollout {worker['digest']}, {'enabled' if worker['enabled'] else 'switched off'}"


def _print(view: View, as_text: bool) -> None:
    if as_text:
        Console().print(render(view))
    else:
        typer.echo(json.dumps(as_json(view), indent=2))


@app.command(epilog="Example: kvplugin rollout show --url http://127.0.0.1:8000")
def show(
    url: str | None = URL, key: str | None = KEY, file: Path | None = FILE, state: Path | None = STATE,
    json_: bool = JSON,
) -> None:  # fmt: skip
    """What is in force: arms, shares, the switch, the override, and what is wrong."""
    _print(control_of(url, key, file, state).view(), not json_)


@app.command(
    "set",
    epilog="Examples: kvplugin rollout set candidate=0.05 --url URL; kvplugin rollout set a=0.5 b=0.5 --file F",
)
def set_shares(
    shares: list[str] = typer.Argument(..., help="ARM=SHARE; what is left goes to the default arm."),
    url: str | None = URL, key: str | None = KEY, file: Path | None = FILE, state: Path | None = STATE,
    note: str | None = NOTE, json_: bool = JSON,
) -> None:  # fmt: skip
    """Change the shares; running requests keep their arms."""
    wanted = dict(map(_share, shares))
    if len(wanted) < len(shares):
        raise typer.BadParameter("an arm is given twice", param_hint="SHARES")

    def change(rollout: Rollout, old: Override) -> Override:
        given = dict(wanted)
        given.setdefault(rollout.default, round(1 - math.fsum(wanted.values()), 12))
        if given[rollout.default] < 0:
            total = math.fsum(wanted.values())
            raise ArgumentError("kvplugin rollout set", f"shares add up to {total:.6g}", "give at most 1 in all")
        return Override.model_validate(
            {**old.model_dump(exclude_none=True), "shares": given, "note": note if note is not None else old.note}
        )

    _print(control_of(url, key, file, state).change(change), not json_)


@app.command(epilog="Example: kvplugin rollout disable --url http://127.0.0.1:8000 --note 'quality alarm'")
def disable(
    url: str | None = URL, key: str | None = KEY, file: Path | None = FILE, state: Path | None = STATE,
    note: str | None = NOTE, json_: bool = JSON,
) -> None:  # fmt: skip
    """Pull the kill switch: within a second every arm selects as without the plugin, running requests too."""
    _switch(False, control_of(url, key, file, state), note, json_)


@app.command(epilog="Example: kvplugin rollout enable --file rollout.yaml")
def enable(
    url: str | None = URL, key: str | None = KEY, file: Path | None = FILE, state: Path | None = STATE,
    note: str | None = NOTE, json_: bool = JSON,
) -> None:  # fmt: skip
    """Release the kill switch, whatever the rollout file says."""
    _switch(True, control_of(url, key, file, state), note, json_)


def _switch(on: bool, control: Control, note: str | None, json_: bool) -> None:
    def change(rollout: Rollout, old: Override) -> Override:
        return old.model_copy(update={"enabled": on, "note": note if note is not None else old.note})

    _print(control.change(change), not json_)


@app.command(epilog="Example: kvplugin rollout rearm candidate --url http://127.0.0.1:8000")
def rearm(
    arms: list[str] = typer.Argument(None, metavar="[ARM]...", help="Arms that fell back; default all."),
    url: str | None = URL, key: str | None = KEY, file: Path | None = FILE, state: Path | None = STATE,
    json_: bool = JSON,
) -> None:  # fmt: skip
    """Give arms back the policy that the guard took away; it watches them afresh."""

    def change(_: Rollout, old: Override) -> Override:
        fallen = old.guard or {}
        for arm in arms or ():
            if arm not in fallen:
                known = ", ".join(fallen) or "none has fallen back"
                raise ArgumentError("kvplugin rollout rearm", f"{arm!r} has not fallen back", f"use {known}")
        left = {name: trip for name, trip in fallen.items() if arms and name not in arms}
        return old.model_copy(update={"guard": left or None})

    _print(control_of(url, key, file, state).change(change), not json_)


@app.command(epilog="Example: kvplugin rollout clear --file rollout.yaml --state override.json")
def clear(
    url: str | None = URL, key: str | None = KEY, file: Path | None = FILE, state: Path | None = STATE,
    json_: bool = JSON,
) -> None:  # fmt: skip
    """Take the override away: the rollout file alone is in force, and arms that fell back have their policies again."""
    _print(control_of(url, key, file, state).clear(), not json_)


@app.command(epilog="Example: kvplugin rollout validate rollout.yaml --top-k 2048")
def validate(
    file: Path = typer.Argument(..., exists=True, dir_okay=False, help="A rollout file."),
    top_k: int | None = typer.Option(None, "--top-k", min=1, help="Also check it against an engine's index_topk."),
    before_topk: bool = typer.Option(False, "--before-topk", help="With --top-k: for placement before_topk."),
    json_: bool = JSON,
) -> None:
    """Check a rollout file; says everything that is wrong with it."""
    rollout = parse_rollout(file.read_text(encoding="utf-8", errors="replace"), str(file))
    if top_k is not None:
        from kvplugin.config import Placement
        from kvplugin.errors import ConfigError
        from kvplugin.requests.fits import engine_conflicts

        placement = Placement.BEFORE_TOPK if before_topk else Placement.AFTER_TOPK
        problems = list(engine_conflicts(rollout, placement=placement, width=top_k))
        if problems:
            raise ConfigError(problems)
    _print(View(rollout, Override(), None, str(file)), not json_)


def _share(text: str) -> tuple[str, float]:
    arm, equals, number = text.partition("=")
    try:
        share = float(number)
        if not equals or not arm or not 0 <= share <= 1:
            raise ValueError
    except ValueError:
        raise typer.BadParameter(f"{text!r}: give ARM=SHARE with a share from 0 to 1", param_hint="SHARES") from None
    return arm, share
