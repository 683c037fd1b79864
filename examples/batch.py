"""Answer many requests together: they are batched continuously, and their common prompt is computed once.

Run: python examples/batch.py
"""

from prefixkv import ChatRequest, Engine, Principal, SamplingParams

SYSTEM = "You sort customer messages. Answer with one word: praise, complaint or question. " * 4
MESSAGES = ("The bell works well, thanks!", "My brakes squeak again.", "Do you sell helmets?", "", "Great service.")


def main() -> None:
    with Engine.from_pretrained("demo") as engine:
        requests = [
            ChatRequest(
                [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text or None}],
                Principal("acme", user=f"customer-{number}"),
                sampling=SamplingParams(max_tokens=4, temperature=0),
            )
            for number, text in enumerate(MESSAGES)
        ]
        # Without return_exceptions the first bad request raises before any of them starts.
        for text, result in zip(MESSAGES, engine.chat_batch(requests, return_exceptions=True), strict=True):
            if isinstance(result, Exception):
                print(f"{text!r}: refused, {result}")
            else:
                print(f"{text!r}: {result.text!r}, {result.usage.computed_tokens} tokens computed")
        stats = engine.stats()
        print(f"{stats.cached_tokens} of {stats.prompt_tokens} prompt tokens came from the cache")


if __name__ == "__main__":
    main()
