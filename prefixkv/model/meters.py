"""What calibration measures with: ways to store rows, attention as the kernels compute it, and sums of errors."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from prefixkv.cache.spec import KV_LAYOUTS, KVCacheSpec, LayerSpec, RaisedHead
from prefixkv.kv.calibration import PoolCalibration
from prefixkv.kv.formats import TORCH_DTYPES, RowCodec, get_format
from prefixkv.measure.calibration import HeadError
from prefixkv.model.inspect import ModelShape

__all__ = ["FIRST_ROW", "Call", "HeadMeter", "KeyMeans", "LogitsMeter", "Meter", "StoredRows", "attend"]

FIRST_ROW = 15
"""The first tokens see next to nothing, and no format matters to them: a token counts with 16 tokens of context."""

_FIRST_MEAN_ROW = 4
"""The first tokens draw attention that nothing else wants, with keys unlike all others; their place is not the mean."""

_HEAD_QUERIES = 128
"""Queries of a prompt, evenly spread, that the heads are measured with; all of them would tell the same more slowly."""

_TILE_SCORES = 1 << 23
_TILE_LOGITS = 1 << 23


@dataclass(frozen=True, slots=True)
class Call:
    """What an attention call asks for besides its tensors."""

    scaling: float
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None


class StoredRows:
    """Rows as a pool would give them back: of one format, or of one that is calibrated.

    Attributes:
        name: The format, with a star if it is calibrated.
        key_kind: Two of the same kind store keys alike.
        value_kind: The same of values.
    """

    def __init__(self, kv_format: str, calibration: PoolCalibration | None = None) -> None:
        """Store in ``kv_format``, all heads alike if there is no calibration."""
        self._kv_format = kv_format
        self._format = get_format(kv_format)
        self._raised: tuple[RaisedHead, ...] = () if calibration is None else calibration.heads
        self._offsets = None if calibration is None else calibration.offset_tensors()
        layouts: Sequence[Hashable] = KV_LAYOUTS[kv_format]
        self.name = kv_format if calibration is None else f"{kv_format}*"
        self.key_kind, self.value_kind = layouts if calibration is None else (self.name, self.name)

    def check(self, shape: ModelShape) -> None:
        """Raise ConfigError if the format cannot hold the model's rows."""
        dtype = TORCH_DTYPES[shape.dtype]
        for layer in shape.layers:
            self._format.key.parts(layer.key_dim, dtype)
            self._format.value.parts(layer.value_dim, dtype)

    def bytes_per_token(self, shape: ModelShape) -> int:
        """Return the bytes that K and V of one token take over all layers."""
        return KVCacheSpec(shape.layers, shape.dtype, self._kv_format, 1, self._raised).bytes_per_token

    def keys(self, layer: int, rows: torch.Tensor) -> torch.Tensor:
        """Return keys [K, T, D] of a layer as the pool gives them back, float32; offsets stay subtracted."""
        if self._offsets is not None:
            moved = rows.float() - self._offsets[layer].to(rows.device)[:, None]
            return self._better(layer, _stored(self._format.key, moved), rows, of_keys=True)
        return self._better(layer, _stored(self._format.key, rows), rows, of_keys=True)

    def values(self, layer: int, rows: torch.Tensor) -> torch.Tensor:
        """Return values [K, T, Dv] of a layer as the pool gives them back, float32."""
        return self._better(layer, _stored(self._format.value, rows), rows, of_keys=False)

    def _better(self, layer: int, stored: torch.Tensor, rows: torch.Tensor, *, of_keys: bool) -> torch.Tensor:
        for one in self._raised:
            if one.layer == layer:
                own = get_format(one.kv_format)
                stored[one.kv_head] = _stored(own.key if of_keys else own.value, rows[one.kv_head])
        return stored


class Meter(Protocol):
    """Is shown every attention call of a forward."""

    def add(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> None:
        """Add one call: q [H, T, D] float32, k [K, T, D], v [K, T, Dv] as computed."""
        ...


class KeyMeans:
    """Sums keys of every layer and head, the first tokens of each prompt left out."""

    def __init__(self, layers: Sequence[LayerSpec]) -> None:
        """Begin with nothing."""
        self._sums = [torch.zeros(layer.num_kv_heads, layer.key_dim, dtype=torch.float64) for layer in layers]
        self._counts = [0] * len(layers)

    def add(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> None:
        """Add one call."""
        self._sums[layer] += k[:, _FIRST_MEAN_ROW:].sum(1, dtype=torch.float64).cpu()
        self._counts[layer] += k.shape[1] - _FIRST_MEAN_ROW

    def means(self) -> list[torch.Tensor]:
        """Return [K, D] float64 per layer."""
        return [total / max(1, count) for total, count in zip(self._sums, self._counts, strict=True)]


class HeadMeter:
    """Sums squared errors of attention outputs, for every layer, kv head, way of storing K and way of storing V."""

    def __init__(self, shape: ModelShape, ways: Sequence[StoredRows]) -> None:
        """Begin with nothing."""
        exact = StoredRows("model")
        # Formats share codecs; the first of each side changes nothing.
        self._keys: dict[Hashable, Callable[[int, torch.Tensor], torch.Tensor]] = {exact.key_kind: exact.keys}
        self._values: dict[Hashable, Callable[[int, torch.Tensor], torch.Tensor]] = {exact.value_kind: exact.values}
        for way in ways:
            self._keys.setdefault(way.key_kind, way.keys)
            self._values.setdefault(way.value_kind, way.values)
        self._ways = tuple(ways)
        size = (len(self._keys), len(self._values))
        self._errors = [torch.zeros(*size, layer.num_kv_heads, dtype=torch.float64) for layer in shape.layers]
        self._energy = [torch.zeros(layer.num_kv_heads, dtype=torch.float64) for layer in shape.layers]

    def add(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> None:
        """Add one call: q [H, T, D] float32, k [K, T, D], v [K, T, Dv] as computed."""
        num_tokens = q.shape[1]
        count = min(_HEAD_QUERIES, num_tokens - FIRST_ROW)
        picked = torch.linspace(FIRST_ROW, num_tokens - 1, count, device=q.device).long()
        # One product gives the outputs of all ways of storing V.
        values = torch.cat([stored(layer, v) for stored in self._values.values()], dim=-1)
        exact: torch.Tensor | None = None
        for i, stored in enumerate(self._keys.values()):
            out = attend(q, stored(layer, k), values, call, picked)
            out = out.view(k.shape[0], -1, len(self._values), v.shape[-1])  # [K, G*n, ways of V, Dv]
            if exact is None:
                exact = out[:, :, :1]
                self._energy[layer] += exact.square().sum((1, 2, 3), dtype=torch.float64).cpu()
            self._errors[layer][i] += (out - exact).square().sum((1, 3), dtype=torch.float64).T.cpu()

    def errors(self) -> tuple[HeadError, ...]:
        """Return the relative root mean square error of every head under every way."""
        keys, values = list(self._keys), list(self._values)
        relative = [
            (errors / energy.clamp_min(1e-300)).sqrt()
            for errors, energy in zip(self._errors, self._energy, strict=True)
        ]
        found = []
        for way in self._ways:
            i, j = keys.index(way.key_kind), values.index(way.value_kind)
            for layer, table in enumerate(relative):
                for head, (key, value, both) in enumerate(
                    zip(table[i, 0].tolist(), table[0, j].tolist(), table[i, j].tolist(), strict=True)
                ):
                    found.append(HeadError(way.name, layer, head, key, value, both))
        return tuple(found)


class LogitsMeter:
    """Compares logits with the exact ones, and adds up.

    Attributes:
        divergence: Kullback-Leibler divergence of each token, [R] per prompt.
        agreed: Tokens with the same most likely next token.
        nll: Negative log-likelihood of the real next tokens, exact, summed.
        nll_change: What was added to it, summed.
        num_tokens: Tokens compared.
    """

    def __init__(self) -> None:
        """Begin with nothing."""
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


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, picked: torch.Tensor | None = None
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
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, positions: torch.Tensor
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
