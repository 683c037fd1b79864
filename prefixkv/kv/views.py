"""Whether the CPU kernels can run on a pool, and how they see a layer of it."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from prefixkv.cache.spec import KV_LAYOUTS, KVCacheSpec
from prefixkv.kv.formats import TORCH_DTYPES

if TYPE_CHECKING:
    from prefixkv.kernels.numba_layout import LayerView
    from prefixkv.kv.storage import KVStorage

__all__ = ["layer_view", "refuse_kernels"]


def refuse_kernels(spec: KVCacheSpec, device_type: str) -> str | None:
    """Return None if kernels may read and write a pool now, else why not.

    Everybody who calls one has to ask: they have room for rows of some sizes only, and check nothing themselves.
    """
    if device_type != "cpu":
        return f"runs on a CPU only, the model is on {device_type}"
    try:
        if find_spec("numba") is None:
            return "numba is not installed: pip install prefixkv[cpu]"
        from prefixkv.kernels.numba_build import choose_threading_layer
        from prefixkv.kernels.numba_layout import MODES, refuse_layout
        from prefixkv.kernels.readiness import refusal
    except Exception as error:  # a broken one raises anything: OSError, AttributeError
        return f"numba cannot be imported ({type(error).__name__}: {error})"
    computed = TORCH_DTYPES[spec.dtype]
    stored = {8: torch.int8, 4: torch.uint8}
    for kv_format in {spec.kv_format, *(head.kv_format for head in spec.raised)}:
        key, value = KV_LAYOUTS[kv_format]
        modes = [MODES[stored[row.bits] if row.bits else computed] for row in (key, value)]
        for layer in spec.layers:
            reason = refuse_layout(layer.key_dim, layer.value_dim, modes, key.group_size(layer.key_dim))
            if reason is not None:
                return reason
    return choose_threading_layer() or refusal()


def layer_view(storage: KVStorage, layer: int, group: int = 1) -> LayerView:
    """Return the view of a layer, made once per pool.

    Args:
        storage: The pool.
        layer: Layer index.
        group: Query heads that share a kv head.
    """
    from prefixkv.kernels.numba_layout import view_layer

    key = ("view", layer, group)
    view: LayerView | None = storage.memo.get(key)
    if view is None:
        parts = storage.layers[layer]
        k, v = KV_LAYOUTS[storage.spec.kv_format]
        offsets = None if storage.key_offsets is None else storage.key_offsets[layer]
        view = view_layer(parts.key, parts.value, turned=(k.rotate, v.rotate), most_group=group, key_offsets=offsets)
        storage.memo[key] = view
    return view
