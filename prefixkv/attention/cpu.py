"""Attention on a CPU over the pool as it is stored, by kernels that numba compiles on this machine.

Decodes, short chunks, and whatever needs a window, a softcap, sinks or visible lengths go to one kernel that reads the
quantised rows in place. A long plain chunk is bound by multiplications, not by bytes: its rows are decoded once, and
torch's 16-bit products do the rest, the part before the chunk and the chunk itself apart.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from prefixkv.attention.base import AttentionMetadata, AttentionSpec
from prefixkv.cache.spec import KV_LAYOUTS
from prefixkv.kv.formats import TORCH_DTYPES
from prefixkv.kv.storage import KVStorage

if TYPE_CHECKING:
    from prefixkv.kernels.numba_attend import AttendPlan
    from prefixkv.kernels.numba_layout import LayerView

__all__ = ["NumbaBackend"]


class NumbaBackend:
    """The fast backend of a CPU. numba is imported when a model is about to use it and not before."""

    name = "numba"

    def supports(self, spec: AttentionSpec) -> str | None:
        """Return None if the kernels can run the model here, else the reason why not."""
        if spec.device_type != "cpu":
            return f"runs on a CPU only, the model is on {spec.device_type}"
        if find_spec("numba") is None:
            return "numba is not installed: pip install prefixkv[cpu]"
        try:
            from prefixkv.kernels.numba_build import choose_threading_layer
            from prefixkv.kernels.numba_layout import MODES, refuse_layout
        except ImportError as error:
            return f"numba cannot be imported ({error})"
        key, value = KV_LAYOUTS[spec.cache.kv_format]
        computed = TORCH_DTYPES[spec.cache.dtype]
        stored = {8: torch.int8, 4: torch.uint8}
        modes = [MODES[stored[row.bits] if row.bits else computed] for row in (key, value)]
        for layer in spec.cache.layers:
            reason = refuse_layout(layer.key_dim, layer.value_dim, modes, key.group_size(layer.key_dim))
            if reason is not None:
                return reason
        return choose_threading_layer()

    def forward(
        self,
        layer: int,
        q: torch.Tensor,
        storage: KVStorage,
        meta: AttentionMetadata,
        *,
        scaling: float,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend as :class:`~prefixkv.attention.base.AttentionBackend` says; changes only what is remembered."""
        from prefixkv.kernels.numba_attend import attend

        heads, shape = q.shape[1], storage.spec.layers[layer]
        group = heads // shape.num_kv_heads
        key = (self.name, window, group)
        plan: AttendPlan | None = meta.scratch.get(key)
        if plan is None:
            plan = meta.scratch[key] = _plan(meta, window, group, storage.spec.block_size)
        out = q.new_empty(q.shape[0], heads, shape.value_dim)
        attend(
            _view(storage, layer, group),
            plan,
            q.contiguous(),
            out,
            scaling=scaling,
            softcap=softcap,
            sinks=sinks,
        )
        return out


def _plan(meta: AttentionMetadata, window: int | None, group: int, block_size: int) -> AttendPlan:
    from prefixkv.attention.cpu_plan import plan_step

    return plan_step(meta, range(len(meta.query_lens)), window=window, group=group, block_size=block_size)


def _view(storage: KVStorage, layer: int, group: int) -> LayerView:
    """Return how the kernel sees a layer, made once per pool."""
    from prefixkv.kernels.numba_layout import view_layer

    key = ("numba", layer, group)
    view: LayerView | None = storage.memo.get(key)
    if view is None:
        parts = storage.layers[layer]
        turned = KV_LAYOUTS[storage.spec.kv_format][0].rotate
        view = storage.memo[key] = view_layer(parts.key, parts.value, key_turned=turned, most_group=group)
    return view
