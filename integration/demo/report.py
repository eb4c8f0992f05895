"""What the demo found, as a table, as JSON, and as a verdict."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

from rich.table import Table

from integration.demo.client import Answer
from integration.demo.metrics_view import PolicyCounts
from kvplugin.config import Mode


@dataclass(frozen=True)
class ModeRun:
    """One server's part of the demo.

    Attributes:
        mode: the policy's mode.
        answers: in the order of the requests.
        seconds: from the first request to the last answer.
        counts: what ``/metrics`` counted meanwhile.
    """

    mode: Mode
    answers: tuple[Answer, ...]
    seconds: float
    counts: PolicyCounts

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens a second, prefill included in the time."""
        return self.counts.generated_tokens / self.seconds


@dataclass(frozen=True)
class DemoReport:
    """Both runs.

    Attributes:
        merge: with the policy rewriting the selection.
        observe: with the policy counting only.
        repeated: the answers of the ``observe`` server to the same requests once more.
        versions: installed version of kvplugin, vLLM and torch, from ``kvplugin_build_info``.
    """

    merge: ModeRun
    observe: ModeRun
    repeated: tuple[Answer, ...]
    versions: dict[str, str]

    @property
    def texts_that_differ(self) -> int:
        """Requests that the two modes answered differently."""
        return _differing(self.merge.answers, self.observe.answers)

    @property
    def texts_that_vary(self) -> int:
        """Requests that one and the same mode answered differently: the noise in ``texts_that_differ``."""
        return _differing(self.observe.answers, self.repeated)

    def problems(self) -> Iterator[str]:
        """What keeps the demo from being a success, one sentence each."""
        for run in (self.merge, self.observe):
            yield from (f"{run.mode}: request {i}: {a.error}" for i, a in enumerate(run.answers) if a.error)
            if run.counts.requests != len(run.answers):
                yield f"{run.mode}: /metrics counts {run.counts.requests} answers to {len(run.answers)} requests"
        if self.merge.counts.rows_rewritten == 0:
            yield f"{self.merge.mode}: the policy rewrote no row"

    def to_json(self) -> str:
        """The report as a JSON object."""
        runs = {run.mode.value: _run_facts(run) for run in (self.merge, self.observe)}
        facts = {
            "modes": runs,
            "texts_that_differ": self.texts_that_differ,
            "texts_that_vary": self.texts_that_vary,
            "versions": self.versions,
            "problems": list(self.problems()),
        }
        return json.dumps(facts, indent=2)

    def table(self) -> Table:
        """The report as a table with a column per mode."""
        table = Table(
            title="The topology policy on a tiny DSA model",
            caption="observe counts what merging would do and changes nothing;\n"
            f"asked the same again, it answered {self.texts_that_vary} of {len(self.repeated)} requests differently.\n"
            + ", ".join(f"{name} {version}" for name, version in self.versions.items()),
            caption_justify="left",
        )
        table.add_column("read from /metrics")
        for run in (self.merge, self.observe):
            table.add_column(run.mode.value, justify="right")
        for label, value in _ROWS.items():
            table.add_row(label, value(self.merge), value(self.observe))
        table.add_section()
        table.add_row("requests whose text differs", f"{self.texts_that_differ} of {len(self.merge.answers)}", "-")
        return table


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


_ROWS: dict[str, Callable[[ModeRun], str]] = {
    "requests answered": lambda run: f"{run.counts.requests} of {len(run.answers)}",
    "prompt tokens": lambda run: f"{run.counts.prompt_tokens:,}",
    "generated tokens": lambda run: f"{run.counts.generated_tokens:,}",
    "generated tokens/s": lambda run: f"{run.tokens_per_second:.1f}",
    "rows seen": lambda run: f"{run.counts.rows_seen:,}",
    "rows rewritten": lambda run: f"{run.counts.rows_rewritten:,}",
    "learned kept": lambda run: f"{run.counts.learned_kept:,}",
    "learned evicted": lambda run: f"{run.counts.learned_evicted:,}",
    "structural injected": lambda run: f"{run.counts.structural_injected:,}",
    "pre-merge sink hit rate": lambda run: _rate(run.counts.sink_hit_rate),
}


def _run_facts(run: ModeRun) -> dict[str, object]:
    return asdict(run.counts) | {
        "sent": len(run.answers),
        "seconds": round(run.seconds, 3),
        "tokens_per_second": round(run.tokens_per_second, 2),
        "sink_hit_rate": run.counts.sink_hit_rate,
    }


def _differing(left: tuple[Answer, ...], right: tuple[Answer, ...]) -> int:
    return sum(one.text != other.text for one, other in zip(left, right, strict=True))
