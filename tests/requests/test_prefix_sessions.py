from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplugin.errors import RequestError
from kvplugin.requests.digest import fields
from kvplugin.requests.fingerprint import EngineFacts, Fingerprint, prompt_fingerprint
from kvplugin.requests.sessions import Finding, SessionStore, Standing

ENGINE = EngineFacts("model", "bfloat16", 64, "auto/16")
PROMPT = [5, 6, 7, 8]


def found(scaffold: str | None = "s", contract: str | None = None, tokens: int = 3, prompt: list[int] = PROMPT,
          engine: EngineFacts = ENGINE) -> Fingerprint:  # fmt: skip
    return prompt_fingerprint(scaffold, contract, tokens, prompt, engine)


@given(st.lists(st.binary(max_size=6), max_size=4), st.lists(st.binary(max_size=6), max_size=4))
def test_rows_of_fields_are_told_apart(first: list[bytes], second: list[bytes]) -> None:
    assert (fields(*first) == fields(*second)) == (first == second)


@pytest.mark.parametrize(
    ("other", "changed"),
    [
        (found(scaffold="t"), "scaffold"),
        (found(scaffold=None), "scaffold"),
        (found(contract=""), "contract"),
        (found(tokens=2), "scaffold_tokens"),
        (found(prompt=[5, 6, 9, 8]), "scaffold_tokens"),
        (found(engine=ENGINE._replace(model="m")), "model"),
        (found(engine=ENGINE._replace(dtype="float16")), "dtype"),
        (found(engine=ENGINE._replace(block_size=32)), "block_size"),
        (found(engine=ENGINE._replace(cache_layout="fp8/16")), "cache_layout"),
    ],
)
def test_each_field_counts_and_is_named(other: Fingerprint, changed: str) -> None:
    assert other.changes(found()) == (changed,)
    assert other.digest != found().digest


def test_what_follows_the_stable_part_does_not_count() -> None:
    assert found(prompt=[5, 6, 7, 1, 2, 3]) == found()


def test_the_stable_part_is_part_of_the_prompt() -> None:
    with pytest.raises(RequestError, match="kvplugin_scaffold_tokens: 5 of a prompt of 4 tokens; give at most"):
        found(tokens=5)


def test_a_session_is_compared_with_its_last_prompt() -> None:
    store = SessionStore()
    assert store.observe("a", found()) == Finding(Standing.MISS)
    assert store.observe("a", found()) == Finding(Standing.HIT)
    assert store.observe("b", found()) == Finding(Standing.MISS), "two sessions with one text share nothing"
    assert store.observe("a", found(contract="c")) == Finding(Standing.INVALIDATED, ("contract",))
    assert store.observe("a", found(contract="c")) == Finding(Standing.HIT)


def test_the_store_is_bounded_and_ages() -> None:
    now = [0.0]
    store = SessionStore(capacity=2, max_age_s=10, clock=lambda: now[0])
    for session in "abc":
        store.observe(session, found())
    assert len(store) == 2
    assert store.observe("a", found()).standing is Standing.MISS, "the oldest left"
    assert store.observe("c", found()).standing is Standing.HIT
    now[0] = 11.0
    assert store.observe("c", found()).standing is Standing.MISS
    assert len(store) == 1, "the others are too old as well"


def test_no_text_is_kept() -> None:
    store, secret = SessionStore(), "a-very-secret-scaffold"
    store.observe("a-very-secret-session", found(scaffold=secret, contract=secret))
    assert len(store) == 1
    assert b"secret" not in pickle.dumps(store._known)
