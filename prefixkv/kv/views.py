"""How the CPU kernels see a layer of a pool."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefixkv.cache.spec import KV_LAYOUTS

if TYPE_CHECKING:
    from prefixkv.kernels.numba_layout import LayerView
    from prefixkv.kv.storage import KVStorage

__all__ = ["layer_view"]


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
