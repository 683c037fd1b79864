"""Who is turned away and why; what is seen of those who stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModel, LlamaConfig
from transformers.masking_utils import causal_mask_function, chunked_causal_mask_function
from transformers.masking_utils import sliding_window_causal_mask_function as sliding

from prefixkv.attention.torch_ref import TorchBackend
from prefixkv.cache.spec import LayerSpec
from prefixkv.config import CacheConfig
from prefixkv.errors import UnsupportedModel
from prefixkv.model.hook import Attachment
from prefixkv.model.inspect import _window_of, max_context_tokens, observe, refuse_unsupported
from prefixkv.model.load import wrap
from prefixkv.model.runner import ModelRunner
from tests.support import REFUSED, WINDOW, byte_tokenizer, random_ids, stock_greedy, tiny_model

CACHE = CacheConfig(memory="2MiB", block_size=8)


@pytest.mark.parametrize("arch", sorted(REFUSED))
def test_a_model_that_cannot_be_exact_is_refused_with_the_reason(arch: str) -> None:
    """The reason names what is in the way, and the model is left as it was."""
    model = tiny_model(arch)
    name = model.config._attn_implementation
    with pytest.raises(UnsupportedModel, match=REFUSED[arch][2]) as caught:
        ModelRunner.build(wrap(model, byte_tokenizer()), CACHE)
    assert caught.value.reason == str(caught.value)
    assert model.config._attn_implementation == name


@pytest.mark.parametrize("arch", ["phi3_longrope", "llama_dynamic", "bloom"])
def test_a_refused_model_still_generates(arch: str) -> None:
    """Being refused by us must not cost the user their model."""
    model = tiny_model(arch)
    before = stock_greedy(model, random_ids(12), 6)
    with pytest.raises(UnsupportedModel):
        ModelRunner.build(wrap(model, byte_tokenizer()), CACHE)
    assert stock_greedy(model, random_ids(12), 6) == before


def test_a_body_without_a_head_is_refused() -> None:
    """AutoModel gives no logits."""
    config = LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=9)
    with pytest.raises(UnsupportedModel, match="AutoModelForCausalLM"):
        refuse_unsupported(AutoModel.from_config(config))


def test_a_bidirectional_model_is_refused() -> None:
    """Rows behind a token would change it."""
    with pytest.raises(UnsupportedModel, match="not causal"):
        refuse_unsupported(tiny_model("gemma3_text", use_bidirectional_attention=True))


def look(arch: str, **over: Any) -> Any:
    model = tiny_model(arch, **over)
    attachment = Attachment(model)
    try:
        return observe(model)
    finally:
        attachment.detach()


def test_shapes_windows_and_options_are_observed() -> None:
    """Grouped heads, alternating windows, softcap and sinks, from one short forward."""
    gemma = look("gemma2")
    assert gemma.layers == (LayerSpec(2, 16, 16),) * 2
    assert gemma.num_heads == (4, 4)
    assert gemma.windows == (WINDOW, None)
    assert (gemma.softcap, gemma.sinks) == (True, False)
    oss = look("gpt_oss")
    assert oss.windows == (WINDOW, None)
    assert (oss.softcap, oss.sinks) == (False, True)
    assert look("llama_mqa").layers == (LayerSpec(1, 16, 16),) * 2


def test_a_window_longer_than_any_test_is_still_seen() -> None:
    """The self-test cannot see a window of 4,096; the mask that the model asks for tells."""
    assert look("mistral", sliding_window=4096).windows == (4096, 4096)
    assert look("qwen2", use_sliding_window=True, sliding_window=777, max_window_layers=1).windows == (None, 777)


def test_masks_are_recognised_by_what_they_do() -> None:
    """Causal, sliding, and nothing else."""
    assert _window_of(causal_mask_function, None) is None
    assert _window_of(sliding(1), 1) == 1
    assert _window_of(sliding(4096), 4096) == 4096
    for mask in (chunked_causal_mask_function(8, torch.zeros(64, dtype=torch.long)), lambda b, h, q, k: q == q):
        with pytest.raises(UnsupportedModel, match="neither causal nor"):
            _window_of(mask, 8)
    with pytest.raises(UnsupportedModel, match="cannot be read"):
        _window_of(lambda b, h, q, k: torch.zeros(3)[q] > 0, None)


def test_the_context_limit_is_the_models() -> None:
    """Under whichever name the configuration keeps it."""
    assert max_context_tokens(tiny_model("llama", max_position_embeddings=99)) == 99
    assert max_context_tokens(tiny_model("gpt2", max_position_embeddings=64)) == 64


class _OffByOne(TorchBackend):
    """A backend with a small mistake."""

    def forward(self, layer: int, q: torch.Tensor, storage: Any, meta: Any, **options: Any) -> torch.Tensor:
        return super().forward(layer, q, storage, meta, **{**options, "window": 5})


class _Scaled(TorchBackend):
    def forward(self, layer: int, q: torch.Tensor, storage: Any, meta: Any, **options: Any) -> torch.Tensor:
        return super().forward(layer, q, storage, meta, **{**options, "scaling": options["scaling"] * 1.1})


@pytest.mark.parametrize("broken", [_OffByOne, _Scaled])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_self_test_catches_wrong_attention(monkeypatch: pytest.MonkeyPatch, broken: type, dtype: str) -> None:
    """What looking does not show, comparing does; the message holds the numbers."""
    monkeypatch.setattr("prefixkv.attention.select.NumbaBackend", broken)  # the one that is tried first
    model = tiny_model("llama").to(getattr(torch, dtype))
    with pytest.raises(UnsupportedModel, match=r"self-test failed.*by \d.*allowed"):
        ModelRunner.build(wrap(model, byte_tokenizer()), CACHE)
    assert model.config._attn_implementation == "sdpa"
