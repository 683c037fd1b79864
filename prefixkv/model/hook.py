"""The one seam between transformers and the pool: an attention function that looks up who is calling.

The model object belongs to the user and stays usable by them. For each stock implementation ``X`` we register a twin
``prefixkv_X``, once as attention and once as mask function. Where no step of ours is active in the calling context,
both hand over to ``X``: ``hf_model.generate(...)`` gives what it gave before, from any thread, while the engine runs.
Where a step is active, no mask is made and the step attends through the pool. The step travels in a context variable
because some models (gpt_neox, stablelm) drop the extra keyword arguments of their forward.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from prefixkv.attention.base import AttentionBackend, AttentionMetadata
from prefixkv.errors import IntegrityError, UnsupportedModel
from prefixkv.kv.storage import KVStorage

__all__ = ["Attachment", "ModelStep", "PoolStep", "active_step"]

STOCK_IMPLEMENTATIONS = ("sdpa", "eager")
"""What a twin exists for. Others read ``config._attn_implementation`` in many places and would notice a new name."""

_PREFIX = "prefixkv_"


class ModelStep(Protocol):
    """What happens at each attention call of one forward."""

    def mask(self, arguments: dict[str, Any]) -> torch.Tensor | None:
        """Return what the model shall pass on as its mask."""
        ...

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """Return [1, T, H, Dv] for query [1, H, T, D], key [1, K, T, D] and value [1, K, T, Dv]."""
        ...


_ACTIVE: ContextVar[ModelStep | None] = ContextVar("prefixkv_step", default=None)


@contextmanager
def active_step(step: ModelStep) -> Iterator[None]:
    """Route attention calls of this context, and of no other, to ``step`` until the block is left."""
    token = _ACTIVE.set(step)
    try:
        yield
    finally:
        _ACTIVE.reset(token)


class PoolStep:
    """Writes each layer's new rows to the pool and attends in place.

    Attributes:
        layers: Layer index of each call so far.
    """

    def __init__(
        self,
        storage: KVStorage,
        backend: AttentionBackend,
        meta: AttentionMetadata,
        windows: tuple[int | None, ...],
    ) -> None:
        self.layers: list[int] = []
        self._storage = storage
        self._backend = backend
        self._meta = meta
        self._windows = windows

    def mask(self, arguments: dict[str, Any]) -> torch.Tensor | None:
        """Return None: who sees what is in the metadata."""
        return None

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """Store this layer's rows, then attend to all that each query may see; changes the pool."""
        layer = layer_index(module)
        self.layers.append(layer)
        self._storage.write(layer, self._meta.slot_mapping, key[0].transpose(0, 1), value[0].transpose(0, 1))
        out = self._backend.forward(
            layer,
            query[0].transpose(0, 1),
            self._storage,
            self._meta,
            scaling=score_scaling(module, query, options),
            window=self._windows[layer],
            softcap=options.get("softcap"),
            sinks=options.get("s_aux"),
        )
        return out[None]

    def finish(self, num_layers: int) -> None:
        """Check that the forward wrote every layer exactly once.

        Raises:
            IntegrityError: If it did not.
        """
        if sorted(self.layers) != list(range(num_layers)):
            raise IntegrityError(f"a forward made {len(self.layers)} attention calls for {num_layers} layers")


def layer_index(module: torch.nn.Module) -> int:
    """Return which layer an attention module is.

    Raises:
        UnsupportedModel: If it does not say.
    """
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise UnsupportedModel(f"{type(module).__name__} does not say which layer it is (no layer_idx)")
    return layer


def score_scaling(module: torch.nn.Module, query: torch.Tensor, options: dict[str, Any]) -> float:
    """Return the factor of the scores: what the call says, else the module, else one over the root of D."""
    scaling = options.get("scaling")
    if scaling is None:
        scaling = getattr(module, "scaling", None)
    return float(scaling) if scaling is not None else float(query.shape[-1] ** -0.5)


class Attachment:
    """Our names in a model's configs; :meth:`detach` puts the stock ones back.

    Several engines may hold the same model: it carries how many do, and the last one to go restores it.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Attach; changes the attention implementation in the model's configs.

        Raises:
            UnsupportedModel: If the model does not look its attention up, or uses one without a twin.
        """
        if not model._can_set_attn_implementation():
            raise UnsupportedModel(
                f"{type(model).__name__} does not call its attention through transformers' AttentionInterface"
            )
        self._model = model
        self._attached = True
        stock = _stock_name(model.config._attn_implementation)
        if stock not in STOCK_IMPLEMENTATIONS:
            raise UnsupportedModel(f"the model uses attention {stock!r}: load it with attn_implementation='sdpa'")
        _register()
        holders: int = getattr(model, "_prefixkv_holders", 0)
        model._prefixkv_holders = holders + 1  # type: ignore[assignment]
        _rename(model, lambda name: _PREFIX + name if name in STOCK_IMPLEMENTATIONS else name)
        if model.config._attn_implementation != _PREFIX + stock:
            self.detach()
            raise UnsupportedModel(f"{type(model).__name__} ignores a new attention implementation")

    def detach(self) -> None:
        """Restore the stock names unless another engine still holds the model; a second call does nothing."""
        if not self._attached:
            return
        self._attached = False
        holders: int = getattr(self._model, "_prefixkv_holders", 1) - 1
        self._model._prefixkv_holders = holders  # type: ignore[assignment]
        if holders == 0:
            _rename(self._model, _stock_name)


def _stock_name(name: str | None) -> str:
    return (name or "").removeprefix(_PREFIX)


def _rename(model: PreTrainedModel, change: Callable[[str], str]) -> None:
    """Rename in every config that a part of the model reads; parts may share one or own theirs."""
    configs: dict[int, PreTrainedConfig] = {}
    pending = [part.config for part in model.modules() if isinstance(part, PreTrainedModel)]
    while pending:
        config = pending.pop()
        if id(config) in configs:
            continue
        configs[id(config)] = config
        pending.extend(sub for key in config.sub_configs if (sub := getattr(config, key, None)) is not None)
    names = [(config, config._attn_implementation) for config in configs.values()]
    for config, name in names:
        if name is not None:
            # As set_attn_implementation does: the public setter would overwrite the sub-configs' own names.
            config._attn_implementation_internal = change(name)


def _register() -> None:
    """Enter the twins in transformers' registries; stateless, so doing it again changes nothing."""
    for stock in STOCK_IMPLEMENTATIONS:
        AttentionInterface.register(_PREFIX + stock, _attention_twin(stock))
        AttentionMaskInterface.register(_PREFIX + stock, _mask_twin(stock))


def _mask_twin(stock: str) -> Callable[..., Any]:
    def mask(*args: Any, **kwargs: Any) -> Any:
        step = _ACTIVE.get()
        if step is None:
            return ALL_MASK_ATTENTION_FUNCTIONS[stock](*args, **kwargs)
        return step.mask(kwargs)

    return mask


def _attention_twin(stock: str) -> Callable[..., Any]:
    def attention(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        step = _ACTIVE.get()
        if step is None:
            found: tuple[torch.Tensor, torch.Tensor | None] = _stock_attention(stock, module)(
                module, query, key, value, attention_mask, **kwargs
            )
            return found
        return step.attend(module, query, key, value, attention_mask, kwargs), None

    return attention


def _stock_attention(stock: str, module: torch.nn.Module) -> Callable[..., Any]:
    """Return what the module would have called: its file may override an entry, and holds its own eager function."""
    for owner in type(module).__mro__:
        source = sys.modules.get(owner.__module__)
        eager = getattr(source, "eager_attention_forward", None)
        if eager is not None:
            interface = getattr(source, "ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS)
            function: Callable[..., Any] = interface.get_interface(stock, eager)
            return function
    if stock == "eager":
        raise IntegrityError(f"no eager attention found for {type(module).__name__}")
    fallback: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS[stock]
    return fallback
