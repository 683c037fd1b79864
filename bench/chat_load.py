"""A seeded chat load of several tenants, for timing engines on equal work.

Claim: none; other benchmarks take their requests from here.

``static``: the system prompt and tool text of a tenant never change. ``dynamic``: a clock and a nickname that change
with every request stand on the system prompt's first line. Assistant turns are fixed text, so every engine sees the
same prompts whatever it generates.

Run: python bench/chat_load.py        writes both loads to bench/results/load-*.json
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
SYLLABLES = (
    "ba co di fu ga hel in jo ka lo mi no or pe qua re so ti un ver wa yo zen tion ing ment able ly est er".split()
)


def _vocabulary(size: int = 900) -> list[str]:
    """Words that no tokenizer knows as a whole too often: one to three syllables, the same each time."""
    rng = random.Random(0)
    return ["".join(rng.choice(SYLLABLES) for _ in range(rng.choice((1, 2, 2, 3)))) for _ in range(size)]


def prose(words: int, rng: random.Random) -> str:
    """Return words of which no two texts share a beginning."""
    return " ".join("".join(rng.choices(SYLLABLES, k=2)) for _ in range(words))


def load(
    *,
    dynamic: bool,
    tenants: int = 4,
    users: int = 6,
    turns: int = 4,
    system_words: int = 300,
    tool_words: int = 150,
    user_words: int = 16,
    assistant_words: int = 26,
) -> list[dict[str, Any]]:
    """Return requests in order of arrival: tenant, user, session, turn, messages, slots.

    In the dynamic load the clock line is part of the system message; ``late_bound`` holds the same messages with that
    line moved to the front of the last user message, where it ruins nothing.
    """
    words = _vocabulary()

    def text(count: int, rng: random.Random) -> str:
        return " ".join(rng.choice(words) for _ in range(count))

    requests = []
    for tenant in range(tenants):
        rng = random.Random(1000 + tenant)
        system = f"{text(system_words, rng)}\n\n# Tools\n{text(tool_words, rng)}"
        for user in range(users):
            rng = random.Random(tenant * 100 + user)
            history: list[dict[str, str]] = []
            for turn in range(turns):
                clock = f"Current time: 2026-11-29 10:{user:02d}:{turn:02d}. User: user{user}-{tenant}.\n"
                question = {"role": "user", "content": text(user_words, rng)}
                first = {"role": "system", "content": clock + system if dynamic else system}
                late = [
                    {"role": "system", "content": system},
                    *history,
                    {"role": "user", "content": clock + question["content"]},
                ]
                history.append(question)
                requests.append(
                    {
                        "tenant": f"t{tenant}",
                        "user": f"u{user}",
                        "session": f"t{tenant}-u{user}",
                        "turn": turn,
                        "messages": [first, *history],
                        "late_bound": late if dynamic else None,
                    }
                )
                history.append({"role": "assistant", "content": text(assistant_words, rng)})
    return sorted(requests, key=lambda request: (request["turn"], request["user"], request["tenant"]))


def main() -> None:
    """Write both loads."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    for name in ("static", "dynamic"):
        path = RESULTS / f"load-{name}.json"
        requests = load(dynamic=name == "dynamic")
        path.write_text(json.dumps(requests), encoding="utf-8")
        print(f"{len(requests)} requests written to {path}")


if __name__ == "__main__":
    main()
