"""The model object belongs to its user: attached or not, it gives what it gave before."""

from __future__ import annotations

import threading

import pytest
import torch
from transformers import PreTrainedModel

from prefixkv.config import CacheConfig
from prefixkv.errors import IntegrityError, UnsupportedModel
from prefixkv.model.batch import Chunk
from prefixkv.model.hook import Attachment
from prefixkv.model.load import wrap
from prefixkv.model.runner import ModelRunner
from tests.support import SERVED, byte_tokenizer, random_ids, stock_greedy, tiny_model

CACHE = CacheConfig(memory="2MiB", block_size=8)


def padded_generate(model: PreTrainedModel) -> list[list[int]]:
    """A left-padded batch: this needs a real mask."""
    rows = [random_ids(15, 1), random_ids(6, 2), random_ids(11, 3)]
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0)
    return out[:, width:].tolist()


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.tensor([random_ids(20)])).logits


@pytest.mark.parametrize("arch", sorted(SERVED))
def test_the_users_model_gives_the_same_while_attached_and_after(arch: str) -> None:
    """Single prompts, left-padded batches and plain forwards, bit for bit."""
    model = tiny_model(arch)
    name = model.config._attn_implementation
    before = (stock_greedy(model, random_ids(20), 8), padded_generate(model), logits(model))
    runner = ModelRunner.build(wrap(model, byte_tokenizer()), CACHE)
    for _ in ("attached", "detached"):
        assert stock_greedy(model, random_ids(20), 8) == before[0]
        assert padded_generate(model) == before[1]
        assert torch.equal(logits(model), before[2])
        runner.close()
    assert model.config._attn_implementation == name


def test_eager_models_stay_eager() -> None:
    """A model loaded with eager attention gives attentions when asked, attached too."""
    model = tiny_model("llama")
    model.set_attn_implementation("eager")
    ids = torch.tensor([random_ids(9)])
    before = model(input_ids=ids, output_attentions=True).attentions
    runner = ModelRunner.build(wrap(model, byte_tokenizer()), CACHE)
    during = model(input_ids=ids, output_attentions=True).attentions
    assert len(during) == 2
    assert all(torch.equal(a, b) for a, b in zip(before, during, strict=True))
    runner.close()
    assert model.config._attn_implementation == "eager"


def test_the_user_may_generate_while_the_engine_runs() -> None:
    """The step is known to its own thread only."""
    model = tiny_model("mistral")
    want = stock_greedy(model, random_ids(20), 12)
    runner = ModelRunner.build(wrap(model, byte_tokenizer()), CACHE)
    prompt = random_ids(16, 7)
    ours = runner.execute([Chunk(prompt, 0, [0, 1], True)])
    stop, differed = threading.Event(), []

    def engine() -> None:
        while not stop.is_set():
            if not torch.equal(runner.execute([Chunk(prompt, 0, [0, 1], True)]), ours):
                differed.append(1)

    thread = threading.Thread(target=engine)
    thread.start()
    try:
        got = [stock_greedy(model, random_ids(20), 12) for _ in range(4)]
    finally:
        stop.set()
        thread.join()
    assert got == [want] * 4
    assert not differed


def test_two_engines_may_hold_one_model_and_the_last_restores_it() -> None:
    """Closing one engine must not pull the model from under the other."""
    model = tiny_model("llama")
    loaded = wrap(model, byte_tokenizer())
    first, second = ModelRunner.build(loaded, CACHE), ModelRunner.build(loaded, CACHE)
    prompt = random_ids(10)
    want = first.execute([Chunk(prompt, 0, [0, 1], True)])
    first.close()
    first.close()
    assert torch.equal(second.execute([Chunk(prompt, 0, [4, 2], True)]), want)
    assert model.config._attn_implementation == "prefixkv_sdpa"
    second.close()
    assert model.config._attn_implementation == "sdpa"


def test_an_exception_in_a_forward_leaves_nothing_active() -> None:
    """The next step works, and the user's own call is not mistaken for ours."""
    model = tiny_model("llama")
    want = stock_greedy(model, random_ids(20), 6)
    runner = ModelRunner.build(wrap(model, byte_tokenizer()), CACHE)
    prompt = random_ids(10)
    fine = runner.execute([Chunk(prompt, 0, [0, 1], True)])

    def fail(*args: object) -> None:
        raise RuntimeError("broken layer")

    handle = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="broken layer"):
        runner.execute([Chunk(prompt, 0, [2, 3], True)])
    handle.remove()
    assert stock_greedy(model, random_ids(20), 6) == want
    assert torch.equal(runner.execute([Chunk(prompt, 0, [0, 1], True)]), fine)


def test_a_skipped_layer_is_noticed() -> None:
    """If the user changes the attention implementation under a running engine, it raises; it never answers wrong.

    Not llama: its layers are run by the fused decoder, which does not ask for the implementation.
    """
    model = tiny_model("gpt2")
    runner = ModelRunner.build(wrap(model, byte_tokenizer()), CACHE)
    assert runner.decoder == "stock"
    model.set_attn_implementation("sdpa")
    with pytest.raises(IntegrityError, match="0 attention calls for 2 layers"):
        runner.execute([Chunk(random_ids(10), 0, [0, 1], True)])


def test_an_implementation_without_a_twin_is_refused_with_advice() -> None:
    """Others look at their own name in many places."""
    model = tiny_model("llama")
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(UnsupportedModel, match="attn_implementation='sdpa'"):
        Attachment(model)
    assert model.config._attn_implementation == "flex_attention"


def test_twins_are_named_so_that_transformers_does_not_interpret_them() -> None:
    """Names with 'flash', a slash or 'paged|' switch on other code paths."""
    model = tiny_model("llama")
    attachment = Attachment(model)
    name = model.config._attn_implementation
    assert not any(word in name for word in ("flash", "/", "paged|"))
    attachment.detach()
