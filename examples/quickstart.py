"""Two turns of one chat; the second computes only what is new.

Run: python examples/quickstart.py
"""

from prefixkv import Engine, Principal, SamplingParams

SYSTEM = "You are the assistant of a small bicycle shop. Answer in one or two short sentences. " * 4


def main() -> None:
    with Engine.from_pretrained("demo") as engine:
        principal = Principal("acme", user="u1", session="s1")
        sampling = SamplingParams(max_tokens=24, temperature=0)
        messages = [{"role": "system", "content": SYSTEM}]
        for question in ("How often should I oil the chain?", "And how do I clean it?"):
            messages.append({"role": "user", "content": question})
            result = engine.chat(messages, principal=principal, sampling=sampling)
            messages.append(result.message)
            usage = result.usage
            print(f"user: {question}\nassistant: {result.text}")
            print(f"  prompt {usage.prompt_tokens}, cached {usage.cached_tokens}, computed {usage.computed_tokens}\n")
        print(result.report)


if __name__ == "__main__":
    main()
