"""The exceptions of kvplugin: a small tree, each text built from typed fields as *where: found; allowed; cure*."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class KvpluginError(Exception):
    """Base of everything kvplugin raises on purpose."""


@dataclass(frozen=True)
class ConfigProblem:
    """One wrong setting: dotted key, what is wrong with the value found there, what to do instead."""

    key: str
    found: str
    cure: str

    def __str__(self) -> str:
        return f"{self.key}: {self.found}; {self.cure}"


class ConfigError(KvpluginError):
    """One or more settings are wrong; all of them are listed at once.

    Not a ValueError: pydantic, which builds vLLM's configuration, would bury the message in one of its own.

    Attributes:
        problems: every problem found, in the order of the configuration tree.
    """

    def __init__(self, problems: Sequence[ConfigProblem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[ConfigProblem, ...]]]:
        # Exceptions cross process boundaries; the default rebuilds from the text alone.
        return ConfigError, (self.problems,)


class ArgumentError(KvpluginError, ValueError):
    """An argument of a library call has the wrong shape, dtype, device or value.

    Attributes:
        where: the function and argument, such as ``apply_topology_policy.topk``.
        found: what was passed.
        allowed: what would be accepted.
    """

    def __init__(self, where: str, found: str, allowed: str) -> None:
        self.where, self.found, self.allowed = where, found, allowed
        super().__init__(f"{where}: {found}; {allowed}")

    def __reduce__(self) -> tuple[type[ArgumentError], tuple[str, str, str]]:
        return ArgumentError, (self.where, self.found, self.allowed)


class RequestError(KvpluginError, ValueError):
    """A request carries a key of the plugin that is unknown, or that has a value which is no good.

    A ValueError: vLLM answers those of a request with a status of 400.

    Attributes:
        key: of ``vllm_xargs`` or ``SamplingParams.extra_args``.
        found: what was passed.
        allowed: what would be accepted.
    """

    def __init__(self, key: str, found: str, allowed: str) -> None:
        self.key, self.found, self.allowed = key, found, allowed
        super().__init__(f"{key}: {found}; {allowed}")

    def __reduce__(self) -> tuple[type[RequestError], tuple[str, str, str]]:
        return RequestError, (self.key, self.found, self.allowed)


class CoordinateError(KvpluginError):
    """A learned index lies outside its row's valid interval and ``coordinate_mismatch`` is ``raise``.

    Attributes:
        row: row of the call that recorded it.
        value: the index found.
        low, high: the valid interval ``[low, high)``.
    """

    def __init__(self, row: int, value: int, low: int, high: int) -> None:
        self.row, self.value, self.low, self.high = row, value, low, high
        super().__init__(
            f"topology policy, row {row}: learned index {value} is outside [{low}, {high}); "
            "coordinate_mismatch is 'raise', which stops the engine on purpose; "
            "use 'fallback' or 'drop' to go on serving"
        )

    def __reduce__(self) -> tuple[type[CoordinateError], tuple[int, int, int, int]]:
        return CoordinateError, (self.row, self.value, self.low, self.high)


class EngineMismatch(KvpluginError):
    """vLLM lacks, or has moved, a point the plugin relies on.

    Attributes:
        point: dotted name of the vLLM point.
        found: what is there instead.
        cure: what the operator can do.
    """

    def __init__(self, point: str, found: str, cure: str) -> None:
        self.point, self.found, self.cure = point, found, cure
        super().__init__(f"{point}: {found}; {cure}")

    def __reduce__(self) -> tuple[type[EngineMismatch], tuple[str, str, str]]:
        return EngineMismatch, (self.point, self.found, self.cure)
