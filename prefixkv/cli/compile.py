"""``prefixkv compile``: compile the CPU kernels ahead, such as while a container image is built."""

from __future__ import annotations

import argparse
import time
from importlib.util import find_spec

from prefixkv.errors import ConfigError

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to its parser: it has none."""


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit code.

    Raises:
        ConfigError: If numba is not installed or cannot be imported.
    """
    if find_spec("numba") is None:
        raise ConfigError("prefixkv compile: the kernels need numba: pip install prefixkv[cpu]")
    started = time.monotonic()
    print("compiling the CPU kernels", flush=True)
    try:
        from prefixkv.kernels.readiness import compile_now

        folder = compile_now()
    except ImportError as error:
        raise ConfigError(f"prefixkv compile: numba cannot be imported ({error})") from error
    where = f"kept in {folder}" if folder else "kept nowhere: no folder can be written, name one in NUMBA_CACHE_DIR"
    print(f"ready after {time.monotonic() - started:.1f} s; {where}")
    return 0
