"""Print a reply as it is generated, then break another one off: its blocks are free at once.

Run: python examples/streaming.py
"""

from prefixkv import Engine, Principal, SamplingParams


def main() -> None:
    with Engine.from_pretrained("demo") as engine:
        principal = Principal("acme", user="u1", session="s1")
        messages = [{"role": "user", "content": "Name three planets and say one thing about each."}]

        for delta in engine.stream(messages, principal=principal, sampling=SamplingParams(max_tokens=32)):
            print(delta.text, end="", flush=True)
            if delta.usage is not None:  # the last delta
                print(f"\n[{delta.finish_reason}: {delta.usage}]")

        # Leaving the block before the end cancels the request, whatever the reason: break, return or an exception.
        with engine.stream(messages, principal=principal, sampling=SamplingParams(max_tokens=2_000)) as stream:
            first = next(stream)
        print(f"broken off after {len(first.token_ids)} token")
        stats = engine.stats()
        print(f"running {stats.running}, waiting {stats.waiting}, aborted {stats.aborted}")


if __name__ == "__main__":
    main()
