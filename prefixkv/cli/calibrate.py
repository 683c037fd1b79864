"""``prefixkv calibrate``: what each pool format costs, measured on your own prompts, and how it costs less."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefixkv.chat.messages import check_messages, check_text, check_tools
from prefixkv.config import KV_FORMATS
from prefixkv.errors import ConfigError, InvalidRequest

if TYPE_CHECKING:
    from prefixkv.kv.calibration import PoolCalibration
    from prefixkv.model.load import LoadedModel

__all__ = ["Source", "add_arguments", "read_sources", "run", "tokenise"]

_FEWEST_TOKENS = 32
_LINE_FILES = (".jsonl", ".ndjson", ".json")


@dataclass(frozen=True, slots=True)
class Source:
    """A prompt as it was read: a chat, or text.

    Attributes:
        where: File, and line if it is one of many, for messages to the user.
        text: The text; None for a chat.
        chat: ``messages`` and where given ``tools`` and ``slots``; empty for text.
        is_file: Whether the text is a whole file, which may be cut into several prompts.
    """

    where: str
    text: str | None
    chat: dict[str, Any]
    is_file: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's options to its parser."""
    parser.add_argument(
        "prompts",
        nargs="+",
        metavar="FILE",
        help='.jsonl with a {"messages": [...]} (also "tools", "slots") or {"text": "..."} a line, or plain text',
    )
    parser.add_argument("--model", default="demo", help='"demo", a .gguf file, a folder or a hub id (default: demo)')
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="default: as stored; float32 leaves the rounding of 16 bits out of the figures",
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1 (default: the GPU if there is one)")
    parser.add_argument("--formats", default="int8,k8v4,k4v8,int4", help="formats to measure (int8,k8v4,k4v8,int4)")
    parser.add_argument("--max-prompts", type=int, default=32, metavar="N", help="prompts to read (32)")
    parser.add_argument("--max-tokens", type=int, default=1024, metavar="N", help="tokens to keep of each (1024)")
    parser.add_argument("--json", metavar="OUT", help="write the whole report, every head included, to this file")
    parser.add_argument("--write", metavar="OUT", help="calibrate a pool on the prompts, write it for CacheConfig")
    parser.add_argument("--for", dest="pool", metavar="FORMAT", help="the format of that pool (int4)")


def run(options: argparse.Namespace) -> int:
    """Measure, print the report and write what is asked for; returns 0."""
    pool = _pool(options.pool, options.write)
    formats = _formats(options.formats)
    if pool is not None and pool not in formats:
        formats = (*formats, pool)
    if options.max_prompts < 1:
        raise ConfigError(f"--max-prompts {options.max_prompts}: must be 1 or more")
    if options.max_tokens < _FEWEST_TOKENS:
        raise ConfigError(f"--max-tokens {options.max_tokens}: must be {_FEWEST_TOKENS} or more")
    for option, name in (("--json", options.json), ("--write", options.write)):
        if name is not None and (Path(name).expanduser().is_dir() or not Path(name).expanduser().parent.is_dir()):
            raise ConfigError(f"{option} {name}: there is no such folder, or it is one; give a file to write")
    sources = read_sources(options.prompts, options.max_prompts)
    _say("importing torch and transformers")
    started = time.monotonic()
    from prefixkv.model.calibrate import (
        calibrate,
        calibrate_pool,
    )  # the slow import, after a wrong option or line has been refused
    from prefixkv.model.load import load

    _say(f"imported ({time.monotonic() - started:.1f} s)")
    loaded = load(options.model, dtype=options.dtype, device=options.device, progress=_say)
    prompts = tokenise(sources, loaded, options.max_tokens)[: options.max_prompts]
    _say(f"measuring {', '.join(formats)} on {len(prompts)} prompts of {sum(map(len, prompts))} tokens together")
    if pool is None:
        report = calibrate(loaded, prompts, formats, progress=_say)
    else:
        report, made = calibrate_pool(loaded, prompts, formats, pool, progress=_say)
    print(f"\n{report}", flush=True)
    if options.json is not None:
        _write("--json", options.json, report.to_json() + "\n")
    if pool is not None:
        _write("--write", options.write, made.to_json())
        print(f"\n{_account(made, options.write)}", flush=True)
    return 0


def read_sources(names: Sequence[str], limit: int) -> list[Source]:
    """Return the first prompts of some files, in order; at most ``limit``.

    Args:
        names: Files. One whose name ends in .jsonl, .ndjson or .json has a prompt per line; others are one text each.
        limit: Most prompts to read.

    Raises:
        ConfigError: If a file cannot be read or there is no prompt in any.
        InvalidRequest: ``bad_line`` and what the checks of messages find, with file and line; never quotes them.
    """
    found: list[Source] = []
    for name in names:
        try:
            found.extend(islice(_read(Path(name).expanduser()), limit - len(found)))
        except OSError as error:
            raise ConfigError(f"{name}: cannot be read ({error.strerror})") from None
    if not found:
        raise ConfigError(f"{', '.join(names)}: no prompts found; give one JSON object per line, or text")
    return found


def tokenise(sources: Sequence[Source], loaded: LoadedModel, max_tokens: int) -> list[list[int]]:
    """Return token ids, each prompt cut to ``max_tokens``; a file of text gives as many prompts as it fills.

    Chats are rendered as the engine renders them, all turns, without the header of a reply to come.

    Raises:
        InvalidRequest: If the template refuses a chat; with file and line.
    """
    from prefixkv.chat.segmenter import Segmenter
    from prefixkv.policy import TenantPolicy

    segmenter = Segmenter(loaded.tokenizer, vocab_tokens=loaded.vocab_size)
    policy = TenantPolicy()
    prompts: list[list[int]] = []
    for source in sources:
        try:
            if source.text is None:
                made = segmenter.segment(**source.chat, policy=policy, add_generation_prompt=False)
            else:
                made = segmenter.segment_text(source.text, policy=policy)
        except InvalidRequest as error:
            raise _at(source.where, error) from None
        ids = list(made.token_ids)
        pieces = range(0, len(ids), max_tokens) if source.is_file else (0,)
        prompts.extend(ids[start : start + max_tokens] for start in pieces)
    return prompts


def _read(path: Path) -> Iterator[Source]:
    if path.suffix.lower() not in _LINE_FILES:
        text = _decode(path.read_bytes(), path.name)
        if text.strip():
            yield Source(path.name, text, {}, is_file=True)
        return
    with path.open("rb") as lines:
        for number, raw in enumerate(lines, 1):
            where = f"{path.name}:{number}"
            if line := _decode(raw, where).strip():
                yield _parse(line, where)


def _decode(raw: bytes, where: str) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InvalidRequest("bad_line", where, "is not UTF-8 text") from None


def _parse(line: str, where: str) -> Source:
    """Return one line's prompt; what json says of a mistake is left out, for it may be shown to others."""
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict):
        raise InvalidRequest("bad_line", where, "is not a JSON object")
    if ("messages" in data) == ("text" in data):
        raise InvalidRequest("bad_line", where, 'needs either "messages" or "text"')
    try:
        if "text" in data:
            if not isinstance(data["text"], str) or not data["text"]:
                raise InvalidRequest("bad_line", "text", "must be text, and not empty")
            return Source(where, check_text(data["text"], "text"), {})
        chat = {"messages": check_messages(data["messages"]), "tools": check_tools(data.get("tools"))}
    except InvalidRequest as error:
        raise _at(where, error) from None
    return Source(where, None, {**chat, "slots": data.get("slots")})


def _at(where: str, error: InvalidRequest) -> InvalidRequest:
    return InvalidRequest(error.code, f"{where}: {error.path}", error.hint)


def _formats(words: str) -> tuple[str, ...]:
    names = tuple(word.strip() for word in words.split(","))
    unknown = [name for name in names if name not in KV_FORMATS]
    if unknown or len(set(names)) != len(names):
        raise ConfigError(f"--formats {words}: give some of {', '.join(KV_FORMATS)}, each once, with commas between")
    return names


def _pool(name: str | None, out: str | None) -> str | None:
    """Return the format to calibrate a pool of, or None if none is asked for."""
    if out is None:
        if name is not None:
            raise ConfigError(f"--for {name}: needs --write FILE too")
        return None
    quantised = [known for known in KV_FORMATS if known != "model"]
    if name is not None and name not in quantised:
        raise ConfigError(f"--for {name}: give one of {', '.join(quantised)}")
    return name or "int4"


def _write(option: str, name: str, text: str) -> None:
    try:
        Path(name).expanduser().write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{option} {name}: cannot be written ({error.strerror})") from None


def _account(made: PoolCalibration, name: str) -> str:
    """Return what was written and how to use it."""
    offsets = "no mean keys" if made.key_offsets is None else "the mean key of every head"
    raised = [f"layer {one.layer} head {one.kv_head} to {one.kv_format}" for one in made.heads]
    return (
        f"wrote {name} (measured as {made.kv_format}*): {offsets}; {len(raised)} heads raised"
        f"{': ' if raised else ''}{', '.join(raised)}\n"
        f"use it: CacheConfig(kv_format={made.kv_format!r}, calibration={name!r})"
    )


def _say(line: str) -> None:
    print(line, flush=True)
