"""``prefixkv chat``: a chat in the terminal that shows what each turn reused. Reads a pipe as well."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import sys
import uuid
from typing import TYPE_CHECKING, Any

from prefixkv.cli.loading import add_model_arguments, load_engine
from prefixkv.config import SamplingParams
from prefixkv.errors import EngineClosed, PrefixKVError
from prefixkv.scope import Principal

if TYPE_CHECKING:
    from prefixkv.chat.explain import CacheReport
    from prefixkv.engine.engine import Engine
    from prefixkv.engine.result import ChatResult

__all__ = ["Chat", "add_arguments", "run"]

_HELP = "/explain what the last turn reused   /stats counters   /reset a new conversation   /quit"
# A reply may spell escape sequences, and a terminal would obey them.
_PRINTABLE = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's options to its parser."""
    add_model_arguments(parser)
    parser.add_argument("--tenant", default="local", help="tenant you speak as (local)")
    parser.add_argument("--user", default="me", help="user you speak as (me)")
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    parser.add_argument("--temperature", type=float, default=0.7, help="0 is greedy (0.7)")
    parser.add_argument("--max-tokens", type=int, default=256, metavar="N", help="longest reply (256)")


def run(options: argparse.Namespace) -> int:
    """Talk until /quit or the end of the input; returns 0."""
    sampling = SamplingParams(max_tokens=options.max_tokens, temperature=options.temperature)
    principal = Principal(options.tenant, user=options.user)
    with load_engine(options, lambda line: print(f"prefixkv: {line}", file=sys.stderr, flush=True)) as engine:
        for stream in (sys.stdin, sys.stdout):
            if isinstance(stream, io.TextIOWrapper):  # one byte that is no text must not end the program
                stream.reconfigure(errors="replace")
        is_terminal = sys.stdin.isatty()
        if is_terminal:
            print(_HELP)
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  # gives input() a history and line editing
        chat = Chat(engine, principal, sampling, options.system, is_dim=sys.stdout.isatty())
        while True:
            try:
                line = input("> " if is_terminal else "")
            except EOFError:
                break
            if not chat.take(line.strip()):
                break
    return 0


class Chat:
    """One conversation on standard output.

    Args:
        engine: Answers.
        principal: Who speaks; its session is replaced by one of our own.
        sampling: How replies are drawn.
        system: System prompt, or None.
        is_dim: Whether to print what is not the reply in a fainter colour.
    """

    def __init__(
        self, engine: Engine, principal: Principal, sampling: SamplingParams, system: str | None, *, is_dim: bool
    ) -> None:
        self._engine = engine
        self._sampling = sampling
        self._dim = ("\033[2m", "\033[0m") if is_dim else ("", "")
        self._opening: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        self._principal = principal
        self._start_session()

    def take(self, line: str) -> bool:
        """Carry out a command or answer a message; return whether to go on."""
        match line:
            case "":
                pass
            case "/quit":
                return False
            case "/explain":
                self._note(str(self._report) if self._report else "nothing has been asked in this conversation")
            case "/stats":
                self._print_stats()
            case "/reset":
                blocks = self._engine.end_session(self._principal)
                self._start_session()
                self._note(f"new conversation; {blocks} blocks of the old one are the first to be evicted")
            case _ if line.startswith("/"):
                self._note(_HELP)
            case _:
                self._answer(line)
        return True

    def _start_session(self) -> None:
        self._principal = dataclasses.replace(self._principal, session=uuid.uuid4().hex)
        self._messages = list(self._opening)
        self._report: CacheReport | None = None

    def _answer(self, question: str) -> None:
        """Stream the reply; Ctrl-C ends it and keeps what was said, an error takes the question back."""
        asked = [*self._messages, {"role": "user", "content": question}]
        said: list[str] = []
        result: ChatResult | None = None
        try:
            with self._engine.stream(asked, principal=self._principal, sampling=self._sampling) as stream:
                for delta in stream:
                    said.append(delta.text)
                    print(delta.text.translate(_PRINTABLE), end="", flush=True)
                result = stream.result
        except KeyboardInterrupt:
            self._note("\n(cancelled)")
        except EngineClosed:
            raise
        except PrefixKVError as error:
            self._note(("\n" if said else "") + f"{error} (/reset starts a new conversation)")
            return
        if text := "".join(said):
            self._messages = [*asked, {"role": "assistant", "content": text}]
        if result is not None:
            self._report = result.report
            self._print_costs(result)

    def _print_costs(self, result: ChatResult) -> None:
        usage, timings = result.usage, result.timings
        self._note(
            f"\nprompt {usage.prompt_tokens}  cached {usage.cached_tokens}  computed {usage.computed_tokens} tokens"
            f"  first token {timings.ttft_s * 1000:.0f} ms  {timings.tokens_per_s:.1f} tokens/s"
        )

    def _print_stats(self) -> None:
        stats = self._engine.stats()
        fields = [(field.name, getattr(stats, field.name)) for field in dataclasses.fields(stats)]
        lines = [f"{name:<18} {', '.join(value) if isinstance(value, tuple) else value}" for name, value in fields]
        self._note("\n".join([*lines, f"{'hit_rate':<18} {stats.hit_rate:.1%}"]))

    def _note(self, text: str) -> None:
        before, after = self._dim
        print(f"{before}{text}{after}", flush=True)
