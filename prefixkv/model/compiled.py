"""Steps by compiled kernels, on a CPU with a matrix unit.

A decode step is bound by the bytes it reads: the weights once, and the rows of K and V. Between two layers Python alone
would cost as much as a layer, not for what it does but because weights streaming by have pushed its memory out of the
caches. So one call runs the whole step, from ids to logits. Where attention is more than one call, for heads in a
better format than the pool's, or threads do not run at the same time, layers are called one by one.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from prefixkv.attention.base import AttentionBackend
from prefixkv.kv.storage import KVStorage
from prefixkv.kv.views import layer_view
from prefixkv.model.batch import ForwardBatch
from prefixkv.model.inspect import ModelShape
from prefixkv.model.layers import DecoderLayer, Norm, same
from prefixkv.model.rope import Rope, Turn

if TYPE_CHECKING:
    import numpy as np

    from prefixkv.kernels.numba_layer import LayerWeights, StepRoom
    from prefixkv.kernels.numba_layout import LayerView

__all__ = ["MOST_MISSES", "MOST_TOKENS", "CompiledLayers", "refuse_layers"]

logger = logging.getLogger("prefixkv.model")

MOST_TOKENS = 1024
"""Tokens of a step beyond which what the tokens need leaves the caches, and torch's products are faster."""

MOST_MISSES = 3
"""Steps in a row whose threads did not all come before no step tries it any more. A process that was paused just then
misses once, and each miss takes a second."""

_TILE_ROWS, _TILE_COLUMNS = 16, 32


def refuse_layers(layers: Sequence[DecoderLayer], shape: ModelShape, embeddings: torch.Tensor, head: Any) -> str | None:
    """Return None if the kernels can run these layers here, else why not; changes nothing."""
    from prefixkv.kernels.numba_amx import refuse_amx

    if any(x.device.type != "cpu" or x.dtype != torch.bfloat16 for x in (embeddings, head.weight)):
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

    def __init__(
        self, layers: Sequence[DecoderLayer], shape: ModelShape, embeddings: torch.Tensor, rope: Rope, norm: Norm,
        head: Any
    ) -> None:  # fmt: skip
        """Read where the weights lie; :func:`refuse_layers` has to be None."""
        import numpy as np

        from prefixkv.kernels.numba_step import Head

        self._weights = [_weights(layer, shape, index) for index, layer in enumerate(layers)]
        self._fields = np.stack([weights.fields for weights in self._weights])
        self._embeddings, self._rope = embeddings, rope
        self._head = Head(norm.weight, norm.eps, head.weight)
        self._group = shape.num_heads[0] // shape.layers[0].num_kv_heads
        self._all_windows = shape.windows
        self._windows = list(dict.fromkeys(shape.windows))
        self._plan_of = np.array([self._windows.index(window) for window in shape.windows])
        self._scaling = [layer.scaling for layer in layers]
        self._room = self._new_room(64)
        self._misses = 0

    def forward(self, batch: ForwardBatch, storage: KVStorage, backend: AttentionBackend) -> torch.Tensor:
        """Compute one step; writes its rows to the pool.

        Args:
            batch: The step, at most :data:`MOST_TOKENS`.
            storage: The pool.
            backend: Attends where heads are in a better format.

        Returns:
            [R, V] float32 logits of the rows the batch asks for.
        """
        if batch.input_ids.shape[1] > len(self._room.q):
            self._room = self._new_room(batch.input_ids.shape[1])
        turn = self._rope.rows(self._embeddings, batch.position_ids, max(batch.attention.positions_host))
        if not storage.raised and self._misses < MOST_MISSES:
            logits = self._run_at_once(batch, turn, storage)
            self._misses = self._misses + 1 if logits is None else 0
            if logits is not None:
                return logits
            if self._misses == MOST_MISSES:
                logger.warning("the threads of a step do not run at the same time: steps go layer by layer from now on")
        return self._run_by_layer(batch, turn, storage, backend)

    def _new_room(self, tokens: int) -> StepRoom:
        from prefixkv.kernels.numba_layer import StepRoom

        return StepRoom(self._weights[0], tokens)

    def _run_by_layer(
        self, batch: ForwardBatch, turn: Turn, storage: KVStorage, backend: AttentionBackend
    ) -> torch.Tensor:
        from prefixkv.kernels.numba_layer import finish_layer, project
        from prefixkv.kernels.numba_step import run_head

        x = functional.embedding(batch.input_ids[0], self._embeddings)
        room, meta = self._room, batch.attention
        room.begin(x)
        cos, sin, rows = turn
        lanes = room.lanes(cos[rows]), room.lanes(sin[rows])
        for index, weights in enumerate(self._weights):
            q, k, v = project(room, weights.fields, len(x), lanes)
            storage.write(index, meta.slot_mapping, k, v)
            window = self._all_windows[index]
            attended = backend.forward(
                index, q, storage, meta, scaling=self._scaling[index], window=window, softcap=None, sinks=None
            )
            finish_layer(room, weights.fields, attended)
        return run_head(room, self._head, batch.logits_rows.numpy())

    def _run_at_once(self, batch: ForwardBatch, turn: Turn, storage: KVStorage) -> torch.Tensor | None:
        """Return None, with nothing done, where threads do not run at the same time."""
        from prefixkv.attention.cpu_plan import plan_step
        from prefixkv.kernels.numba_step import run_step

        meta, block_size = batch.attention, storage.spec.block_size
        seqs = range(len(meta.query_lens))
        plans = [
            plan_step(meta, seqs, window=window, group=self._group, block_size=block_size) for window in self._windows
        ]
        views, fields = self._views(storage)
        cos, sin, rows = turn
        return run_step(
            self._room, self._fields, fields, views[0], meta.slot_mapping, plans, self._plan_of, self._scaling,
            (self._embeddings, batch.input_ids[0].numpy()), (cos, sin, rows.numpy()), self._head,
            batch.logits_rows.numpy(),
        )  # fmt: skip

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
