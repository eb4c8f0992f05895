"""The shape of a metric's definition."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum


class MetricType(StrEnum):
    """Type of a metric, as the exposition format spells it."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True)
class Buffer:
    """A kind of counter buffer: int64 ``[..., rows, columns]``, leading dimensions to be added up.

    Attributes:
        name: as error messages call it.
        rows: size of the last dimension but one.
        columns: names of the last dimension.
        per_arm: where an engine has arms, they are the dimension before the rows.
    """

    name: str
    rows: int
    columns: type[IntEnum]
    per_arm: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """The last two dimensions."""
        return self.rows, len(self.columns)


@dataclass(frozen=True)
class LabelValue:
    """One value of a label, and the part of a counter buffer it stands for.

    Attributes:
        text: the value.
        meaning: half a sentence for the operator.
        rows: rows of the buffer that count towards it; None = it does not restrict the rows.
        columns: columns that add up to it; None = it does not restrict the columns.
    """

    text: str
    meaning: str
    rows: tuple[int, ...] | None = None
    columns: tuple[IntEnum, ...] | None = None


@dataclass(frozen=True)
class Label:
    """A label and all values it can take; none = they are known when the engine runs, and ``meaning`` says which."""

    name: str
    values: tuple[LabelValue, ...] = ()
    meaning: str = ""


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        name: the one that PromQL uses; of a histogram without ``_bucket``, ``_sum`` or ``_count``.
        type, help: as the exposition format has them.
        labels: in order.
        buffer: what counts it on the engine's device; None = a process that knows it by itself.
        columns: of the buffer, those that count here; none given = all that the labels leave.
        buckets: upper bounds of a histogram, without the infinite one. Where a buffer counts it, the columns that
            the labels leave are those of the buckets, and the sum's.
        unit: what 1 in the column of a histogram's sum stands for.
    """

    name: str
    type: MetricType
    help: str
    labels: tuple[Label, ...]
    buffer: Buffer | None = None
    columns: tuple[IntEnum, ...] = ()
    buckets: tuple[float, ...] = ()
    unit: float = 1

    @property
    def family(self) -> str:
        """Name of the metric family: without the suffix that the exposition format adds to counters."""
        return self.name.removesuffix("_total")
