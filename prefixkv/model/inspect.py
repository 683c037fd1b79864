"""What a model is, found out by looking and by one short forward; and who must be turned away.

Refuse first, from the configuration, with a reason that a reader can act on. Then observe, do not guess: in a short
forward each attention call tells its layer, its shapes and its options, and each mask that the model asks for is tried
on a few pairs of positions, so a window is known from what the model does and not from what a field is called.
"""

from __future__ import annotations

import inspect as python_inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from prefixkv.attention.base import AttentionSpec
from prefixkv.cache.spec import DTYPE_BYTES, KVCacheSpec, LayerSpec
from prefixkv.errors import UnsupportedModel
from prefixkv.kv.formats import TORCH_DTYPES
from prefixkv.model.hook import active_step, layer_index

__all__ = ["ModelShape", "max_context_tokens", "observe", "refuse_unsupported"]

_PROBE_TOKENS = 4
_NO_MARK = 0.0
_KNOWN_OPTIONS = frozenset(
    ("scaling", "dropout", "sliding_window", "softcap", "s_aux", "position_ids", "cache_position", "use_cache")
)
_CONTEXT_FIELDS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What one short forward showed.

    Attributes:
        layers: Shape of the cache of each layer.
        num_heads: Query heads of each layer.
        windows: Sliding window of each layer in tokens, or None.
        dtype: What K and V are computed in.
        softcap: Whether any layer caps its scores.
        sinks: Whether any layer has attention sinks.
        keeps_logits: Whether ``forward`` can compute the logits of chosen rows only.
    """

    layers: tuple[LayerSpec, ...]
    num_heads: tuple[int, ...]
    windows: tuple[int | None, ...]
    dtype: str
    softcap: bool
    sinks: bool
    keeps_logits: bool

    def attention_spec(self, cache: KVCacheSpec, device_type: str) -> AttentionSpec:
        """Return what a backend must be able to do."""
        return AttentionSpec(cache, self.num_heads, self.windows, self.softcap, self.sinks, device_type)


def max_context_tokens(model: PreTrainedModel) -> int | None:
    """Return the most positions the model was made for, or None if it states no limit."""
    config = model.config.get_text_config(decoder=True)
    for name in _CONTEXT_FIELDS:
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def refuse_unsupported(model: PreTrainedModel) -> None:
    """Raise if the configuration already says that the model cannot be served exactly; changes nothing.

    Raises:
        UnsupportedModel: With the reason.
    """
    config = model.config
    text = config.get_text_config(decoder=True)
    kind = getattr(text, "model_type", type(model).__name__)
    for reason in _reasons(model, config, text):
        raise UnsupportedModel(f"{kind}: {reason}")


def _reasons(model: PreTrainedModel, config: Any, text: Any) -> Iterator[str]:
    if getattr(config, "is_encoder_decoder", False):
        yield "encoder-decoder models attend across two sequences; only decoders are supported"
    layer_types = set(getattr(text, "layer_types", None) or ()) | set(getattr(text, "layers_block_type", None) or ())
    strange = sorted(layer_types - {"full_attention", "sliding_attention", "attention"})
    if getattr(model, "_is_stateful", False) or "mamba" in getattr(text, "model_type", ""):
        yield "recurrent state (state-space, linear attention or a hybrid) cannot be kept in blocks of tokens"
    if strange:
        yield f"layers of type {', '.join(strange)} are not plain causal attention"
    if _uses_alibi(text):
        yield "ALiBi adds a bias to the scores that the attention function is never given"
    for rope in sorted(_rope_types(text)):
        if rope in ("longrope", "dynamic"):
            yield f"RoPE of type {rope!r} changes with the length of the batch, so cached keys would become wrong"
    if getattr(text, "is_causal", True) is False or getattr(text, "use_bidirectional_attention", None):
        yield "attention is not causal"
    head: torch.nn.Module | None = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if head is None:
        yield "there is no language-model head; load it with AutoModelForCausalLM"
    parameters = python_inspect.signature(model.forward).parameters
    if "position_ids" not in parameters:
        yield "its forward takes no position_ids, which packing several sequences needs"
    if not model._can_set_attn_implementation():
        yield "its attention is not called through transformers' AttentionInterface"
    if getattr(text, "reorder_and_upcast_attn", False):
        yield "reorder_and_upcast_attn computes attention by a path of its own"
    devices = {str(tensor.device) for tensor in model.parameters()}
    if len(devices) > 1 or "meta" in devices:
        yield f"its weights lie on {', '.join(sorted(devices))}; one device is needed"


def _uses_alibi(config: Any) -> bool:
    nested = getattr(config, "attn_config", None)
    return bool(
        getattr(config, "alibi", False)
        or getattr(nested, "alibi", False)
        or getattr(config, "position_embedding_type", None) == "alibi"
        or getattr(config, "model_type", "") in ("bloom", "mpt")
    )


def _rope_types(config: Any) -> set[str]:
    """Return every RoPE type that the configuration names; it may differ per layer type."""
    found: set[str] = set()
    pending = [getattr(config, "rope_parameters", None), getattr(config, "rope_scaling", None)]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            found.update(str(value[key]) for key in ("rope_type", "type") if isinstance(value.get(key), str))
            pending.extend(value.values())
    return found


def observe(model: PreTrainedModel) -> ModelShape:
    """Run one short forward and return what its attention calls showed; the model must be attached.

    Raises:
        UnsupportedModel: If a call shows something the pool cannot reproduce, or layers are missing.
    """
    probe = _Probe()
    config = model.config.get_text_config(decoder=True)
    ids = torch.arange(1, 1 + _PROBE_TOKENS, device=model.device)[None] % config.vocab_size
    with torch.inference_mode(), active_step(probe):
        model(input_ids=ids, position_ids=torch.arange(_PROBE_TOKENS, device=model.device)[None], use_cache=False)
    expected: int = config.num_hidden_layers
    if sorted(probe.calls) != list(range(expected)) or probe.count != expected:
        raise UnsupportedModel(
            f"{config.model_type}: {probe.count} attention calls for {expected} layers; every layer must be attention"
        )
    calls = [probe.calls[layer] for layer in range(expected)]
    dtypes = {call.dtype for call in calls}
    names = [name for name, dtype in TORCH_DTYPES.items() if dtypes == {dtype} and name in DTYPE_BYTES]
    if not names:
        raise UnsupportedModel(f"{config.model_type}: keys and values are {', '.join(sorted(map(str, dtypes)))}")
    return ModelShape(
        layers=tuple(call.layer for call in calls),
        num_heads=tuple(call.num_heads for call in calls),
        windows=tuple(call.window for call in calls),
        dtype=names[0],
        softcap=any(call.softcap for call in calls),
        sinks=any(call.sinks for call in calls),
        keeps_logits="logits_to_keep" in python_inspect.signature(model.forward).parameters,
    )


@dataclass(frozen=True, slots=True)
class _Call:
    layer: LayerSpec
    num_heads: int
    window: int | None
    dtype: torch.dtype
    softcap: bool
    sinks: bool


class _Probe:
    """Notes attention calls. Its masks are filled with the window they stand for, so a call tells which mask it got."""

    def __init__(self) -> None:
        self.calls: dict[int, _Call] = {}
        self.count = 0

    def mask(self, arguments: dict[str, Any]) -> torch.Tensor | None:
        window = _window_of(arguments["mask_function"], arguments.get("local_size"))
        shape = (arguments["batch_size"], 1, arguments["q_length"], arguments["kv_length"])
        mark = float(window or _NO_MARK)
        return torch.full(shape, mark, dtype=torch.float32, device=arguments.get("device", "cpu"))

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        if options.get("is_causal") is False or getattr(module, "is_causal", True) is False:
            raise UnsupportedModel(f"{type(module).__name__}: attention is not causal")
        unknown = sorted(k for k, v in options.items() if k not in _KNOWN_OPTIONS and isinstance(v, torch.Tensor))
        if unknown:
            raise UnsupportedModel(f"{type(module).__name__}: attention takes {', '.join(unknown)}, unknown here")
        if key.shape[2] != _PROBE_TOKENS or query.shape[1] % key.shape[1]:
            raise UnsupportedModel(f"{type(module).__name__}: query {tuple(query.shape)}, key {tuple(key.shape)}")
        self.count += 1
        self.calls[layer_index(module)] = _Call(
            layer=LayerSpec(key.shape[1], key.shape[-1], value.shape[-1]),
            num_heads=query.shape[1],
            window=self._window(module, mask, options),
            dtype=key.dtype if key.dtype == value.dtype else torch.float64,
            softcap=options.get("softcap") is not None,
            sinks=options.get("s_aux") is not None,
        )
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1])

    def _window(self, module: torch.nn.Module, mask: torch.Tensor | None, options: dict[str, Any]) -> int | None:
        """Return the window of the mask that came with a call: stock attention obeys it and ignores the option."""
        if mask is None:
            window = options.get("sliding_window")
            return int(window) if window is not None else None
        mark = float(mask.flatten()[0])
        if mark < 0 or not bool((mask == mark).all()):
            raise UnsupportedModel(f"{type(module).__name__}: the model builds its own attention mask")
        return int(mark) or None


def _window_of(function: Callable[..., Any], local_size: int | None) -> int | None:
    """Return the sliding window that a mask function stands for, None for plain causal.

    Raises:
        UnsupportedModel: If it is neither.
    """
    sizes: list[int | None] = [None] if local_size is None else [int(local_size), None]
    for window in sizes:
        near = window or 1
        pairs = [(q, k) for q in (0, 3, near, 2 * near + 3, 100_000) for k in (0, q - near, q - near + 1, q, q + 1)]
        pairs = [(q, k) for q, k in pairs if k >= 0]
        want = [k <= q and (window is None or q - k < window) for q, k in pairs]
        queries, keys = (torch.tensor(side) for side in zip(*pairs, strict=True))
        zeros = torch.zeros_like(queries)
        try:
            got = function(zeros, zeros, queries, keys)
        except Exception as error:
            raise UnsupportedModel(f"the model's attention mask cannot be read ({type(error).__name__})") from error
        if torch.as_tensor(got).expand(len(pairs)).tolist() == want:
            return window
    raise UnsupportedModel("the model's attention mask is neither causal nor a causal sliding window")
