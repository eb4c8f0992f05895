from __future__ import annotations

from typing import Any

import pytest

from kvplugin.errors import RequestError
from kvplugin.requests.keys import INTERNAL_KEYS, RequestKeys, request_keys

ARMS = ("control", "candidate")


def test_nothing_is_fine_and_others_keys_are_left_alone() -> None:
    assert request_keys(None, ARMS) == request_keys({"other": {"deep": []}}, ARMS) == RequestKeys()


def test_all_keys() -> None:
    given = {
        "kvplugin_arm": "candidate",
        "kvplugin_session": "s",
        "kvplugin_scaffold": "text",
        "kvplugin_scaffold_tokens": 0,
        "kvplugin_contract": "json",
    }
    assert request_keys(given, ARMS) == RequestKeys("candidate", "s", "text", 0, "json")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kvplugin_arm": "b"}, "kvplugin_arm: 'b' is an unknown arm; use control, candidate"),
        ({"kvplugin_arm": 3}, "kvplugin_arm: 3; give a text of 1 to 256 characters"),
        ({"kvplugin_arm": ["control"]}, "kvplugin_arm: ['control']; give a text of 1 to 256 characters"),
        ({"kvplugin_session": ""}, "kvplugin_session: 0 characters; give a text of 1 to 256 characters"),
        ({"kvplugin_session": "s" * 257}, "kvplugin_session: 257 characters; give a text of 1 to 256 characters"),
        ({"kvplugin_scaffold_tokens": True}, "kvplugin_scaffold_tokens: True; give a number of tokens, 0 or more"),
        ({"kvplugin_scaffold_tokens": -1}, "kvplugin_scaffold_tokens: -1; give a number of tokens, 0 or more"),
        ({"kvplugin_scaffold_tokens": 1.0}, "kvplugin_scaffold_tokens: 1.0; give a number of tokens, 0 or more"),
        (
            {"kvplugin_contract": "c" * 65537},
            "kvplugin_contract: 65537 characters; give a text of 1 to 65536 characters",
        ),
        (
            {"kvplugin_arms": "control"},
            "kvplugin_arms: unknown key; use kvplugin_arm, kvplugin_session, kvplugin_scaffold, "
            "kvplugin_scaffold_tokens, kvplugin_contract; did you mean kvplugin_arm?",
        ),
    ],
)
def test_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as refusal:
        request_keys(given, ARMS)
    assert str(refusal.value) == message


@pytest.mark.parametrize("key", INTERNAL_KEYS)
def test_a_caller_cannot_set_what_the_plugin_sets(key: str) -> None:
    with pytest.raises(RequestError, match="unknown key"):
        request_keys({key: "control"}, ARMS)
