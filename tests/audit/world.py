"""One world: a real engine without its thread, driven act by act, and what the attacker saw of it.

Everything between the caller's messages and the model is the engine's own: request builder, segmenter, limits,
scheduler, cache, memory of what was sent. Only the model is a canary, and the clock is counted.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from prefixkv.config import CacheConfig, EngineConfig, SamplingParams, SchedulerConfig
from prefixkv.engine.builder import RequestBuilder
from prefixkv.engine.core import EngineCore
from prefixkv.engine.limits import PoliciesInForce
from prefixkv.engine.live import Event, LiveRequest
from prefixkv.engine.request import ChatRequest
from prefixkv.engine.result import ChatResult, Delta, Publication
from prefixkv.errors import PrefixKVError
from prefixkv.policy import PolicySet
from prefixkv.scope import Principal
from tests.audit.canary import CanaryRunner, canary_model
from tests.audit.program import Act, Chat, Program

__all__ = ["Guess", "Trace", "World", "run_world"]

_MAX_CONTEXT = 500
_MAX_STEPS = 3000

Trace = list[tuple[Any, ...]]
"""What the attacker saw, in order: (step, what, content...)."""


@dataclass(frozen=True)
class Guess:
    """What a probe sends: in world 1 made from the victim's words, in world 2 the same, letter by letter."""

    messages: list[dict[str, Any]]
    tools: Any
    slot: str
    ids: tuple[int, ...] | None


@dataclass
class _Talk:
    """A conversation that is under way."""

    chat: Chat
    turns: list[dict[str, Any]] = field(default_factory=list)
    live: LiveRequest | None = None
    last_ids: tuple[int, ...] = ()
    last_slot: str | None = None


class World:
    """An engine and its callers.

    Args:
        program: What happens.
        renaming: Letters of the victim's words to other ones; empty in world 1.
        guesses: What the probes of world 1 sent, to be sent again; None collects them.
        without_victim: Leave out all that the victim does.
    """

    def __init__(
        self,
        program: Program,
        renaming: Mapping[int, int],
        guesses: list[Guess] | None = None,
        without_victim: bool = False,
    ) -> None:
        self.program = program
        self.trace: Trace = []
        self.victims_numbers: Trace = []
        self.guesses: list[Guess] = []
        self._replay = None if guesses is None else iter(guesses)
        self._renaming = renaming
        self._without_victim = without_victim
        self._now = 0.0
        self._steps = 0
        self._talks = {name: _Talk(chat) for name, chat in program.chats.items()}
        self._publications: dict[str, list[str]] = {"attacker": [], "victim": [], "other": []}
        loaded, segmenter = canary_model()
        letters = loaded.tokenizer.convert_tokens_to_ids
        self._ids_back = {letters(chr(new)): letters(chr(old)) for old, new in renaming.items()}
        self.runner = CanaryRunner(program.num_blocks, program.block_size, min(loaded.eos_token_ids))
        config = EngineConfig(
            cache=CacheConfig(block_size=program.block_size, kv_format="model"),
            scheduler=SchedulerConfig(**program.scheduler),
            secret=b"the same secret in both worlds",
        )
        in_force = PoliciesInForce(PolicySet.load(program.policies[0]))
        self.core = EngineCore.assemble(self.runner, b"canary", config, in_force, clock=lambda: self._now)  # type: ignore[arg-type]
        self.runner.watch(self.core)
        self._builder = RequestBuilder(loaded, segmenter, _MAX_CONTEXT, in_force.get, self.core.recall)  # type: ignore[arg-type]

    def run(self) -> None:
        """Carry out the program, then let everything end."""
        for act in self.program.acts:
            if act.side == "victim" and self._without_victim:
                continue
            self.core.sweep()
            getattr(self, f"_do_{act.kind}")(act)
        while self.core.has_work and self._steps < _MAX_STEPS:
            self._step()
        assert not self.core.has_work, f"requests are left after {_MAX_STEPS} steps"
        # The last look is at the same time in every world, however long the others took.
        self._now += _MAX_STEPS - self._steps
        self._steps = _MAX_STEPS
        self.core.sweep()
        self._do_stats(Act("stats", "attacker"))

    # -- seeing ------------------------------------------------------------------------------------------------------

    def _see(self, side: str, *what: Any) -> None:
        if side == "attacker":
            self.trace.append((self._steps, *what))

    def _count(self, act: Act, event: Event) -> None:
        """Note what a victim got but for its words, with the ids of its replies as they would be in world 1."""
        if act.side == "victim" and isinstance(event, ChatResult):
            ids = [[self._ids_back.get(i, i) for i in choice.token_ids] for choice in event.choices]
            self.victims_numbers.append((self._steps, act.chat, event.usage, ids))

    def _sink(self, act: Act, talk: _Talk | None) -> Callable[[Event], None]:
        def sink(event: Event) -> None:
            if isinstance(event, Delta):
                self._see(act.side, act.chat, "delta", event.index, event.text, event.token_ids, event.finish_reason)
                event = event.result if event.result is not None else event
            if isinstance(event, Delta):
                return
            if talk is not None:
                talk.live = None
            self._count(act, event)
            if isinstance(event, ChatResult):
                self._see(act.side, act.chat, "result", repr(event.usage), repr(event.report), repr(event.choices))
                if talk is not None and act.kind in ("turn", "again"):
                    talk.turns.append({"role": "assistant", "content": event.text or "."})
            elif isinstance(event, Publication):
                self._publications[act.side].append(event.id)
                self._see(act.side, "published", event.tokens, event.blocks, event.bytes)
            else:
                self._see(act.side, act.chat, "error", type(event).__name__, str(event))

        return sink

    def _try(self, act: Act, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except PrefixKVError as error:
            self._see(act.side, act.chat, "refused", type(error).__name__, str(error))
        return None

    # -- saying ------------------------------------------------------------------------------------------------------

    def _said(self, side: str, value: Any) -> Any:
        """Return what a side says in this world: the victim's words renamed."""
        if side != "victim" or not self._renaming:
            return value
        if isinstance(value, str):
            return value.translate(self._renaming)
        if isinstance(value, Mapping):
            return {key: self._said(side, part) for key, part in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._said(side, part) for part in value)
        return value

    def _messages(self, talk: _Talk) -> list[dict[str, Any]]:
        system = self._said(talk.chat.side, talk.chat.system)
        head = [] if system is None else [{"role": "system", "content": system}]
        return head + copy.deepcopy(talk.turns)

    def _submit(self, act: Act, talk: _Talk, guess: Guess) -> None:
        sampling = SamplingParams(max_tokens=act.options["max_tokens"], temperature=0, n=act.options["n"])
        principal, sink = talk.chat.principal, self._sink(act, talk)

        def build() -> LiveRequest:
            if guess.ids is not None:
                return self._builder.text(list(guess.ids), principal, sampling, None, sink)
            item = ChatRequest(guess.messages, principal, guess.tools, _slots(guess), sampling)
            return self._builder.chat(item, sink, streams=act.options["streams"])

        request = self._try(act, build)
        if request is not None:
            talk.live, talk.last_ids, talk.last_slot = request, request.prompt.token_ids, guess.slot
            self.core.add(request)

    def _do_turn(self, act: Act) -> None:
        talk = self._talks[act.chat]
        if talk.live is not None or len(talk.turns) > 7:
            return
        talk.turns.append({"role": "user", "content": self._said(act.side, act.text)})
        slot = self._said(act.side, act.options["slot"])
        self._submit(act, talk, Guess(self._messages(talk), self._said(act.side, talk.chat.tools), slot, None))

    def _do_again(self, act: Act) -> None:
        talk = self._talks[act.chat]
        if talk.live is None and talk.turns:
            while talk.turns[-1]["role"] == "assistant":
                talk.turns.pop()
            slot = self._said(act.side, act.options["slot"])
            self._submit(act, talk, Guess(self._messages(talk), self._said(act.side, talk.chat.tools), slot, None))

    def _do_text(self, act: Act) -> None:
        talk = self._talks[act.chat]
        if talk.live is None:
            ids = canary_model()[0].tokenizer.encode(self._said(act.side, act.text))
            self._submit(act, talk, Guess([], None, "", tuple(ids)))

    def _do_probe(self, act: Act) -> None:
        guess = self._guess(act) if self._replay is None else next(self._replay)
        self.guesses.append(guess)
        talk = self._talks[act.chat]
        if act.options["explain"]:
            self._explain(act, guess)
        elif talk.live is None:
            self._submit(act, talk, guess)

    def _guess(self, act: Act) -> Guess:
        """Copy what the victim's conversation holds by now, replies included, to some point, and go on otherwise."""
        talk = self._talks[act.target]
        keep, change = act.options["keep"], act.options["change"]
        if act.options["ids"] and talk.last_ids:
            ids = talk.last_ids[: max(1, int(keep * len(talk.last_ids)))]
            return Guess([], None, "", ids)
        messages = self._messages(talk)
        messages = messages[: max(1, round(keep * len(messages)))]
        messages += [] if messages and messages[-1]["role"] == "user" else [{"role": "user", "content": "be kind"}]
        last = messages[-1]["content"]
        messages[-1]["content"] = last[: max(1, int(keep * len(last)))] + change
        slot = talk.last_slot if act.options["knows_slot"] else None
        return Guess(messages, talk.chat.tools, slot or act.options["slot"], None)

    # -- doing -------------------------------------------------------------------------------------------------------

    def _explain(self, act: Act, guess: Guess) -> None:
        principal = self._talks[act.chat].chat.principal
        item = ChatRequest(guess.messages or [{"role": "user", "content": "be"}], principal, guess.tools, _slots(guess))
        made = self._try(act, lambda: self._builder.chat_prompt(item))
        if made is not None:
            self._see(act.side, act.chat, "explained", repr(self.core.explain(made[0], made[1], principal)))

    def _do_explain(self, act: Act) -> None:
        talk = self._talks[act.chat]
        slot = self._said(act.side, act.options["slot"])
        self._explain(act, Guess(self._messages(talk), self._said(act.side, talk.chat.tools), slot, None))

    def _do_cancel(self, act: Act) -> None:
        live = self._talks[act.chat].live
        if live is not None:
            self.core.abort(live)
            self._talks[act.chat].live = None

    def _do_end_session(self, act: Act) -> None:
        principal = self._talks[act.chat].chat.principal
        self._see(act.side, act.chat, "ended", self.core.end_session(principal))

    def _do_purge(self, act: Act) -> None:
        who: Principal = self._talks[act.chat].chat.principal
        names = (who.tenant, who.user, who.session)[: act.options["depth"]]
        receipt = self.core.purge(*names, *[None] * (3 - len(names)))
        self._see(act.side, act.chat, "purged", repr(receipt))

    def _do_publish(self, act: Act) -> None:
        messages = [{"role": "system", "content": self._said(act.side, act.text)}]
        tools, tenant = self._said(act.side, act.options["tools"]), act.options["tenant"]
        request = self._try(act, lambda: self._builder.publication(messages, tools, tenant, self._sink(act, None)))
        if request is not None:
            self.core.add(request)

    def _do_unpublish(self, act: Act) -> None:
        own = self._publications[act.side]
        if own:
            self._see(act.side, "unpublished", self.core.unpublish(own.pop(0)))

    def _do_reload(self, act: Act) -> None:
        self._try(act, lambda: self.core.reload(PolicySet.load(self.program.policies[act.options["which"]])))

    def _do_sleep(self, act: Act) -> None:
        self._now += act.options["seconds"]

    def _do_stats(self, act: Act) -> None:
        if self.program.attacker_tenant:
            self._see("attacker", "stats", repr(self.core.tenant_stats(self.program.attacker_tenant)))

    def _do_step(self, act: Act) -> None:
        for _ in range(act.options["count"]):
            self._step()

    def _step(self) -> None:
        self._now += 1
        self._steps += 1
        self.core.sweep()
        if self.core.has_work:
            self.core.step()


def run_world(
    program: Program,
    renaming: Mapping[int, int],
    guesses: list[Guess] | None = None,
    *,
    without_victim: bool = False,
) -> World:
    """Run one world to its end and return it."""
    world = World(program, renaming, guesses, without_victim)
    world.run()
    return world


def _slots(guess: Guess) -> dict[str, str] | None:
    """Return the slot's value where the messages ask for it: an unused one is refused."""
    asked = any("{{slot:who}}" in str(message["content"]) for message in guess.messages)
    return {"who": guess.slot} if asked else None
