from __future__ import annotations

import pickle

import pytest

from kvplugin.errors import (
    ArgumentError,
    ConfigError,
    ConfigProblem,
    CoordinateError,
    EngineMismatch,
    KvpluginError,
    RequestError,
)

PROBLEMS = (
    ConfigProblem("kvplugin.policy.mode", "3 is unknown", "use disabled"),
    ConfigProblem("kvplugin.x", "y", "z"),
)

EXAMPLES = [
    (ConfigError(PROBLEMS), "kvplugin.policy.mode: 3 is unknown; use disabled\nkvplugin.x: y; z"),
    (ArgumentError("op.topk", "got float32 [2]", "must be int32"), "op.topk: got float32 [2]; must be int32"),
    (RequestError("kvplugin_arm", "'b' is an unknown arm", "use a"), "kvplugin_arm: 'b' is an unknown arm; use a"),
    (CoordinateError(3, 99, 5, 17),
     "topology policy, row 3: learned index 99 is outside [5, 17); coordinate_mismatch is 'raise', which stops the "
     "engine on purpose; use 'fallback' or 'drop' to go on serving"),
    (EngineMismatch("vllm.x.f", "missing", "install vLLM 0.32"), "vllm.x.f: missing; install vLLM 0.32"),
]  # fmt: skip


@pytest.mark.parametrize(("error", "text"), EXAMPLES)
def test_text(error: KvpluginError, text: str) -> None:
    assert str(error) == text


def test_wrong_arguments_are_also_value_errors_and_wrong_settings_are_not() -> None:
    """pydantic, which builds vLLM's configuration, would bury a ValueError in one of its own."""
    assert issubclass(ArgumentError, ValueError)
    assert issubclass(RequestError, ValueError)
    assert not issubclass(ConfigError, ValueError)


@pytest.mark.parametrize("error", [error for error, *_ in EXAMPLES])
def test_survives_the_way_between_processes(error: KvpluginError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_every_error_class_has_an_example() -> None:
    tree = {error for error in KvpluginError.__subclasses__() if error.__module__ == KvpluginError.__module__}
    assert {type(error) for error, *_ in EXAMPLES} == tree
