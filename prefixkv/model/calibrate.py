"""What each pool format would cost on these prompts: attention head by head, and the model as a whole.

Nothing is stored: what a pool gives back is ``decode(encode(rows))``, so a plain forward whose attention calls are
routed through a format's codecs shows what a chat over such a pool would be like. Three kinds of forward per prompt:
as computed, with every head measured under every format on the way; through each format, for the logits; and with the
model's own attention, to know how much of a difference is only rounding. Attention itself is computed in float32, as
the kernels do, from rows in the dtype that the model computes in.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from prefixkv.cache.spec import KV_LAYOUTS, KVCacheSpec, RowFormat
from prefixkv.errors import ConfigError, IntegrityError, InvalidRequest
from prefixkv.kv.formats import TORCH_DTYPES, KVFormat, RowCodec, get_format
from prefixkv.measure.calibration import CalibrationReport, FormatQuality, HeadError, OutlierHead, find_outliers
from prefixkv.model.hook import Attachment, active_step, layer_index, score_scaling
from prefixkv.model.inspect import ModelShape, observe, refuse_unsupported
from prefixkv.model.load import LoadedModel

__all__ = ["CalibrationReport", "calibrate"]

_FIRST_ROW = 15
"""The first tokens see next to nothing, and no format matters to them: a token counts with 16 tokens of context."""

_HEAD_QUERIES = 128
"""Queries of a prompt, evenly spread, that the heads are measured with; all of them would tell the same more slowly."""

_TILE_SCORES = 1 << 23
_TILE_LOGITS = 1 << 23


def calibrate(
    loaded: LoadedModel,
    prompts: Sequence[Sequence[int]],
    formats: Sequence[str],
    *,
    progress: Callable[[str], None] = lambda line: None,
) -> CalibrationReport:
    """Measure formats on prompts; the model is attached to while it runs and is as it was afterwards.

    Memory is bounded by the longest prompt: its logits twice, one tile of scores, and four bytes per token and format.

    Args:
        loaded: The model.
        prompts: Token ids. What lies beyond the model's context is cut off; one of 16 tokens or fewer is skipped.
        formats: Names of pool formats, each once.
        progress: Called with one line after each prompt.

    Raises:
        ConfigError: If a format does not exist or cannot hold the model's rows, or no prompt is long enough.
        InvalidRequest: ``bad_token_id``.
        UnsupportedModel: If the model cannot be served exactly.
    """
    if not formats or len(set(formats)) != len(formats):
        raise ConfigError("formats: give the names of one or more pool formats, each once")
    chosen = [get_format(name) for name in formats]
    usable = _usable(prompts, loaded)
    refuse_unsupported(loaded.model)
    attachment = Attachment(loaded.model)
    try:
        with torch.inference_mode():
            return _Calibration(loaded, observe(loaded.model), chosen).run(usable, len(prompts), progress)
    finally:
        attachment.detach()


def _usable(prompts: Sequence[Sequence[int]], loaded: LoadedModel) -> list[Sequence[int]]:
    """Return the prompts that are long enough to be measured.

    Raises:
        ConfigError: If there is none.
        InvalidRequest: ``bad_token_id``.
    """
    for i, prompt in enumerate(prompts):
        for j, token in enumerate(prompt):
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < loaded.vocab_size:
                hint = f"must be a whole number from 0 to {loaded.vocab_size - 1}"
                raise InvalidRequest("bad_token_id", f"prompts[{i}][{j}]", hint)
    usable = [prompt for prompt in prompts if len(prompt) > _FIRST_ROW + 1]
    if not usable or (loaded.max_context is not None and loaded.max_context <= _FIRST_ROW + 1):
        raise ConfigError(f"prompts: none has more than {_FIRST_ROW + 1} tokens, so there is nothing to measure")
    return usable


class _Calibration:
    """One run: forwards over prompts, and what was measured so far."""

    def __init__(self, loaded: LoadedModel, shape: ModelShape, formats: Sequence[KVFormat]) -> None:
        """Raises ConfigError if a format cannot hold the model's rows."""
        dtype = TORCH_DTYPES[shape.dtype]
        for one in formats:
            for layer in shape.layers:
                one.key.parts(layer.key_dim, dtype)
                one.value.parts(layer.value_dim, dtype)
        self._loaded = loaded
        self._model: PreTrainedModel = loaded.model
        self._shape = shape
        self._formats = formats
        self._heads = _HeadMeter(shape, formats)
        self._meters = {one.name: _LogitsMeter() for one in formats}
        self._noise = _LogitsMeter()

    def run(
        self, prompts: Sequence[Sequence[int]], num_given: int, progress: Callable[[str], None]
    ) -> CalibrationReport:
        started = time.monotonic()
        limit = self._loaded.max_context
        for i, prompt in enumerate(prompts):
            part = list(prompt[:limit])
            self._measure(part)
            progress(f"prompt {i + 1} of {len(prompts)}: {len(part)} tokens ({time.monotonic() - started:.1f} s)")
        quality = {name: self._quality(name, meter) for name, meter in self._meters.items()}
        return CalibrationReport(
            fingerprint=self._loaded.fingerprint.hex(),
            dtype=self._shape.dtype,
            prompts=len(prompts),
            skipped_prompts=num_given - len(prompts),
            cut_prompts=sum(limit is not None and len(prompt) > limit for prompt in prompts),
            scored_tokens=self._noise.num_tokens,
            nll=self._noise.nll / self._noise.num_tokens,
            noise=self._quality("stock", self._noise),
            formats=tuple(quality.values()),
            heads=self._heads.errors(),
            outliers=self._heads.outliers(),
        )

    def _measure(self, prompt: list[int]) -> None:
        device = self._loaded.device
        ids = torch.tensor([prompt], device=device)
        rows = torch.arange(_FIRST_ROW, len(prompt) - 1, device=device)
        targets = ids[0, _FIRST_ROW + 1 :]
        windows = self._shape.windows
        exact = self._logits(ids, rows, _CodecStep(windows, None, self._heads))
        self._noise.add(exact, self._logits(ids, rows, None), targets)
        for one in self._formats:
            self._meters[one.name].add(exact, self._logits(ids, rows, _CodecStep(windows, one, None)), targets)

    def _logits(self, ids: torch.Tensor, rows: torch.Tensor, step: _CodecStep | None) -> torch.Tensor:
        """Return [R, V] logits of ``rows``; without a step, by the model's own attention."""
        options: dict[str, Any] = {"use_cache": False, "return_dict": True}
        if self._shape.keeps_logits:
            options["logits_to_keep"] = rows
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        with active_step(step) if step is not None else nullcontext():
            logits: torch.Tensor = self._model(input_ids=ids, position_ids=positions, **options).logits[0]
        if step is not None and step.layers != list(range(len(self._shape.layers))):
            raise IntegrityError(f"a forward made {len(step.layers)} attention calls, expected each layer once")
        return logits if self._shape.keeps_logits else logits.index_select(0, rows)

    def _quality(self, name: str, meter: _LogitsMeter) -> FormatQuality:
        stored = "model" if name == "stock" else name
        sizes = [KVCacheSpec(self._shape.layers, self._shape.dtype, x, 1).bytes_per_token for x in (stored, "model")]
        divergence = torch.cat(meter.divergence)
        return FormatQuality(
            name=name,
            kl_mean=float(divergence.double().mean()),
            kl_p99=float(divergence.kthvalue(math.ceil(0.99 * len(divergence))).values),
            top1_agreement=meter.agreed / meter.num_tokens,
            nll_change=meter.nll_change / meter.num_tokens,
            bytes_per_token=sizes[0],
            bytes_ratio=sizes[0] / sizes[1],
        )


@dataclass(frozen=True, slots=True)
class _Call:
    """What an attention call asks for besides its tensors."""

    scaling: float
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None


class _CodecStep:
    """Attends to rows that went through a format and back, or to rows as they are.

    Attributes:
        layers: Layer index of each call so far.
    """

    def __init__(self, windows: tuple[int | None, ...], stored: KVFormat | None, heads: _HeadMeter | None) -> None:
        self.layers: list[int] = []
        self._windows = windows
        self._format = stored
        self._heads = heads

    def mask(self, arguments: dict[str, Any]) -> torch.Tensor | None:
        """Return None: who sees what follows from positions and windows."""
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
        """Return [1, T, H, Dv] for query [1, H, T, D], key [1, K, T, D] and value [1, K, T, Dv]."""
        layer = layer_index(module)
        self.layers.append(layer)
        scaling = score_scaling(module, query, options)
        call = _Call(scaling, self._windows[layer], options.get("softcap"), options.get("s_aux"))
        q, k, v = query[0].float(), key[0], value[0]
        if self._heads is not None:
            self._heads.add(layer, q, k, v, call)
        if self._format is not None:
            k, v = _stored(self._format.key, k), _stored(self._format.value, v)
        return _attend(q, k.float(), v.float(), call).transpose(0, 1)[None].to(query.dtype)


class _HeadMeter:
    """Sums squared errors of attention outputs, for every layer, kv head, codec of K and codec of V."""

    def __init__(self, shape: ModelShape, formats: Sequence[KVFormat]) -> None:
        exact = get_format("model")
        # Formats share codecs, and a codec is told by its layout; the first of each side changes nothing.
        self._keys: dict[RowFormat, RowCodec] = {KV_LAYOUTS["model"][0]: exact.key}
        self._values: dict[RowFormat, RowCodec] = {KV_LAYOUTS["model"][1]: exact.value}
        for one in formats:
            key, value = KV_LAYOUTS[one.name]
            self._keys.setdefault(key, one.key)
            self._values.setdefault(value, one.value)
        self._names = [one.name for one in formats]
        size = (len(self._keys), len(self._values))
        self._errors = [torch.zeros(*size, layer.num_kv_heads, dtype=torch.float64) for layer in shape.layers]
        self._energy = [torch.zeros(layer.num_kv_heads, dtype=torch.float64) for layer in shape.layers]

    def add(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: _Call) -> None:
        """Add one call: q [H, T, D] float32, k [K, T, D], v [K, T, Dv] as computed."""
        num_tokens = q.shape[1]
        count = min(_HEAD_QUERIES, num_tokens - _FIRST_ROW)
        picked = torch.linspace(_FIRST_ROW, num_tokens - 1, count, device=q.device).long()
        # One product gives the outputs of all codecs of V.
        values = torch.cat([_stored(codec, v) for codec in self._values.values()], dim=-1)
        exact: torch.Tensor | None = None
        for i, codec in enumerate(self._keys.values()):
            out = _attend(q, _stored(codec, k), values, call, picked)
            out = out.view(k.shape[0], -1, len(self._values), v.shape[-1])  # [K, G*n, codecs of V, Dv]
            if exact is None:
                exact = out[:, :, :1]
                self._energy[layer] += exact.square().sum((1, 2, 3), dtype=torch.float64).cpu()
            self._errors[layer][i] += (out - exact).square().sum((1, 3), dtype=torch.float64).T.cpu()

    def errors(self) -> tuple[HeadError, ...]:
        """Return the relative root mean square error of every head under every format."""
        keys, values = list(self._keys), list(self._values)
        relative = [
            (errors / energy.clamp_min(1e-300)).sqrt()
            for errors, energy in zip(self._errors, self._energy, strict=True)
        ]
        found = []
        for name in self._names:
            i, j = keys.index(KV_LAYOUTS[name][0]), values.index(KV_LAYOUTS[name][1])
            for layer, table in enumerate(relative):
                for head, (key, value, both) in enumerate(
                    zip(table[i, 0].tolist(), table[0, j].tolist(), table[i, j].tolist(), strict=True)
                ):
                    found.append(HeadError(name, layer, head, key, value, both))
        return tuple(found)

    def outliers(self) -> tuple[OutlierHead, ...]:
        """Return the heads that stand out at 4 bits, then those at 8."""
        named: dict[int, str] = {}
        for name in self._names:
            bits = KV_LAYOUTS[name][0].bits
            if bits is not None:
                named.setdefault(bits, name)
        heads = self.errors()
        found: list[OutlierHead] = []
        for bits, name in sorted(named.items()):
            own = [(one.layer, one.kv_head, one.key) for one in heads if one.format == name]
            found.extend(find_outliers(own, bits))
        return tuple(found)


class _LogitsMeter:
    """Compares logits with the exact ones, and adds up.

    Attributes:
        divergence: Kullback-Leibler divergence of each token, [R] per prompt.
        agreed: Tokens with the same most likely next token.
        nll: Negative log-likelihood of the real next tokens, exact, summed.
        nll_change: What was added to it, summed.
        num_tokens: Tokens compared.
    """

    def __init__(self) -> None:
        self.divergence: list[torch.Tensor] = []
        self.agreed = 0
        self.nll = 0.0
        self.nll_change = 0.0
        self.num_tokens = 0

    def add(self, exact: torch.Tensor, other: torch.Tensor, targets: torch.Tensor) -> None:
        """Add one prompt: exact and other logits [R, V], targets [R]."""
        step = max(1, _TILE_LOGITS // exact.shape[1])
        tiles = (torch.split(side, step) for side in (exact, other, targets))
        for p, q, target in zip(*tiles, strict=True):
            self.agreed += int((p.max(-1).indices == q.max(-1).indices).sum())
            log_p, log_q = p.float().log_softmax(-1), q.float().log_softmax(-1)
            # A token that the model forbids (minus infinity) adds nothing.
            terms = (log_p.exp() * (log_p - log_q)).nan_to_num_(nan=0.0, posinf=torch.inf)
            self.divergence.append(terms.sum(-1).clamp_min_(0).cpu())  # below zero only by rounding
            before, after = (-side.gather(1, target[:, None]).double().sum() for side in (log_p, log_q))
            self.nll += float(before)
            self.nll_change += float(after - before)
            self.num_tokens += len(target)


def _stored(codec: RowCodec, rows: torch.Tensor) -> torch.Tensor:
    """Return rows [..., D] as a pool with this codec would give them back, float32."""
    return codec.decode(codec.encode(rows), torch.float32)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: _Call, picked: torch.Tensor | None = None
) -> torch.Tensor:
    """Attend causally over one sequence in float32; changes nothing.

    Args:
        q: [H, T, D].
        k: [K, T, D].
        v: [K, T, Dv].
        call: Scaling, window, softcap, sinks.
        picked: [n] positions of the queries that are wanted, ascending; None for all.

    Returns:
        [H, n, Dv].
    """
    heads, num_tokens = q.shape[:2]
    positions = torch.arange(num_tokens, device=q.device) if picked is None else picked
    tiles = torch.split(positions, max(1, _TILE_SCORES // (heads * num_tokens)))
    return torch.cat([_attend_tile(q[:, tile], k, v, call, tile) for tile in tiles], dim=1)


def _attend_tile(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: _Call, positions: torch.Tensor
) -> torch.Tensor:
    """Attend from a few queries [H, n, D] at ``positions`` [n]; scores are made for all of them at once."""
    kv_heads, rows = k.shape[:2]
    # The G queries that share a kv head are one matrix, so K and V are never repeated.
    grouped = (q * call.scaling).reshape(kv_heads, -1, q.shape[-1])  # [K, G*n, D]
    scores = (grouped @ k.transpose(1, 2)).view(-1, len(positions), rows)
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    distance = positions[:, None] - torch.arange(rows, device=q.device)
    hidden = distance < 0 if call.window is None else (distance < 0) | (distance >= call.window)
    scores = scores.masked_fill_(hidden, -torch.inf)
    if call.sinks is not None:
        sinks = call.sinks.float().view(-1, 1, 1).expand(-1, len(positions), 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(-1)[..., :rows].reshape(kv_heads, -1, rows)
    return (weights @ v).view(-1, len(positions), v.shape[-1])
