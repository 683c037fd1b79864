"""Read a llama-family GGUF file in one pass.

transformers parses such a file three times and builds its table of tensor names once per submodule: 18 seconds for the
demo model on the machine where this takes one. So the plain case is read here: architecture ``llama`` and nothing in
the header that this module does not know. For everything else :func:`read_llama` returns None and transformers does
the work.

Source: the GGUF specification (github.com/ggml-org/ggml, docs/gguf.md). Values are unpacked by the ``gguf`` package,
except the two kinds that the demo model has, where whole tensors at a time are ten times faster.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

__all__ = ["LlamaFile", "read_llama"]

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_FLOATS = {0: torch.float32, 1: torch.float16}
_DEFAULT_ALIGNMENT = 32

_CONFIG = {
    "llama.context_length": "max_position_embeddings",
    "llama.block_count": "num_hidden_layers",
    "llama.feed_forward_length": "intermediate_size",
    "llama.embedding_length": "hidden_size",
    "llama.rope.dimension_count": "head_dim",
    "llama.attention.head_count": "num_attention_heads",
    "llama.attention.head_count_kv": "num_key_value_heads",
    "llama.attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "llama.vocab_size": "vocab_size",
    "tokenizer.ggml.bos_token_id": "bos_token_id",
    "tokenizer.ggml.eos_token_id": "eos_token_id",
    "tokenizer.ggml.padding_token_id": "pad_token_id",
}
_ROPE_BASE = "llama.rope.freq_base"
_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True, slots=True)
class LlamaFile:
    """The two things a model is made of."""

    config: LlamaConfig
    state_dict: dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


def read_llama(path: Path, dtype: torch.dtype) -> LlamaFile | None:
    """Return configuration and weights in ``dtype``, or None if the file is not of the plain kind; changes nothing.

    Raises:
        OSError: If the file cannot be read.
        ImportError: If the package ``gguf`` is missing.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as data:
        header = _Header(data)
        if not header.read():
            return None
        config = _config(header)
        if config is None:
            return None
        weights = {}
        for tensor in header.tensors:
            name = _weight_name(tensor.name)
            if name is None:
                return None
            weights[name] = _values(data, header.data_start, tensor, config, dtype)
    return LlamaFile(config, weights)


class _Header:
    """Metadata and tensor table of a file of version 2 or 3. Long string lists (the vocabulary) become their length."""

    def __init__(self, data: mmap.mmap) -> None:
        self.metadata: dict[str, Any] = {}
        self.tensors: list[_Tensor] = []
        self.data_start = 0
        self._data = data
        self._at = 0

    def read(self) -> bool:
        """Fill the fields; return False for a file of another kind or one that ends too soon."""
        try:
            if self._data[:4] != b"GGUF":
                return False
            self._at = 4
            version, num_tensors, num_fields = self._take("<IQQ")
            if version not in (2, 3):
                return False
            for _ in range(num_fields):
                key = self._string()
                self.metadata[key] = self._value(*self._take("<I"))
            for _ in range(num_tensors):
                name = self._string()
                (num_dims,) = self._take("<I")
                shape = self._take(f"<{num_dims}Q")
                self.tensors.append(_Tensor(name, tuple(reversed(shape)), *self._take("<IQ")))
        except (struct.error, UnicodeDecodeError, KeyError):
            return False
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        self.data_start = -(-self._at // alignment) * alignment
        return True

    def _take(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(layout, self._data, self._at)
        self._at += struct.calcsize(layout)
        return values

    def _string(self) -> str:
        (length,) = self._take("<Q")
        self._at += length
        return self._data[self._at - length : self._at].decode()

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._take("<" + _SCALARS[kind])[0]
        item, count = self._take("<IQ")
        if item != _STRING:
            return self._take(f"<{count}{_SCALARS[item]}")
        for _ in range(count):
            (length,) = self._take("<Q")
            self._at += length
        return count


def _config(header: _Header) -> LlamaConfig | None:
    """Return the model's configuration, or None if the file says something this module does not know."""
    metadata = header.metadata
    if metadata.get("general.architecture") != "llama" or "mistral" in str(metadata.get("general.name", "")).lower():
        return None
    if any(key.startswith("llama.") and key not in _CONFIG and key != _ROPE_BASE for key in metadata):
        return None
    fields: dict[str, Any] = {name: metadata[key] for key, name in _CONFIG.items() if key in metadata}
    fields.setdefault("vocab_size", metadata.get("tokenizer.ggml.tokens"))
    if not all(fields.get(name) for name in ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size")):
        return None
    tied = all(tensor.name != "output.weight" for tensor in header.tensors)
    rope = {"rope_type": "default", "rope_theta": metadata.get(_ROPE_BASE, 10_000.0)}
    return LlamaConfig(**fields, rope_parameters=rope, tie_word_embeddings=tied, architectures=["LlamaForCausalLM"])


def _weight_name(name: str) -> str | None:
    """Return what transformers calls a tensor, or None if it is not one of a plain llama."""
    stem, _, ending = name.rpartition(".")
    if ending != "weight":
        return None
    if stem.startswith("blk."):
        _, layer, leaf = stem.split(".", 2)
        return f"model.layers.{layer}.{_TENSORS[leaf]}.weight" if leaf in _TENSORS else None
    return f"{_TENSORS[stem]}.weight" if stem in _TENSORS else None


def _values(data: mmap.mmap, start: int, tensor: _Tensor, config: LlamaConfig, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor's numbers, rows in transformers' order."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

    kind = GGMLQuantizationType(tensor.kind)
    block_numbers, block_bytes = GGML_QUANT_SIZES[kind]
    size = math.prod(tensor.shape) // block_numbers * block_bytes
    raw = torch.frombuffer(data, dtype=torch.uint8, count=size, offset=start + tensor.offset)
    if tensor.kind in _FLOATS:
        numbers = raw.clone().view(_FLOATS[tensor.kind]).float()
    elif tensor.kind in _UNPACKED_HERE:
        blocks = raw.view(-1, block_bytes)
        numbers = torch.empty(len(blocks), block_numbers, dtype=dtype)
        for first in range(0, len(blocks), _BLOCKS_AT_ONCE):
            some = slice(first, first + _BLOCKS_AT_ONCE)
            numbers[some] = _UNPACKED_HERE[tensor.kind](blocks[some])
    else:
        numbers = torch.from_numpy(dequantize(raw.view(*tensor.shape[:-1], -1).numpy(), kind))
    numbers = numbers.reshape(tensor.shape)
    if ".attn_q." in tensor.name or ".attn_k." in tensor.name:
        # llama.cpp rotates neighbouring numbers of a head, transformers the two halves: undo its reordering of rows.
        heads = config.num_attention_heads
        if ".attn_k." in tensor.name and config.num_key_value_heads is not None:
            heads = config.num_key_value_heads
        paired = numbers.reshape(heads, -1, 2, *tensor.shape[1:])
        numbers = paired.transpose(1, 2).reshape(tensor.shape)
    return numbers.to(dtype)


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    """Return [N, 32] float32 of [N, 34] bytes: a float16 scale and 32 signed codes."""
    scale = blocks[:, :2].clone().view(torch.float16).float()
    return blocks[:, 2:].view(torch.int8) * scale


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    """Return [N, 32] float32 of [N, 20] bytes: float16 scale and minimum, 16 bytes whose low halves come first."""
    line = blocks[:, :4].clone().view(torch.float16).float()
    codes = blocks[:, 4:]
    return torch.cat((codes & 15, codes >> 4), dim=1) * line[:, :1] + line[:, 1:]


_UNPACKED_HERE = {3: _q4_1, 8: _q8_0}
_BLOCKS_AT_ONCE = 1024
"""So few that what lies between bytes and numbers stays in the cache, and that torch starts no threads for it."""
