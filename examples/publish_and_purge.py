"""Compute a tenant's system prompt before its first user comes; destroy what a user left behind.

Run: python examples/publish_and_purge.py
"""

from prefixkv import Engine, Principal, SamplingParams

SYSTEM = {"role": "system", "content": "You are the assistant of a small bicycle shop. Be brief and friendly. " * 4}


def main() -> None:
    with Engine.from_pretrained("demo") as engine:
        published = engine.publish([SYSTEM], tenant="acme")  # without tenant=: for every tenant, so nothing private
        print(f"published {published.tokens} tokens in {published.blocks} blocks, pinned until unpublish")

        ann = Principal("acme", user="ann", session="s1")
        messages = [SYSTEM, {"role": "user", "content": "I live at 12 Mill Lane. Do you deliver?"}]
        result = engine.chat(messages, principal=ann, sampling=SamplingParams(max_tokens=12, temperature=0))
        print(f"ann's first request: {result.usage.cached_tokens} of {result.usage.prompt_tokens} tokens cached")

        before = engine.explain(messages, principal=ann).cached_tokens
        receipt = engine.purge(tenant="acme", user="ann")  # when it returns, the rows are zeros
        after = engine.explain(messages, principal=ann).cached_tokens
        print(f"purge destroyed {receipt.blocks} blocks; ann's prompt had {before} tokens cached, now {after}")

        engine.unpublish(published)  # from now on the blocks may be evicted like any others
        engine.check()


if __name__ == "__main__":
    main()
