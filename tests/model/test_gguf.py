"""The short way to read a llama file against transformers' long one."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GgufConfig, LlamaForCausalLM

from prefixkv.errors import ConfigError
from prefixkv.model.gguf import read_llama
from prefixkv.model.load import load, load_tokenizer

HIDDEN, HEADS, KV_HEADS, FFN, LAYERS, VOCAB = 64, 4, 2, 96, 2, 40


def write(
    path: Path, *, arch: str = "llama", extra: str | None = None, drop: str | None = None, tied: bool = True
) -> None:
    """A small file with every tensor of a llama, in several number formats."""
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    writer.add_eos_token_id(2)
    writer.add_token_list([f"t{i}" for i in range(VOCAB)])
    if extra:
        writer.add_float32(f"{arch}.{extra}", 2.0)
    rng = np.random.default_rng(0)
    kv = HIDDEN // HEADS * KV_HEADS
    shapes = {"token_embd": (VOCAB, HIDDEN), "output_norm": (HIDDEN,)}
    if not tied:
        shapes["output"] = (VOCAB, HIDDEN)
    for i in range(LAYERS):
        shapes |= {
            f"blk.{i}.attn_norm": (HIDDEN,),
            f"blk.{i}.attn_q": (HIDDEN, HIDDEN),
            f"blk.{i}.attn_k": (kv, HIDDEN),
            f"blk.{i}.attn_v": (kv, HIDDEN),
            f"blk.{i}.attn_output": (HIDDEN, HIDDEN),
            f"blk.{i}.ffn_norm": (HIDDEN,),
            f"blk.{i}.ffn_gate": (FFN, HIDDEN),
            f"blk.{i}.ffn_up": (FFN, HIDDEN),
            f"blk.{i}.ffn_down": (HIDDEN, FFN),
        }
    kinds = {"attn_q": "Q8_0", "attn_k": "Q4_1", "attn_v": "Q5_0", "ffn_up": "F16", "token_embd": "Q8_0"}
    for name, shape in shapes.items():
        if drop is not None and name.endswith(drop):
            name = name.replace(drop, "unheard_of")
        values = rng.standard_normal(shape).astype(np.float32)
        kind = gguf.GGMLQuantizationType[kinds.get(name.rsplit(".", 1)[-1], "F32")]
        writer.add_tensor(f"{name}.weight", gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_weights_and_configuration_equal_transformers(tmp_path: Path, tied: bool, dtype: torch.dtype) -> None:
    """Bit for bit: the same file gives the same model, whichever way it is read."""
    path = tmp_path / "tiny.gguf"
    write(path, tied=tied)
    long = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, quantization_config=GgufConfig(dequantize=True), dtype=dtype
    )
    read = read_llama(path, dtype)
    assert read is not None
    short = LlamaForCausalLM.from_pretrained(None, config=read.config, state_dict=read.state_dict, dtype=dtype)
    weights = short.state_dict()
    assert weights.keys() == long.state_dict().keys()
    for name, value in long.state_dict().items():
        assert weights[name].dtype == value.dtype == dtype, name
        assert torch.equal(weights[name], value), name
    for field in ("hidden_size", "head_dim", "num_key_value_heads", "rms_norm_eps", "max_position_embeddings"):
        assert getattr(short.config, field) == getattr(long.config, field), field
    assert short.config.rope_parameters["rope_theta"] == 5000.0
    assert short.config.tie_word_embeddings == tied
    ids = torch.tensor([[1, 2, 3, 5, 8, 13]])
    with torch.inference_mode():
        assert torch.equal(short(ids).logits, long(ids).logits)


@pytest.mark.parametrize(
    "unusual",
    [{"arch": "qwen2"}, {"extra": "rope.scaling.factor"}, {"extra": "expert_count"}, {"drop": "ffn_up"}],
    ids=["another architecture", "scaled rope", "experts", "an unknown tensor"],
)
def test_anything_unusual_is_left_to_transformers(tmp_path: Path, unusual: dict[str, str]) -> None:
    """A field that is not understood must not be ignored."""
    path = tmp_path / "tiny.gguf"
    write(path, **unusual)
    assert read_llama(path, torch.float32) is None


def test_a_file_that_ends_too_soon_is_not_half_read(tmp_path: Path) -> None:
    """A broken download gives None or an error at load, never a model of zeros."""
    path = tmp_path / "tiny.gguf"
    write(path)
    whole = path.read_bytes()
    for size in (3, 30, 200, 1200):
        path.write_bytes(whole[:size])
        assert read_llama(path, torch.float32) is None
    path.write_bytes(whole[:-5000])
    with pytest.raises(ValueError):
        read_llama(path, torch.float32)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.1, 0.5, 0.9])
def test_a_file_cut_short_is_refused_wherever_it_ends(tmp_path: Path, share: float) -> None:
    """A download that broke off. Its readers raise whatever they stumble over."""
    path = tmp_path / "tiny.gguf"
    write(path)
    raw = path.read_bytes()
    path.write_bytes(raw[: int(len(raw) * share)])
    with pytest.raises(ConfigError, match="cannot be read as a GGUF model"):
        load(str(path))
    if share < 0.5:
        with pytest.raises(ConfigError, match="has no tokenizer that can be read"):
            load_tokenizer(str(path))
