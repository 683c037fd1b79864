"""Can a stopwatch tell one tenant what another has cached?

Claim: no. A prompt that a victim has just sent and one that nobody sent take an attacker of another scope the same time
to the first token: the median of the paired differences, with its 99 % interval, lies within a quarter of the time that
one block takes to prefill, which is what an attack that guesses block by block has to tell apart. The positive control,
a caller who may share the victim's text, must be seen at once, else the measurement proves nothing.

In each pair the attacker sends the victim's prompt, or the first part of it followed by other words, and a prompt of
the same length that nobody sent, in random order; before each of them the victim sends a prompt of its own. Attackers:
another tenant; another user of the victim's tenant; another session of the same user. All texts have the same number
of tokens: how long others' prompts are is not what is asked. Differences are paired, since times drift; tests are
one-sided Wilcoxon signed-rank tests with Holm's correction.

Source: the audits of prompt caches by Gu et al. (arXiv 2502.07776); pairing, the equivalence bound and the control are
ours.

Run: python bench/timing_audit.py --pairs 1000        on an otherwise idle machine
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections import Counter
from typing import Any

from chat_load import prose
from prefix_reuse import RESULTS, describe_machine

from prefixkv import CacheConfig, Engine, EngineConfig, Principal, SamplingParams
from prefixkv.model.load import load_tokenizer

VICTIM = Principal("victim", user="ann", session="1")
PROBERS = {
    "another tenant": Principal("attacker", user="eve", session="1"),
    "another user": Principal("victim", user="eve", session="1"),
    "another session": Principal("victim", user="ann", session="2"),
    "control: the victim itself": VICTIM,
}
ALPHA = 1e-3
RESAMPLES = 4000


class Texts:
    """Random texts of one number of tokens: all words are equally long in tokens."""

    def __init__(self, words: int, rng: random.Random) -> None:
        tokenizer = load_tokenizer("demo")
        lengths = {word: len(tokenizer.encode(f" {word}")) for word in prose(5000, random.Random(0)).split()}
        usual = Counter(lengths.values()).most_common(1)[0][0]
        self._known = sorted(word for word, length in lengths.items() if length == usual)
        self._words, self._rng = words, rng

    def new(self, beginning: str = "", share: float = 0.0) -> str:
        """Return a text that nobody sent, but for a share of another one that it begins with."""
        kept = beginning.split()[1 : 1 + round(share * self._words)]
        return " ".join(["Text:", *kept, *self._rng.choices(self._known, k=self._words - len(kept))])


def first_token_ms(engine: Engine, text: str, who: Principal) -> float:
    """Send a prompt and return the milliseconds to its first and only token, by the caller's clock.

    The engine's own figure begins when the prompt is tokenised, and what was sent before can make that faster.
    """
    # The text is a user's turn: by default its session's own. The system text is the tenant's, and short.
    messages = [{"role": "system", "content": "Answer."}, {"role": "user", "content": text}]
    started = time.perf_counter()
    engine.chat(messages, principal=who, sampling=SamplingParams(max_tokens=1, temperature=0, ignore_eos=True))
    return (time.perf_counter() - started) * 1000


def wilcoxon_p(differences: list[float]) -> float:
    """Return the one-sided p-value that differences are below 0: Wilcoxon's signed-rank test, normal approximation.

    Source: Wilcoxon (1945); with ranks shared by ties and zeros left out.
    """
    ranked = sorted((abs(d), d < 0) for d in differences if d)
    below = squares = 0.0
    position = 0
    while position < len(ranked):
        end = position
        while end < len(ranked) and ranked[end][0] == ranked[position][0]:
            end += 1
        rank = (position + 1 + end) / 2
        for _, is_below in ranked[position:end]:
            below += rank * is_below
            squares += rank * rank
        position = end
    total = len(ranked) * (len(ranked) + 1) / 2
    if not squares:
        return 1.0
    z = (below - total / 2) / math.sqrt(squares / 4)
    return 0.5 * math.erfc(z / math.sqrt(2))


def interval(differences: list[float], rng: random.Random, level: float = 0.99) -> tuple[float, float]:
    """Return the bootstrap interval of the median."""
    size = len(differences)
    medians = sorted(statistics.median(rng.choices(differences, k=size)) for _ in range(RESAMPLES))
    cut = (1 - level) / 2
    return medians[int(cut * RESAMPLES)], medians[int((1 - cut) * RESAMPLES) - 1]


def measure(engine: Engine, options: argparse.Namespace, rng: random.Random) -> dict[tuple[str, float], list[float]]:
    """Return the paired differences, a guessed prompt's time less an unknown one's, of each prober and share."""
    found: dict[tuple[str, float], list[float]] = {(name, share): [] for name in PROBERS for share in options.shares}
    cases, texts = list(found), Texts(options.words, rng)
    for pair in range(options.pairs):
        rng.shuffle(cases)
        for name, share in cases:
            difference = 0.0
            for sign in rng.sample((1, -1), 2):
                secret = texts.new()
                # Both are made in both cases and before: what differs between the two must be the text alone, and the
                # engine's thread, which ends its step meanwhile, feels any work that is done here.
                guess, other = texts.new(secret, share), texts.new()
                probe = guess if sign > 0 else other
                first_token_ms(engine, secret, VICTIM)
                difference += sign * first_token_ms(engine, probe, PROBERS[name])
            found[name, share].append(difference)
        if sys.stderr.isatty() or (pair + 1) % 100 == 0:
            print(f"\r{pair + 1} of {options.pairs} pairs", end="", file=sys.stderr, flush=True)
    return found


def block_ms(engine: Engine, options: argparse.Namespace, rng: random.Random) -> float:
    """Return how long one more block of a prompt takes: the difference of a long and a half prompt, by block."""
    times: dict[int, list[float]] = {options.words: [], options.words // 2: []}
    texts = {count: Texts(count, rng) for count in times}
    tokens: dict[int, int] = {}
    for number in range(30):
        for count, own in times.items():
            who = Principal("ruler", session=f"{number}-{count}")
            text = texts[count].new()
            own.append(first_token_ms(engine, text, who))
            tokens[count] = engine.explain([{"role": "user", "content": text}], principal=who).prompt_tokens
    more = tokens[options.words] - tokens[options.words // 2]
    cost = statistics.median(times[options.words]) - statistics.median(times[options.words // 2])
    return cost / more * engine.config.cache.block_size


def judge(found: dict[tuple[str, float], list[float]], bound_ms: float, rng: random.Random) -> list[dict[str, Any]]:
    """Return what each set of differences says. Holm: the smallest p-value is compared with the strictest level."""
    rows = []
    p_values = {case: wilcoxon_p(values) for case, values in found.items()}
    attacks = sorted((case for case in found if not case[0].startswith("control")), key=lambda case: p_values[case])
    levels = {case: ALPHA / (len(attacks) - place) for place, case in enumerate(attacks)}
    for (name, share), values in found.items():
        low, high = interval(values, rng)
        is_control = name.startswith("control")
        seen = p_values[name, share] < levels.get((name, share), ALPHA)
        within = -bound_ms < low and high < bound_ms
        verdict = (
            ("found, as it must be" if seen else "NOT FOUND: the measurement is blind")
            if is_control
            else (
                "FOUND: a leak" if seen else "none, within the bound" if within else "none found, but beyond the bound"
            )
        )
        rows.append(
            {"prober": name, "share": share, "median_ms": statistics.median(values), "interval_ms": [low, high],
             "p": p_values[name, share], "verdict": verdict}
        )  # fmt: skip
    return rows


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=100, help="per prober and share (100; 1000 for a release)")
    parser.add_argument("--words", type=int, default=24, help="of each prompt (24)")
    parser.add_argument("--shares", type=float, nargs="+", default=[1.0, 0.5], help="of the prompt that is guessed")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    command, machine = " ".join(["python", *sys.argv]), describe_machine()
    with Engine.from_pretrained("demo", config=EngineConfig(cache=CacheConfig(memory="256MiB"))) as engine:
        for number in range(10):  # so that the pool's memory and the compiled steps are warm
            first_token_ms(engine, prose(options.words, rng), Principal("warm", session=str(number)))
        bound_ms = block_ms(engine, options, rng) / 4
        rows = judge(measure(engine, options, rng), bound_ms, rng)
    lines = [
        f"{command}\n",
        f"{options.pairs} pairs each; bound: a quarter of a block's prefill, {bound_ms:.3f} ms\n",
        "| who guesses | of the prompt | median difference | 99 % interval | p | verdict |",
        "| --- | ---: | ---: | ---: | ---: | --- |",
        *(
            f"| {row['prober']} | {row['share']:.0%} | {row['median_ms']:+.3f} ms | {row['interval_ms'][0]:+.3f} to "
            f"{row['interval_ms'][1]:+.3f} | {row['p']:.1e} | {row['verdict']} |"
            for row in rows
        ),
    ]
    print("\n".join(lines))
    RESULTS.mkdir(parents=True, exist_ok=True)
    record = {"command": command, "machine": machine, "pairs": options.pairs, "bound_ms": bound_ms, "rows": rows}
    (RESULTS / "timing_audit.json").write_text(json.dumps(record, indent=2) + "\n", "utf-8")
    (RESULTS / "timing_audit.md").write_text("\n".join(lines) + "\n", "utf-8")
    print(f"written to {RESULTS / 'timing_audit.json'} and timing_audit.md")


if __name__ == "__main__":
    main()
