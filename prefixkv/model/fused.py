"""A decoder of few operations a layer for models of the llama shape, on the model's own weights.

The stock model stays the judge: the self-test compares both at load, and where it, or anything else, speaks against
this path the hook serves. Projections that read the same input are merged; the model's parameters become views of the
merged ones, so no weight lies in memory twice and the user's model works as before. On a CPU they move to large pages.
What its owner does to the model is honoured: while there are hooks or patched methods, and once a part or a weight was
replaced, cast or moved, the stock modules run.

Steps of few tokens on a CPU with a matrix unit go through compiled kernels, see :mod:`prefixkv.kernels.numba_step`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from prefixkv.attention.base import AttentionBackend
from prefixkv.kv.pages import Arena
from prefixkv.kv.storage import KVStorage
from prefixkv.model.batch import ForwardBatch
from prefixkv.model.changes import Snapshot
from prefixkv.model.compiled import MOST_TOKENS, CompiledLayers, refuse_layers
from prefixkv.model.inspect import ModelShape
from prefixkv.model.layers import DecoderLayer, Linear, Norm, same
from prefixkv.model.rope import Rope

__all__ = ["FusedDecoder", "NotFusable", "reserve_pages"]

FAMILIES = ("llama", "mistral", "phi3", "qwen2", "qwen3", "smollm3", "olmo2")
"""Model types whose layers are the ones written down here."""


class NotFusable(Exception):
    """The model is not of the shape; the message says why."""


class FusedDecoder:
    """Runs steps on a model's weights. Stateless between steps."""

    def __init__(self, model: PreTrainedModel, shape: ModelShape, arena: Arena | None = None) -> None:
        """Read the layers and merge their projections; the model's parameters become views.

        Args:
            model: Any.
            shape: Of the model.
            arena: From :func:`reserve_pages` for this model.

        Raises:
            NotFusable: If the model is not of the shape. Nothing has changed then.
        """
        if getattr(model.config, "model_type", "") not in FAMILIES:
            raise NotFusable(f"no fused decoder for model type {getattr(model.config, 'model_type', '?')!r}")
        inner: Any = getattr(model, "model", None)
        self._head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        _check_plain(model, inner)
        _move_to_large_pages(inner, self._head, arena)
        self._few: CompiledLayers | None = None
        self._embedding: nn.Embedding = inner.embed_tokens
        self._rope = Rope(inner.rotary_emb)
        self._norm = _norm(inner.norm)
        self._shape = shape
        self._layers = [_read_layer(layer) for layer in inner.layers]
        self._snapshot = Snapshot(model)

    def use_kernels(self) -> str | None:
        """Run steps by compiled kernels from now on; return the reason if they cannot.

        The kernels have to be ready: :mod:`prefixkv.kernels.readiness`.
        """
        embeddings = self._embedding.weight
        reason = refuse_layers(self._layers, self._shape, embeddings, self._head)
        if reason is None:
            self._few = CompiledLayers(self._layers, self._shape, embeddings, self._rope, self._norm, self._head)
        return reason

    def use_torch(self) -> None:
        """Run all steps by torch from now on."""
        self._few = None

    @property
    def uses_kernels(self) -> bool:
        """Whether compiled kernels run steps of few tokens."""
        return self._few is not None

    def is_current(self) -> bool:
        """Return whether the model is as it was read: nothing hung on it, patched, replaced, cast or moved."""
        return self._snapshot.holds()

    def forward(self, batch: ForwardBatch, storage: KVStorage, backend: AttentionBackend) -> torch.Tensor:
        """Compute one step; writes its rows to the pool.

        Returns:
            [R, V] logits of the rows the batch asks for, in the model's dtype.
        """
        if self._few is not None and batch.input_ids.shape[1] <= MOST_TOKENS:
            return self._few.forward(batch, storage, backend)
        x = functional.embedding(batch.input_ids[0], self._embedding.weight)  # [T, hidden]
        meta = batch.attention
        cos, sin = self._rope(x, batch.position_ids, max(meta.positions_host))  # [T, rotated / 2]
        turn = cos[:, None], sin[:, None]
        for index, layer in enumerate(self._layers):
            spec = self._shape.layers[index]
            q, k, v = self._project(layer, layer.norms[0](x), self._shape.num_heads[index], spec.num_kv_heads, turn)
            storage.write(index, meta.slot_mapping, k, v)
            attended = backend.forward(
                index,
                q,
                storage,
                meta,
                scaling=layer.scaling,
                window=self._shape.windows[index],
                softcap=None,
                sinks=None,
            )
            x = x + layer.norms[1](layer.out(attended.flatten(1)))
            gate, up = layer.gate_up(layer.norms[2](x)).chunk(2, dim=-1)
            x = x + layer.norms[3](layer.down(layer.act(gate) * up))
        return functional.linear(self._norm(x.index_select(0, batch.logits_rows)), self._head.weight, self._head.bias)

    def _project(
        self,
        layer: DecoderLayer,
        x: torch.Tensor,
        num_heads: int,
        num_kv_heads: int,
        turn: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q [T, H, D], k and v [T, K, D], normed and turned."""
        rows = layer.qkv(x)
        heads = num_heads + 2 * num_kv_heads
        dim = rows.shape[1] // heads
        if layer.qk_norm is not None and not layer.qk_norm_per_head:
            q, k, v = rows.split((num_heads * dim, num_kv_heads * dim, num_kv_heads * dim), dim=-1)  # type: ignore[no-untyped-call]
            rows = torch.cat((layer.qk_norm[0](q), layer.qk_norm[1](k), v), dim=-1)
        rows = rows.view(-1, heads, dim)
        both, v = rows[:, : num_heads + num_kv_heads], rows[:, num_heads + num_kv_heads :]
        if layer.qk_norm is not None and layer.qk_norm_per_head:
            both = torch.cat((layer.qk_norm[0](both[:, :num_heads]), layer.qk_norm[1](both[:, num_heads:])), dim=1)
        if layer.rotates:
            both = _rotate(both, *turn)
        return both[:, :num_heads], both[:, num_heads:], v


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn the first numbers of each head of [T, heads, D] by cos and sin [T, 1, R/2], the same for both halves."""
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    parts = [first * cos - second * sin, second * cos + first * sin]
    if 2 * half < x.shape[-1]:
        parts.append(x[..., 2 * half :])
    return torch.cat(parts, dim=-1).to(x.dtype)  # OLMo 2 turns in float32


def reserve_pages(model: PreTrainedModel) -> Arena | None:
    """Return large pages for the weights of a model, being committed; None if they will not be moved."""
    try:
        inner: Any = model.model
        groups = _to_move(inner, model.get_output_embeddings())  # type: ignore[no-untyped-call]
    except AttributeError:  # not of the shape
        return None
    if not groups or getattr(model.config, "model_type", "") not in FAMILIES:
        return None
    arena = _arena_of(groups)
    arena.commit_ahead()
    return arena


def _to_move(inner: Any, head: Any) -> list[list[nn.Parameter]]:
    groups = [group for group in _weight_groups(inner, head) if not all(_is_moved(part) for part in group)]
    return groups if all(part.device.type == "cpu" for part in chain.from_iterable(groups)) else []


def _arena_of(groups: list[list[nn.Parameter]]) -> Arena:
    return Arena(sum(Arena.room(sum(part.nbytes for part in group)) for group in groups))


def _move_to_large_pages(inner: Any, head: Any, arena: Arena | None) -> None:
    """Move the weights of a model on a CPU to large pages, those that are merged side by side."""
    groups = _to_move(inner, head)
    if not groups:
        return
    arena = arena or _arena_of(groups)
    with torch.no_grad():
        for group in groups:
            sizes = [part.numel() for part in group]
            room = arena.empty(sum(sizes), group[0].dtype)
            for part, place in zip(group, room.split(sizes), strict=True):  # type: ignore[no-untyped-call]
                part.data = place.view(part.shape).copy_(part)
                part.prefixkv_page = place.data_ptr()  # type: ignore[attr-defined]


def _is_moved(parameter: nn.Parameter) -> bool:
    return getattr(parameter, "prefixkv_page", None) == parameter.data_ptr()


def _weight_groups(inner: Any, head: Any) -> Iterator[list[nn.Parameter]]:
    """Yield the parameters that shall lie side by side, each once."""
    yield [inner.embed_tokens.weight]
    if head.weight is not inner.embed_tokens.weight:
        yield [head.weight]
    for layer in inner.layers:
        for owner, names in (
            (layer.self_attn, ("q_proj", "k_proj", "v_proj")),
            (layer.self_attn, ("qkv_proj",)),
            (layer.self_attn, ("o_proj",)),
            (layer.mlp, ("gate_proj", "up_proj")),
            (layer.mlp, ("gate_up_proj",)),
            (layer.mlp, ("down_proj",)),
        ):
            parts = [getattr(owner, name) for name in names if hasattr(owner, name)]
            for kind in ("weight", "bias"):
                found = [getattr(part, kind) for part in parts if getattr(part, kind) is not None]
                if found and all(tensor.dtype == found[0].dtype for tensor in found):
                    yield found


def _check_plain(model: PreTrainedModel, inner: Any) -> None:
    for name in ("embed_tokens", "layers", "norm", "rotary_emb"):
        if not hasattr(inner, name):
            raise NotFusable(f"the model has no {name}")
    for name, module in model.named_modules():
        holds_weight = any(True for _ in module.parameters(recurse=False))
        plain = type(module) in (nn.Linear, nn.Embedding) or type(module).__name__.endswith("RMSNorm")
        if holds_weight and not plain:
            raise NotFusable(f"{name} is a {type(module).__name__}, not a plain layer")
    for layer in inner.layers:
        for part, names in ((layer, ("self_attn", "mlp")), (layer.self_attn, ("o_proj",)), (layer.mlp, ("down_proj",))):
            for name in names:
                if not hasattr(part, name):
                    raise NotFusable(f"a layer has no {name}")


def _read_layer(layer: Any) -> DecoderLayer:
    attention, mlp = layer.self_attn, layer.mlp
    norms: tuple[Callable[[torch.Tensor], torch.Tensor], ...]
    if hasattr(layer, "input_layernorm"):
        norms = (_norm(layer.input_layernorm), same, _norm(layer.post_attention_layernorm), same)
    else:
        norms = (same, _norm(layer.post_attention_layernorm), same, _norm(layer.post_feedforward_layernorm))
    has_norm = hasattr(attention, "q_norm")
    return DecoderLayer(
        norms=norms,
        qkv=_merge(attention, ("q_proj", "k_proj", "v_proj"), "qkv_proj"),
        qk_norm=(_norm(attention.q_norm), _norm(attention.k_norm)) if has_norm else None,
        qk_norm_per_head=has_norm and attention.q_norm.weight.shape[0] == attention.head_dim,
        out=_linear(attention.o_proj),
        gate_up=_merge(mlp, ("gate_proj", "up_proj"), "gate_up_proj"),
        act=getattr(mlp, "act_fn", None) or mlp.activation_fn,
        down=_linear(mlp.down_proj),
        rotates=bool(getattr(attention, "use_rope", True)),
        scaling=float(attention.scaling),
    )


def _norm(module: Any) -> Norm:
    return Norm(module.weight.detach(), float(module.variance_epsilon))


def _linear(module: nn.Linear) -> Linear:
    return Linear(module.weight.detach(), None if module.bias is None else module.bias.detach())


def _merge(owner: Any, names: tuple[str, ...], merged_name: str) -> Linear:
    """Return one projection for several; the parameters of the parts become views of it."""
    if hasattr(owner, merged_name):
        return _linear(getattr(owner, merged_name))
    parts = [getattr(owner, name) for name in names]
    merged = _merge_tensors([part.weight for part in parts])
    biases = [part.bias for part in parts]
    if all(bias is None for bias in biases):
        return Linear(merged, None)
    if any(bias is None for bias in biases):
        raise NotFusable(f"only some of {', '.join(names)} have a bias")
    return Linear(merged, _merge_tensors(biases))


def _merge_tensors(parts: list[torch.Tensor]) -> torch.Tensor:
    sizes = [part.shape[0] for part in parts]
    joined = _joined(parts)
    if joined is not None:
        return joined
    with torch.no_grad():
        merged = torch.cat([part.detach() for part in parts])
        for part, view in zip(parts, merged.split(sizes), strict=True):  # type: ignore[no-untyped-call]
            part.data = view
    return merged


def _joined(parts: list[torch.Tensor]) -> torch.Tensor | None:
    """Return the tensor that the parts are views of already (another engine merged them), or None."""
    first = parts[0]
    end = first.data_ptr()
    for part in parts:
        if part.data_ptr() != end or not part.is_contiguous() or part.dtype != first.dtype:
            return None
        end += part.nbytes
    storage = first.untyped_storage()
    if end - storage.data_ptr() > storage.nbytes():
        return None
    shape = (sum(part.shape[0] for part in parts), *first.shape[1:])
    return first.detach().as_strided(shape, first.stride())
