"""The operator's page on metrics, rendered from the definitions."""

from __future__ import annotations

from collections.abc import Iterator

from kvplugin.metrics.definitions import METRICS
from kvplugin.metrics.metric import Label, Metric

_HEAD = """\
# Metrics

<!-- Generated: python -m kvplugin.metrics.definitions > docs/metrics.md -->

kvplugin adds these to vLLM's own `/metrics`, with one API server or with several; each scrape shows every value once,
summed over the engines. Counters are published every quarter of a second. Those of the policy exist where a policy is
active, those of the remap wherever the plugin is configured: every series, at 0, from the moment the engine has loaded
the model.

| metric | type | labels | meaning |
|---|---|---|---|
"""

_FOOT = """\
## How values travel

The worker writes files; the server reads them at each scrape. They lie in `PROMETHEUS_MULTIPROC_DIR` where that is set
(vLLM sets it for several API servers), else in `KVPLUGIN_METRICS_DIR`, else in a private directory under the system's
temporary one, which the server removes at exit (one that is killed leaves its few KiB behind). A directory you name
yourself is yours to empty between two starts: values found there are added to. Where the directory cannot be written,
the log says so, the server starts, and only these metrics are missing. Workers on other machines are not seen.

With the plugin installed, vLLM serves its own statistics too where `--disable-log-stats` would leave them out.
"""


def render_page() -> str:
    """The whole page, as Markdown."""
    return "\n".join([_HEAD + "\n".join(_metric_row(metric) for metric in METRICS), *_label_sections(), _FOOT])


def _metric_row(metric: Metric) -> str:
    labels = ", ".join(f"`{label.name}`" for label in metric.labels)
    return f"| `{metric.name}` | {metric.type} | {labels} | {metric.help} |"


def _label_sections() -> Iterator[str]:
    users: dict[Label, list[str]] = {}
    for metric in METRICS:
        for label in metric.labels:
            if label.values or label.meaning:
                users.setdefault(label, []).append(f"`{metric.name}`")
    for label, names in users.items():
        yield f"\n## Values of `{label.name}`\n\nIn {', '.join(names)}.\n"
        if label.meaning:
            yield label.meaning
            continue
        yield "| value | meaning |\n|---|---|"
        yield from (f"| `{value.text}` | {value.meaning} |" for value in label.values)
    yield ""
