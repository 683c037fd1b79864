"""Who is who: ids that look alike are two places, and a hash that says nothing changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from typing import Any

import pytest

from prefixkv import Engine, Principal, SamplingParams
from prefixkv.cache import ghosts, index
from prefixkv.cache.keys import BlockKey, ScopeKey, block_key
from prefixkv.errors import InvalidRequest
from tests.engine.test_generate import prompts, run_together

GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)

ALIKE = [
    (Principal("org_1", "2345"), Principal("org_12345")),
    (Principal("org_1", "2345"), Principal("org_12", "345")),
    (Principal("a", "bc"), Principal("ab", "c")),
    (Principal("a", "b", "c"), Principal("a", "bc")),
    (Principal("a", "b", "c"), Principal("a", None, "bc")),
    (Principal("a", "b"), Principal("a", None, "b")),
    (Principal("a"), Principal("a", "None")),
    (Principal("a"), Principal("a", "0")),
    (Principal("acme"), Principal("Acme")),
    (Principal("acme"), Principal("acme ")),
    (Principal("acme"), Principal("\u0430cme")),  # a Cyrillic letter
    (Principal("caf\u00e9"), Principal("cafe\u0301")),  # composed or not: compared as bytes
    (Principal("a\x00b"), Principal("a", "\x00b")),
]


@pytest.mark.parametrize(("one", "other"), ALIKE, ids=lambda who: repr((who.tenant, who.user, who.session)))
def test_ids_that_look_alike_never_share(one: Principal, other: Principal, engine: Engine) -> None:
    prompt = prompts(200, [80])[0]
    for first, second in permutations((one, other)):
        engine.purge()
        engine.complete(prompt, principal=first, sampling=GREEDY)
        assert engine.complete(prompt, principal=second, sampling=GREEDY).usage.cached_tokens == 0
        assert engine.complete(prompt, principal=first, sampling=GREEDY).usage.cached_tokens == len(prompt) - 1
        assert engine.purge(first.tenant, first.user, first.session).blocks > 0
        if first.tenant == second.tenant and None in (first.user, first.session):
            continue  # a purge that names no user is one of all users
        assert engine.complete(prompt, principal=second, sampling=GREEDY).usage.cached_tokens == len(prompt) - 1


def test_an_empty_user_is_no_user_and_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        Principal("org_12345", "")


def _four_bits(scope_key: ScopeKey, parent_uid: int, token_ids: Sequence[int]) -> BlockKey:
    return BlockKey(bytes([block_key(scope_key, parent_uid, token_ids)[0] & 15]))


def _serve(engine: Engine) -> list[Any]:
    """Two tenants with the same texts, texts that begin alike, all at once and again one by one."""
    base = prompts(200, [96])[0]
    texts = [base, [*base[:48], *prompts(200, [40], seed=1)[0]], [*base[:16], 9, *base[17:]], base[:64]]
    asked = [(text, Principal(tenant, "u", "s")) for text in texts for tenant in ("a", "b")]
    replies = run_together(engine, asked, GREEDY)
    replies += [engine.complete(text, principal=who, sampling=GREEDY) for text, who in asked]
    engine.publish("a text for everybody, long enough for more than one block of tokens")
    return replies


def test_four_bits_in_place_of_the_hash_change_no_output(make_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hash only finds candidates. With sixteen values nearly every look-up meets strangers, and turns them away."""
    honest = make_engine()
    expected = _serve(honest)
    monkeypatch.setattr(index, "block_key", _four_bits)
    monkeypatch.setattr(ghosts, "block_key", _four_bits)
    engine = make_engine()
    got = _serve(engine)
    assert [reply.token_ids for reply in got] == [reply.token_ids for reply in expected]
    assert [reply.usage for reply in got] == [reply.usage for reply in expected]
    engine.check()
    assert engine.stats().hash_collisions > 0
    assert honest.stats().hash_collisions == 0
    engine.close()  # before its keys are honest again
