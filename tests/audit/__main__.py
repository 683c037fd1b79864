"""Run many trials: python -m tests.audit --trials 10000 --seed 0."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from prefixkv.errors import PrefixKVError
from tests.audit.trial import run_trial

_KINDS = (("tenants", False), ("users", False), ("strict", False), ("strict", True))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run trials of all kinds in turn; return 1 if any showed something."""
    parser = argparse.ArgumentParser(prog="python -m tests.audit", description="two-worlds trials, see README.md")
    parser.add_argument("--trials", type=int, default=1000, help="how many, shared out over the kinds")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first of each kind")
    parser.add_argument("--kind", choices=("tenants", "users", "strict", "idle"), help="only this kind; default: all")
    options = parser.parse_args(arguments)
    kinds = [(kind, idle) for kind, idle in _KINDS if options.kind in (None, "idle" if idle else kind)]
    started, seen, found = time.monotonic(), 0, 0
    for number in range(options.trials):
        (kind, idle), seed = kinds[number % len(kinds)], options.seed + number // len(kinds)
        what: object = None
        try:
            outcome = run_trial(seed, kind, idle=idle)
            seen += outcome.num_observations
            what = None if outcome.is_clean else outcome
        except (AssertionError, PrefixKVError) as error:  # a world that never ends, or books that do not add up
            what = error
        if what is not None:
            found += 1
            print(f"\n--kind {'idle' if idle else kind} --seed {seed}: {what}", flush=True)
        if sys.stderr.isatty() or (number + 1) % 500 == 0:
            line = f"{number + 1} of {options.trials} trials, {found} that found something"
            print(line, end="\r" if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True)
    trials, seconds = options.trials, time.monotonic() - started
    print(f"{trials} trials, {seen} observations, {seconds:.0f} s: {found} found something")
    if not found and trials:
        bound = 1 - 0.05 ** (1 / trials)
        print(f"a difference in more than {bound:.3%} of such trials is excluded with 95 % confidence")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
