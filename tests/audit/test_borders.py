"""Where `strict` ends: two small programs in which a strict tenant does see that another one is busy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from prefixkv.scope import Principal
from tests.audit.program import Act, Chat, Program, make_program
from tests.audit.trial import run_program

_HOW = {"max_tokens": 1, "n": 1, "streams": False, "slot": "none"}
_CHATS = {
    "attacker": Chat("attacker", "attacker", Principal("u", "mallory", "s")),
    "victim": Chat("victim", "victim", Principal("t", "ann", "s")),
}


def _say(side: Any, words: int) -> list[Act]:
    """Send a text of so many words, each five tokens, and let it end."""
    text = " ".join(f"{chr(97 + n % 26)}{chr(97 + n // 26)}is" for n in range(words))
    return [Act("text", side, side, text=text, options=_HOW), Act("step", options={"count": 40})]


def _program(acts: list[Act], *shares: float) -> Program:
    policies: list[Mapping[str, Any]] = [
        {"tenants": {"u": {"isolation": "strict", "min_pool": share}}, "default": {}} for share in shares
    ]
    scheduler = {"max_num_seqs": 8, "max_prefill_tokens": 512, "max_new_seqs_per_step": 4}
    return Program("strict", 50, 8, scheduler, policies, _CHATS, acts)


def test_inside_its_partition_a_strict_tenant_sees_nothing() -> None:
    """The twin of the programs below: without a reload and without text for everybody."""
    program = _program([*_say("attacker", 30), *_say("victim", 36), *_say("attacker", 30)], 0.5)
    assert run_program(program, {}, idle=True).is_clean


def test_a_partition_that_a_reload_makes_smaller_gives_its_blocks_back_at_once() -> None:
    """What a tenant holds beyond its new partition must not wait for others to take it: it sees when they do."""
    shrink = Act("reload", options={"which": 1})
    program = _program([*_say("attacker", 30), shrink, *_say("victim", 56), *_say("attacker", 30)], 0.6, 0.2)
    assert run_program(program, {}, idle=True).is_clean


@pytest.mark.xfail(strict=True, reason="public text belongs to all: whether it finds room depends on how busy all are")
def test_text_published_to_everybody_is_there_whatever_others_do() -> None:
    """Publish it before traffic comes. Here pinning it would leave no room for what the victim has under way."""
    common = "be kind and answer in short words " * 3
    chats = {**_CHATS, "attacker": Chat("attacker", "attacker", Principal("u", "mallory", "s"), common)}
    acts = [
        *_say("victim", 45)[:1],
        Act("publish", text=common, options={"tenant": None, "tools": None}),
        Act("step", options={"count": 40}),
        Act("turn", "attacker", "attacker", text="hello", options=_HOW),
    ]
    program = replace(_program(acts, 0.4), num_blocks=60, chats=chats)
    assert run_program(program, {}, idle=True).is_clean


@pytest.mark.parametrize("seed", [17, 28, 29, 63])
def test_trials_with_a_partition_that_becomes_smaller(seed: int) -> None:
    """In 17, 28 and 29 others were seen to take the blocks. In 63 a request that no longer fitted never ended."""
    program = make_program(seed, "strict")
    policies = [
        {**rules, "tenants": {**rules["tenants"], "u": {**rules["tenants"]["u"], "min_pool": share}}}
        for rules, share in zip(program.policies, (0.5, 0.2), strict=True)
    ]
    acts = [act for act in program.acts if act.kind != "reload"]
    acts.insert(len(acts) // 2, Act("reload", options={"which": 1}))
    assert run_program(replace(program, policies=policies, acts=acts), {}, idle=True).is_clean
