"""The command line, ``prefixkv COMMAND``. Each command is a module, imported when asked for: help needs no torch."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from prefixkv import __version__
from prefixkv.errors import PrefixKVError

__all__ = ["main"]

_COMMANDS = (
    ("demo", "three tenants chat with a small model at the same time; shows what was reused"),
    ("chat", "talk to a model in the terminal; shows what was reused after each turn"),
    ("compile", "compiles the kernels for this machine now; an engine would do it in the background"),
    ("calibrate", "measures what each format of the cache costs in quality, on your own prompts"),
    ("templates", "shows what is known of chat templates, and what one of them costs in reuse"),
    ("policy", "shows what a policy file gives to each tenant, and its schema for an editor"),
    ("analyze", "replays your own requests: how much they repeat, and what loses the rest"),
)
_FAILED, _INTERRUPTED, _NO_READER = 2, 130, 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0, 1 if a check failed, 2 for a mistake with a name, 130 after Ctrl-C.

    Args:
        argv: Words after ``prefixkv``; None takes those of the process.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    options = _parser(words[0] if words else "").parse_args(words)
    try:
        return int(options.run(options))
    except PrefixKVError as error:
        print(f"prefixkv: {' '.join(str(error).split())}", file=sys.stderr)
        return _FAILED
    except KeyboardInterrupt:
        print("\nprefixkv: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:  # such as `prefixkv demo | head`; what is still in the buffer must not raise again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _NO_READER


def _parser(command: str) -> argparse.ArgumentParser:
    """Return the parser of all commands, with the options of one."""
    parser = argparse.ArgumentParser(prog="prefixkv", description="An LLM engine with KV-cache reuse for chat.")
    parser.add_argument("--version", action="version", version=f"prefixkv {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, summary in _COMMANDS:
        own = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        if name == command:
            module = import_module(f"prefixkv.cli.{name}")
            module.add_arguments(own)
            own.set_defaults(run=module.run)
    return parser
