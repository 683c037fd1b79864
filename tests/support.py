"""Models, tokenizers and plain greedy decoding for tests: real transformers objects, made here, nothing downloaded."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from prefixkv.errors import ConfigError
from prefixkv.model.batch import Chunk
from prefixkv.model.load import LoadedModel, demo_file, load
from prefixkv.model.runner import ModelRunner

VOCAB_SIZE = 320
WINDOW = 12

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_ALTERNATING = ["sliding_attention", "full_attention"]
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}

SERVED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_mha": ("llama", {"num_key_value_heads": 4}),
    "llama_mqa": ("llama", {"num_key_value_heads": 1}),
    "mistral": ("mistral", {"sliding_window": WINDOW}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}),
    "gemma2": ("gemma2", {"sliding_window": WINDOW, "layer_types": _ALTERNATING, "query_pre_attn_scalar": 16}),
    "gemma3_text": (
        "gemma3_text",
        {"sliding_window": WINDOW, "layer_types": _ALTERNATING, "query_pre_attn_scalar": 16},
    ),
    "phi3": ("phi3", {}),
    "olmo2": ("olmo2", {}),
    "gpt2": ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 1024}),
    "gpt_neox": ("gpt_neox", {"rotary_pct": 0.5}),
    "mixtral": ("mixtral", {**_EXPERTS, "sliding_window": None}),
    "gpt_oss": ("gpt_oss", {**_EXPERTS, "sliding_window": WINDOW, "layer_types": _ALTERNATING}),
}
"""Models that must be served: name to model type and what its configuration changes."""

_ROPE_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
_ROPE_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "factor": 2.0,
    "original_max_position_embeddings": 64,
}

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "bloom": ("bloom", {"n_layer": 2, "n_head": 4}, "ALiBi"),
    "mpt": ("mpt", {"d_model": 64, "n_heads": 4, "n_layers": 2, "expansion_ratio": 2}, "ALiBi"),
    "falcon_alibi": ("falcon", {"alibi": True}, "ALiBi"),
    "mamba": ("mamba", {"state_size": 4}, "recurrent state"),
    "jamba": ("jamba", {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False}, "recurrent state"),
    "recurrent_gemma": ("recurrent_gemma", {"lru_width": 64, "attention_window_size": 8}, "recurrent state"),
    "t5": ("t5", {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}, "encoder-decoder"),
    "phi3_longrope": ("phi3", {"rope_parameters": _ROPE_LONG}, "longrope"),
    "llama_dynamic": ("llama", {"rope_parameters": _ROPE_DYNAMIC}, "dynamic"),
}
"""Models that must be turned away: name to model type, changes, and a word of the reason."""


def tiny_model(arch: str, **over: Any) -> PreTrainedModel:
    """Return a new random fp32 model of two layers, the same each time; ``arch`` is a key of SERVED or REFUSED.

    ``over`` replaces fields of its configuration, and ``kind`` its model type.
    """
    kind, changes = SERVED[arch] if arch in SERVED else REFUSED[arch][:2]
    kind = over.pop("kind", kind)
    fields = {**_BASE, **changes, **over}
    if kind == "falcon":
        del fields["head_dim"]  # a property there
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = AutoConfig.for_model(kind, **fields)
        factory = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        model = factory.from_config(config)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                _randomise(name, weight)
    if model.generation_config is not None:
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
    return model.eval()


def _randomise(name: str, weight: torch.Tensor) -> None:
    """Spread the weights: as initialised, such small models repeat one token whatever they are asked."""
    noise = torch.randn(weight.shape)
    if "embed" in name or "wte" in name or "wpe" in name:
        weight.copy_(noise)
    elif weight.dim() > 1:
        weight.copy_(noise * 1.5 / weight.shape[-1] ** 0.5)
    elif "sink" in name:
        weight.copy_(noise)
    else:
        weight.add_(noise * 0.1)


_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of the 256 bytes and three control tokens, with a ChatML template; 259 ids."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in ("<|im_start|>", "<|im_end|>", "<pad>")]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<pad>",
        chat_template=_CHATML,
        clean_up_tokenization_spaces=False,
    )


@lru_cache
def demo_loaded(dtype: str = "auto") -> LoadedModel:
    """Return the demo model, loaded once per dtype; skips where its package is not installed."""
    try:
        demo_file()
    except ConfigError as error:
        pytest.skip(str(error))
    return load("demo", dtype=dtype, device="cpu")


def random_ids(length: int, seed: int = 0, vocab_size: int = 256) -> list[int]:
    """Return token ids that are the same each time."""
    return torch.randint(0, vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def stock_greedy(model: PreTrainedModel, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Return what ``model.generate`` gives."""
    ids = torch.tensor([list(prompt)])
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
        )
    return out[0, len(prompt) :].tolist()


def pooled_greedy(
    runner: ModelRunner,
    prompt: Sequence[int],
    num_tokens: int,
    *,
    chunk: int,
    table: Sequence[int],
    stranger: tuple[Sequence[int], Sequence[int]] | None = None,
) -> list[int]:
    """Return greedy tokens through the pool, the prompt cut in chunks.

    Args:
        runner: Runs the steps.
        prompt: Token ids.
        num_tokens: Tokens to generate.
        chunk: Tokens per prefill step.
        table: Blocks of the sequence.
        stranger: Token ids and blocks of another sequence; one more of its tokens is computed in every step.
    """
    ids, at, made, other = list(prompt), 0, [], 0
    while len(made) < num_tokens:
        part = ids[at : at + chunk]
        last = at + len(part) == len(ids)
        chunks = [Chunk(part, at, table, last)]
        if stranger is not None and other < len(stranger[0]):
            # In front and wanting logits too, so a mix-up of rows cannot go unnoticed.
            chunks.insert(0, Chunk([stranger[0][other]], other, stranger[1], True))
            other += 1
        logits = runner.execute(chunks)
        at += len(part)
        if last:
            made.append(int(logits[-1].argmax()))
            ids.append(made[-1])
    return made
