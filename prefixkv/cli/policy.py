"""``prefixkv policy``: describes policy files to an editor, and tells what a policy file gives to whom."""

from __future__ import annotations

import argparse
import json
import os
import sys

from prefixkv.cli.policy_surprises import surprises
from prefixkv.cli.policy_words import PoolSize, details, overview, title
from prefixkv.config import parse_memory
from prefixkv.errors import ConfigError, PolicyError
from prefixkv.policy import PolicySet, json_schema

__all__ = ["add_arguments", "run"]

_BROKEN = 1
_BOLD, _YELLOW = "1", "33"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's options to its parser."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    actions.add_parser("schema", help="the JSON schema of a policy file, for an editor")
    check = actions.add_parser(
        "check",
        help="what a policy file gives to each tenant, and what in it may surprise; exit code 1 if it is broken",
    )
    check.add_argument("file", metavar="FILE", help=".yaml, .yml, .toml or .json")
    size = check.add_mutually_exclusive_group()
    size.add_argument("--memory", metavar="SIZE", help='the pool, such as "1GiB": shares are shown in bytes')
    size.add_argument("--blocks", type=int, metavar="N", help="the pool in blocks: amounts are shown in blocks")
    check.add_argument("--block-size", type=int, default=32, metavar="N", help="tokens of a block (32)")
    check.add_argument(
        "--block-bytes", type=int, metavar="N", help="bytes of a block, which engine.stats().block_bytes tells"
    )


def run(options: argparse.Namespace) -> int:
    """Print the schema, or what a file means; returns 0, or 1 for a broken file.

    Raises:
        ConfigError: If an option is out of range.
    """
    if options.action == "schema":
        print(json.dumps(json_schema(), indent=2))
        return 0
    pool = _pool(options)
    try:
        policies = PolicySet.load(options.file)
    except PolicyError as error:
        return _fail(str(error))
    is_coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR")

    def heading(text: str) -> str:
        return f"\x1b[{_BOLD}m{text}\x1b[0m" if is_coloured else text

    print(f"{heading(title(options.file, policies))}\n\n{overview(policies, pool)}")
    for names, lines in details(policies):
        print("\n" + heading(names), *(f"  {line}" for line in lines), sep="\n")
    word = f"\x1b[{_YELLOW}msurprising:\x1b[0m" if is_coloured else "surprising:"
    for number, line in enumerate(surprises(policies, pool)):
        print("\n" * (number == 0) + f"{word} {line}")
    sys.stdout.flush()
    try:
        pool.check(policies)
    except PolicyError as error:
        return _fail("\n".join(f"{options.file}: {line}" for line in str(error).splitlines()))
    return 0


def _fail(message: str) -> int:
    for line in message.splitlines():
        print(f"prefixkv: {line}", file=sys.stderr)
    return _BROKEN


def _pool(options: argparse.Namespace) -> PoolSize:
    for name in ("blocks", "block_size", "block_bytes"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: must be 1 or more")
    block_bytes: int | None = options.block_bytes
    if options.memory is None:
        if options.blocks is None and block_bytes is not None:
            raise ConfigError("--block-bytes: says nothing without --blocks or --memory")
        return PoolSize(options.blocks, options.block_size, block_bytes)
    memory = parse_memory(options.memory)
    if isinstance(memory, float):
        raise ConfigError(f'--memory {options.memory}: must be an amount, such as "1GiB"')
    if block_bytes is None:
        return PoolSize(None, options.block_size, None, memory)
    if memory < block_bytes:
        raise ConfigError(f"--memory {options.memory}: does not hold one block of {block_bytes} bytes")
    return PoolSize(memory // block_bytes, options.block_size, block_bytes)
