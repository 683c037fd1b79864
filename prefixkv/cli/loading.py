"""From the options of a command to an engine, saying what takes how long."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from prefixkv.config import CacheConfig, EngineConfig

if TYPE_CHECKING:
    from prefixkv.engine.engine import Engine

__all__ = ["add_model_arguments", "load_engine"]


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add to a parser the options that :func:`load_engine` reads."""
    parser.add_argument("--model", default="demo", help='"demo", a .gguf file, a folder or a hub id (default: demo)')
    parser.add_argument("--pool", default="256MiB", metavar="SIZE", help="memory for cached keys and values (256MiB)")
    parser.add_argument("--block-size", type=int, default=32, metavar="N", help="tokens per block (32)")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16 (default: as stored)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1 (default: the GPU if there is one)")


def load_engine(options: argparse.Namespace, say: Callable[[str], None]) -> Engine:
    """Start an engine as the options say.

    Args:
        options: Of a parser with :func:`add_model_arguments`.
        say: Takes one line as each part begins or ends.

    Raises:
        ConfigError: If an option is out of range or the model cannot be found.
        UnsupportedModel: If the model cannot be served exactly.
    """
    config = EngineConfig(
        cache=CacheConfig(memory=options.pool, block_size=options.block_size),
        dtype=options.dtype,
        device=options.device,
    )
    started = time.monotonic()
    say("importing torch and transformers")
    from prefixkv.engine.engine import Engine  # the slow import, after a wrong option has been refused

    say(f"imported ({time.monotonic() - started:.1f} s)")
    return Engine.from_pretrained(options.model, config=config, progress=say)
