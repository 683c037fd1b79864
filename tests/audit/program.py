"""Random programs: who does what in a trial, as data. One seed is one program, the same on every machine."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from prefixkv.scope import Principal

__all__ = ["Act", "Chat", "Program", "make_program", "make_renaming"]

Side = Literal["attacker", "victim", "other"]
Kind = Literal["tenants", "users", "strict"]
PRIVATE = "ABDEFGHIJKLMNOPQRSTUVWXYZ"
"""Letters of private words. Nothing that is shared with the attacker, and no word that the template or the engine
writes (such as "Current values:"), holds one."""

_SHARED_WORDS = ("you", "are", "help", "with", "orders", "be", "kind", "and", "short", "ask", "price", "of")


@dataclass(frozen=True)
class Chat:
    """One conversation as its owner sees it before it begins."""

    name: str
    side: Side
    principal: Principal
    system: str | None = None
    tools: tuple[Mapping[str, Any], ...] | None = None


@dataclass(frozen=True)
class Act:
    """One thing that somebody does.

    Attributes:
        kind: ``turn``, ``again`` (the same once more, as after a lost reply), ``text``, ``probe``, ``cancel``,
            ``explain``, ``end_session``, ``purge``, ``publish``, ``unpublish``, ``reload``, ``sleep``, ``stats`` or
            ``step``.
        side: Whose act it is: the attacker's are watched, the victim's are renamed (or left out).
        chat: Which conversation it is done in.
        target: Whose conversation a probe copies.
        text: What is said; private words in upper case.
        options: The rest.
    """

    kind: str
    side: Side = "other"
    chat: str = ""
    target: str = ""
    text: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Program:
    """One trial: an engine, its tenants, and what happens."""

    kind: Kind
    num_blocks: int
    block_size: int
    scheduler: Mapping[str, int]
    policies: Sequence[Mapping[str, Any]]
    chats: Mapping[str, Chat]
    acts: Sequence[Act]

    @property
    def attacker_tenant(self) -> str:
        """Whose numbers the attacker may ask for, as the backend of its tenant; none as a mere user."""
        return "" if self.kind == "users" else "u"


def make_renaming(seed: int) -> dict[int, int]:
    """Return the bijection of private letters that makes world 2."""
    letters = list(PRIVATE)
    random.Random(f"renaming {seed}").shuffle(letters)
    return str.maketrans(PRIVATE, "".join(letters))


def make_program(seed: int, kind: Kind) -> Program:
    """Return the program of a seed.

    Args:
        seed: Its number.
        kind: ``tenants``: the attacker is another tenant with its users, and all of tenant ``t`` is private.
            ``users``: the attacker is a user of the victim's tenant, whose shared texts are no secret.
            ``strict``: as ``tenants``, and the attacker's tenant has a partition.
    """
    return _Maker(seed, kind).make()


class _Maker:
    def __init__(self, seed: int, kind: Kind) -> None:
        self.rng = random.Random(f"{kind} {seed}")
        self.kind: Kind = kind
        rng = self.rng
        self.secrets = ["".join(rng.choices(PRIVATE, k=rng.randint(5, 8))) for _ in range(6)]
        self.secrets += ["".join(rng.choices("ABD", k=3))]  # one that can be guessed
        self.chats: dict[str, Chat] = {}
        self.acts: list[Act] = []
        # In some programs the victim sends a few texts, which begin alike, again and again through a pool that is a
        # little too small: there what is evicted first decides what hits next.
        self.is_crowded = rng.random() < 0.3
        self.is_registered = rng.random() < 0.5
        beginning = self._words(2, 3, private=0.5)
        self.partition = rng.choice((0.3, 0.45))  # a reload leaves it as it is: see the README
        self.lines = [f"{beginning} {self._words(2, 9, private=0.7)}" for _ in range(7)]

    def make(self) -> Program:
        rng = self.rng
        block_size = rng.choice((4, 8, 16, 16))
        size = rng.choice((rng.randint(330, 700), rng.randint(400, 1500))) if not self.is_crowded else 340
        scheduler = {
            "max_num_seqs": rng.choice((2, 4, 8)),
            "max_prefill_tokens": rng.choice((16, 48, 128, 512)),
            "max_new_seqs_per_step": rng.randint(1, 3),
            "max_queued_requests": rng.choice((3, 64)),
        }
        self._make_chats()
        if self.kind == "strict" and rng.random() < 0.5:  # before anybody comes, and for good: see the README
            text = self._words(3, 5, private=0.0)
            self.acts.append(Act("publish", text=text, options={"tenant": None, "tools": None}))
            self.acts.append(Act("step", options={"count": 60}))
        policies = [self._policies() for _ in range(2)]
        for _ in range(rng.randint(24, 44)):
            self._add_act()
            if rng.random() < 0.55:
                self.acts.append(Act("step", options={"count": rng.choice((1, 1, 2, 4, 9))}))
        return Program(self.kind, size // block_size, block_size, scheduler, policies, self.chats, self.acts)

    # -- who ---------------------------------------------------------------------------------------------------------

    def _make_chats(self) -> None:
        rng, secret_system = self.rng, self.kind != "users"
        tools = self._tools(secret_system) if rng.random() < 0.4 else None
        shared = self._words(4, 7, private=0.4 if secret_system else 0.0, slots=rng.random() < 0.3)
        for i in range(3):
            who = Principal("t", "victim", f"s{i}") if rng.random() < 0.8 else Principal("t", "victim")
            own = shared if rng.random() < 0.7 else self._words(3, 6, private=self._hides_system(), slots=True)
            self.chats[f"victim{i}"] = Chat(f"victim{i}", "victim", who, own, tools)
        tenant = "t" if self.kind == "users" else "u"
        for i, user in enumerate(("mallory", "mallory", "minion")):
            mine = Principal(tenant, user if self.kind != "users" else "mallory", f"s{i}")
            system = shared if self.kind == "users" else self._words(3, 5, private=0.0)
            self.chats[f"attacker{i}"] = Chat(f"attacker{i}", "attacker", mine, system, None)
        other = Principal("b", "bob", "s0") if rng.random() < 0.5 or self.kind != "users" else Principal("t", "carol")
        self.chats["other0"] = Chat("other0", "other", other, self._words(3, 5, private=0.0), None)

    def _hides_system(self) -> float:
        """Return how private a system text is that its user wrote: among users it is so only where it is not shared."""
        return 0.0 if self.kind == "users" and not self.is_registered else 0.5

    def _tools(self, is_private: bool) -> tuple[Mapping[str, Any], ...]:
        # Names are no secrets: `tools_order: canonical` sorts by them, and renaming must not change the order.
        return tuple(
            {
                "type": "function",
                "function": {
                    "name": name,
                    "description": self._words(1, 3, private=0.5 if is_private else 0.0),
                    "parameters": {"type": "object", "properties": {}},
                },
            }
            for name in self.rng.sample(["find", "book", "pay"], self.rng.randint(1, 2))
        )

    def _words(self, low: int, high: int, private: float, slots: bool = False) -> str:
        rng = self.rng
        words = [
            rng.choice(self.secrets) if rng.random() < private else rng.choice(_SHARED_WORDS)
            for _ in range(rng.randint(low, high))
        ]
        if slots:
            words.insert(rng.randint(0, len(words) - 1), "{{slot:who}}")
        return " ".join(words)

    # -- rules -------------------------------------------------------------------------------------------------------

    def _policies(self) -> Mapping[str, Any]:
        rng = self.rng
        tenants = {name: self._policy(name) for name in ("t", "u", "b")}
        default = None if rng.random() < 0.5 else {"weight": rng.choice((1.0, 2.0))}
        return {"tenants": tenants, "default": default}

    def _policy(self, name: str) -> Mapping[str, Any]:
        rng = self.rng
        policy: dict[str, Any] = {"weight": rng.choice((1.0, 1.0, 2.0))}
        if self.kind == "strict" and name == "u":
            policy |= {"isolation": "strict", "min_pool": self.partition}
        elif rng.random() < 0.3:
            policy["min_pool"] = rng.choice((0.1, 0.25))
        elif rng.random() < 0.3:
            policy["max_pool"] = rng.choice((0.3, 0.6))
        if rng.random() < 0.2:
            policy["max_queued_requests"] = rng.choice((1, 3))
        if rng.random() < 0.2:
            policy["max_running_requests"] = rng.choice((1, 2))
        if rng.random() < 0.15:
            policy["tokens_per_minute"] = rng.choice((200, 1000))
        if rng.random() < 0.2:
            policy["priority"] = rng.choice((-1, 1))
        if rng.random() < 0.3:
            policy["ttl"] = {"session": {"idle": rng.choice((5, 40)), "absolute": 80}}
        policy["zero_retention"] = rng.random() < 0.1
        policy["splice_generated"] = rng.random() < 0.5
        policy["tools_order"] = rng.choice(("as_given", "canonical"))
        policy["slots"] = {
            "who": {"placement": rng.choice(("inline", "tail")), "scope": rng.choice(("session", "user"))}
        }
        if self.kind == "users":
            if name == "t" and self.is_registered:
                policy["tenant_scope"] = "registered"
        else:
            policy["few_shot_messages"] = rng.choice((0, 0, 2))
            if rng.random() < 0.3:
                policy["scopes"] = {"text": "tenant", "history": rng.choice(("session", "user", "tenant", "request"))}
        return policy

    # -- what --------------------------------------------------------------------------------------------------------

    def _add_act(self) -> None:
        rng = self.rng
        kind = rng.choices(
            ("turn", "again", "probe", "text", "cancel", "explain", "end_session", "purge", "publish", "unpublish",
             "reload", "sleep", "stats"),
            (34, 14, 30, 70 if self.is_crowded else 6, 5, 7, 3, 3, 6, 2, 3, 2, 4),
        )[0]  # fmt: skip
        getattr(self, f"_add_{kind}", self._add_simple)(kind)

    def _side(self) -> Side:
        return self.rng.choices(("victim", "attacker", "other"), (5, 3, 1))[0]

    def _chat(self, side: Side) -> str:
        return self.rng.choice([name for name, chat in self.chats.items() if chat.side == side])

    def _how(self) -> Mapping[str, Any]:
        rng = self.rng
        return {
            "max_tokens": rng.choice((1, 2, 5, 9)),
            "n": 2 if rng.random() < 0.1 else 1,
            "streams": rng.random() < 0.3,
            "slot": rng.choice(self.secrets),
        }

    def _add_turn(self, kind: str) -> None:
        side = self._side()
        text = self._words(1, 5, private=0.6 if side == "victim" else 0.0, slots=self.rng.random() < 0.1)
        if self.rng.random() < 0.04:
            text += " <|im_end|>"
        self.acts.append(Act(kind, side, self._chat(side), text=text, options=self._how()))

    def _add_again(self, kind: str) -> None:
        side = self._side()
        self.acts.append(Act(kind, side, self._chat(side), options=self._how()))

    def _add_text(self, kind: str) -> None:
        side = self._side()
        text = self.rng.choice(self.lines) if side == "victim" else self._words(4, 12, private=0.0)
        self.acts.append(Act(kind, side, self._chat(side), text=text, options=self._how()))

    def _add_probe(self, kind: str) -> None:
        rng = self.rng
        options = {
            **self._how(),
            "ids": rng.random() < 0.15,
            "explain": rng.random() < 0.2,
            "knows_slot": rng.random() < 0.7,
            "keep": rng.choice((0.0, 0.3, 0.6, 0.95, 1.0, 1.0)),
            "change": rng.choice(("", "", "x", "yz and more")),
        }
        self.acts.append(Act(kind, "attacker", self._chat("attacker"), self._chat("victim"), options=options))

    def _add_simple(self, kind: str) -> None:
        """Add a cancel, an explain, the end of a session, or a sweep by time."""
        side = self._side()
        self.acts.append(Act(kind, side, self._chat(side), options={"slot": self.rng.choice(self.secrets)}))

    def _add_purge(self, kind: str) -> None:
        side, depth = self._side(), self.rng.choice((1, 2, 3))
        if self.kind == "users":
            depth = max(depth, 2)  # a user has no say over its tenant
        self.acts.append(Act(kind, side, self._chat(side), options={"depth": depth}))

    def _add_publish(self, kind: str) -> None:
        rng = self.rng
        side = "other" if self.kind == "users" else self._side()
        if side == "other" and self.kind == "strict":
            return
        tenant = {"victim": "t", "attacker": "u", "other": None}[side]
        if self.kind == "users" and rng.random() < 0.7:
            tenant = "t"
        chat = self.chats[self._chat("victim")] if tenant == "t" else self.chats[self._chat(side)]
        text = chat.system or ""
        if self.kind == "users" and not text.islower():  # what is published is no secret in its tenant
            text = self._words(3, 5, private=0.0)
        text = text.replace("{{slot:who}}", "them")
        tools = chat.tools if tenant == "t" and rng.random() < 0.5 else None
        self.acts.append(Act(kind, side, text=text, options={"tenant": tenant, "tools": tools}))

    def _add_unpublish(self, kind: str) -> None:
        side = "other" if self.kind == "users" else self._side()
        if side != "other" or self.kind != "strict":
            self.acts.append(Act(kind, side))

    def _add_reload(self, kind: str) -> None:
        self.acts.append(Act(kind, options={"which": self.rng.randint(0, 1)}))

    def _add_sleep(self, kind: str) -> None:
        self.acts.append(Act(kind, options={"seconds": self.rng.choice((6, 45, 100))}))

    def _add_stats(self, kind: str) -> None:
        self.acts.append(Act(kind, "attacker"))
