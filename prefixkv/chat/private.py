"""A tokenizer of our own: nobody else changes its settings, and it keeps nothing of what others encode."""

from __future__ import annotations

import copy
from typing import Any

__all__ = ["own_backend", "private_copy"]


def private_copy(tokenizer: Any) -> Any:
    """Return a copy of a tokenizer, or itself where it cannot be copied."""
    try:
        return copy.deepcopy(tokenizer)
    except Exception:  # a tokenizer of the caller's own making need not be copyable; it then shares its state with us
        return tokenizer


def own_backend(copied: Any, original: Any) -> Any:
    """Return the Rust tokenizer in a copy, if transformers adds nothing to it, else None."""
    backend = getattr(copied, "backend_tokenizer", None)
    if copied is original or backend is None:
        return None
    text = "".join(
        (" A word,\n\n two  spaces ", *map(str, getattr(copied, "all_special_tokens", ())), "\u00e9\U0001f9ff x")
    )
    for sample in (text, text[1:], "x"):
        out = copied(sample, add_special_tokens=False, padding=False, truncation=False, return_offsets_mapping=True)
        encoding = backend.encode(sample, add_special_tokens=False)
        if list(out["input_ids"]) != encoding.ids or list(map(tuple, out["offset_mapping"])) != encoding.offsets:
            return None
    return backend
