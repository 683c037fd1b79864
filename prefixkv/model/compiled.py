"""Steps by compiled kernels, on a CPU with a matrix unit.

A decode step is bound by the bytes it reads: the weights once, and the rows of K and V. Between two layers Python alone
would cost as much as a layer, not for what it does but because weights streaming by have pushed its memory out of the
caches. So one call runs all layers. Where attention is more than one call, for heads in a better format than the
pool's, or threads do not run at the same time, layers are called one by one.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from prefixkv.attention.base import AttentionBackend, AttentionMetadata
from prefixkv.kv.storage import KVStorage
from prefixkv.kv.views import layer_view
from prefixkv.model.batch import ForwardBatch
from prefixkv.model.inspect import ModelShape
from prefixkv.model.layers import DecoderLayer, Norm, same

if TYPE_CHECKING:
    import numpy as np

    from prefixkv.kernels.numba_layer import LayerWeights, StepRoom
    from prefixkv.kernels.numba_layout import LayerView

__all__ = ["MOST_TOKENS", "CompiledLayers", "refuse_layers"]

logger = logging.getLogger("prefixkv.model")

MOST_TOKENS = 1024
"""Tokens of a step beyond which what the tokens need leaves the caches, and torch's products are faster."""

_TILE_ROWS, _TILE_COLUMNS = 16, 32


def refuse_layers(layers: Sequence[DecoderLayer], shape: ModelShape, head: Any) -> str | None:
    """Return None if the kernels can run these layers here, else why not; changes nothing."""
    from prefixkv.kernels.numba_amx import refuse_amx

    if head.weight.device.type != "cpu" or head.weight.dtype != torch.bfloat16:
        return "they compute bfloat16 on a CPU"
    for layer, spec in zip(layers, shape.layers, strict=True):
        if layer.norms[1] is not same or layer.norms[3] is not same:
            return "the model norms what a layer adds"
        if layer.qk_norm is not None and not layer.qk_norm_per_head:
            return "the model norms queries of all heads together"
        if type(layer.act).__name__ not in ("SiLU", "SiLUActivation"):
            return f"activation {type(layer.act).__name__}"
        widths = (layer.qkv.weight.shape[1], layer.out.weight.shape[1], layer.down.weight.shape[1], spec.key_dim)
        if any(width % _TILE_COLUMNS for width in widths) or spec.key_dim != spec.value_dim:
            return f"widths {widths} are not all multiples of {_TILE_COLUMNS}"
    if len({(spec, heads) for spec, heads in zip(shape.layers, shape.num_heads, strict=True)}) > 1:
        return "layers of several shapes"
    if head.bias is not None or head.weight.shape[0] % _TILE_ROWS:
        return f"the head has a bias or a number of rows that is no multiple of {_TILE_ROWS}"
    return refuse_amx()


class CompiledLayers:
    """All layers and the head, as the kernels see them. The engine thread uses it, one step at a time."""

    def __init__(self, layers: Sequence[DecoderLayer], shape: ModelShape, norm: Norm, head: Any) -> None:
        """Read where the weights lie; :func:`refuse_layers` has to be None."""
        import numpy as np

        self._weights = [_weights(layer, shape, index) for index, layer in enumerate(layers)]
        self._fields = np.stack([weights.fields for weights in self._weights])
        self._norm, self._head = norm, head
        self._group = shape.num_heads[0] // shape.layers[0].num_kv_heads
        self._all_windows = shape.windows
        self._windows = list(dict.fromkeys(shape.windows))
        self._plan_of = np.array([self._windows.index(window) for window in shape.windows])
        self._scaling = [layer.scaling for layer in layers]
        self._room = self._new_room(64)
        self._threads_meet = True

    def forward(
        self,
        x: torch.Tensor,
        turn: tuple[torch.Tensor, torch.Tensor],
        batch: ForwardBatch,
        storage: KVStorage,
        backend: AttentionBackend,
    ) -> torch.Tensor:
        """Compute one step; writes its rows to the pool.

        Args:
            x: [T, hidden] embeddings, at most :data:`MOST_TOKENS`.
            turn: cos and sin, [T, half of the numbers that RoPE turns] each.
            batch: The step.
            storage: The pool.
            backend: Attends where heads are in a better format.

        Returns:
            [R, V] float32 logits of the rows the batch asks for.
        """
        from prefixkv.kernels.numba_step import run_head

        if len(x) > len(self._room.q):
            self._room = self._new_room(len(x))
        if storage.raised or not self._run_at_once(x, turn, batch.attention, storage):
            self._run_by_layer(x, turn, batch.attention, storage, backend)
        return run_head(self._room, self._norm.weight, self._norm.eps, self._head.weight, batch.logits_rows)

    def _new_room(self, tokens: int) -> StepRoom:
        from prefixkv.kernels.numba_layer import StepRoom

        return StepRoom(self._weights[0], tokens)

    def _run_by_layer(
        self,
        x: torch.Tensor,
        turn: tuple[torch.Tensor, torch.Tensor],
        meta: AttentionMetadata,
        storage: KVStorage,
        backend: AttentionBackend,
    ) -> None:
        from prefixkv.kernels.numba_layer import finish_layer, project

        room = self._room
        room.begin(x)
        lanes = room.lanes(turn[0]), room.lanes(turn[1])
        for index, weights in enumerate(self._weights):
            q, k, v = project(room, weights.fields, len(x), lanes)
            storage.write(index, meta.slot_mapping, k, v)
            window = self._all_windows[index]
            attended = backend.forward(
                index, q, storage, meta, scaling=self._scaling[index], window=window, softcap=None, sinks=None
            )
            finish_layer(room, weights.fields, attended)

    def _run_at_once(
        self,
        x: torch.Tensor,
        turn: tuple[torch.Tensor, torch.Tensor],
        meta: AttentionMetadata,
        storage: KVStorage,
    ) -> bool:
        """Return False, with nothing done, where threads do not run at the same time."""
        if not self._threads_meet:
            return False
        from prefixkv.attention.cpu_plan import plan_step
        from prefixkv.kernels.numba_step import run_layers

        block_size = storage.spec.block_size
        seqs = range(len(meta.query_lens))
        plans = [
            plan_step(meta, seqs, window=window, group=self._group, block_size=block_size) for window in self._windows
        ]
        views, fields = self._views(storage)
        self._threads_meet = run_layers(
            self._room, self._fields, fields, views[0], meta.slot_mapping, plans, self._plan_of, self._scaling, x, turn
        )
        if not self._threads_meet:
            logger.warning("the threads of a step do not run at the same time: steps go layer by layer from now on")
        return self._threads_meet

    def _views(self, storage: KVStorage) -> tuple[list[LayerView], np.ndarray]:
        """Return how the kernels see the layers of a pool, and all their fields; made once per pool."""
        import numpy as np

        found: tuple[list[LayerView], np.ndarray] | None = storage.memo.get("compiled layers")
        if found is None:
            views = [layer_view(storage, layer, self._group) for layer in range(len(storage.layers))]
            found = storage.memo["compiled layers"] = views, np.stack([view.fields for view in views])
        return found


def _weights(layer: DecoderLayer, shape: ModelShape, index: int) -> LayerWeights:
    from prefixkv.kernels.numba_layer import LayerWeights

    norms = [norm for norm in layer.norms if isinstance(norm, Norm)]
    q_norm, k_norm = layer.qk_norm or (None, None)
    return LayerWeights(
        heads=shape.num_heads[index],
        kv_heads=shape.layers[index].num_kv_heads,
        dim=shape.layers[index].key_dim,
        turns=layer.rotates,
        eps=(norms[0].eps, norms[1].eps),
        head_eps=q_norm.eps if q_norm else 0.0,
        in_norm=norms[0].weight,
        qkv=layer.qkv.weight,
        qkv_bias=layer.qkv.bias,
        q_norm=q_norm.weight if q_norm else None,
        k_norm=k_norm.weight if k_norm else None,
        out=layer.out.weight,
        out_bias=layer.out.bias,
        mlp_norm=norms[1].weight,
        gate_up=layer.gate_up.weight,
        gate_up_bias=layer.gate_up.bias,
        down=layer.down.weight,
        down_bias=layer.down.bias,
    )
