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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from transformers import PreTrainedModel

from prefixkv.cache.spec import KV_LAYOUTS, RaisedHead
from prefixkv.errors import ConfigError, IntegrityError, InvalidRequest
from prefixkv.kv.calibration import PoolCalibration, rounded_offsets
from prefixkv.measure.calibration import CalibrationReport, FormatQuality, OutlierHead, find_outliers
from prefixkv.model.hook import Attachment, active_step, layer_index, score_scaling
from prefixkv.model.inspect import ModelShape, observe, refuse_unsupported
from prefixkv.model.load import LoadedModel
from prefixkv.model.meters import FIRST_ROW, Call, HeadMeter, KeyMeans, LogitsMeter, Meter, StoredRows, attend

__all__ = ["CalibrationReport", "calibrate", "calibrate_pool"]


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
    ways = _ways(formats)
    usable = _usable(prompts, loaded)
    with _attached(loaded) as shape:
        return _Calibration(loaded, shape, ways).run(usable, len(prompts), progress)


def calibrate_pool(
    loaded: LoadedModel,
    prompts: Sequence[Sequence[int]],
    formats: Sequence[str],
    kv_format: str,
    *,
    progress: Callable[[str], None] = lambda line: None,
) -> tuple[CalibrationReport, PoolCalibration]:
    """Measure as :func:`calibrate` does, and calibrate a pool of ``kv_format`` on the same prompts.

    Keys of 4 bits are stored without their mean over the prompts, unless the model caps its scores or has sinks. Heads
    whose keys lose far more than others' even so are raised: to int8, or, where they stand out at 8 bits too, to the
    model's own numbers.

    Returns:
        The report, with one more entry, ``kv_format`` and a star; and the calibration.

    Raises:
        ConfigError: As there, or if ``kv_format`` is ``"model"``.
        InvalidRequest: ``bad_token_id``.
        UnsupportedModel: If the model cannot be served exactly.
    """
    ways = _ways(formats)
    (plain,) = _ways([kv_format])
    if kv_format == "model":
        raise ConfigError("a calibration is for a quantised format; 'model' loses nothing that it could restore")
    usable = _usable(prompts, loaded)
    with _attached(loaded) as shape:
        plain.check(shape)
        made = _Calibration(loaded, shape, ()).made_for(usable, kv_format, progress)
        report = _Calibration(loaded, shape, [*ways, StoredRows(kv_format, made)]).run(usable, len(prompts), progress)
    return report, made


def _ways(formats: Sequence[str]) -> list[StoredRows]:
    if not formats or len(set(formats)) != len(formats):
        raise ConfigError("formats: give the names of one or more pool formats, each once")
    return [StoredRows(name) for name in formats]


@contextmanager
def _attached(loaded: LoadedModel) -> Iterator[ModelShape]:
    """Attach to the model for a while; yields what it looks like."""
    refuse_unsupported(loaded.model)
    attachment = Attachment(loaded.model)
    try:
        with torch.inference_mode():
            yield observe(loaded.model)
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
    usable = [prompt for prompt in prompts if len(prompt) > FIRST_ROW + 1]
    if not usable or (loaded.max_context is not None and loaded.max_context <= FIRST_ROW + 1):
        raise ConfigError(f"prompts: none has more than {FIRST_ROW + 1} tokens, so there is nothing to measure")
    return usable


class _Calibration:
    """One run: forwards over prompts, and what was measured so far."""

    def __init__(self, loaded: LoadedModel, shape: ModelShape, ways: Sequence[StoredRows]) -> None:
        """Raises ConfigError if a format cannot hold the model's rows."""
        for way in ways:
            way.check(shape)
        self._loaded = loaded
        self._model: PreTrainedModel = loaded.model
        self._shape = shape
        self._ways = ways
        self._heads = HeadMeter(shape, ways)
        self._meters = [LogitsMeter() for _ in ways]
        self._noise = LogitsMeter()

    def run(
        self, prompts: Sequence[Sequence[int]], num_given: int, progress: Callable[[str], None]
    ) -> CalibrationReport:
        started = time.monotonic()
        limit = self._loaded.max_context
        for i, prompt in enumerate(prompts):
            part = list(prompt[:limit])
            self._measure(part)
            progress(f"prompt {i + 1} of {len(prompts)}: {len(part)} tokens ({time.monotonic() - started:.1f} s)")
        return CalibrationReport(
            fingerprint=self._loaded.fingerprint.hex(),
            dtype=self._shape.dtype,
            prompts=len(prompts),
            skipped_prompts=num_given - len(prompts),
            cut_prompts=sum(limit is not None and len(prompt) > limit for prompt in prompts),
            scored_tokens=self._noise.num_tokens,
            nll=self._noise.nll / self._noise.num_tokens,
            noise=self._quality("stock", StoredRows("model"), self._noise),
            formats=tuple(
                self._quality(way.name, way, meter) for way, meter in zip(self._ways, self._meters, strict=True)
            ),
            heads=self._heads.errors(),
            outliers=_outliers(self._heads, [way.name for way in self._ways]),
        )

    def made_for(
        self, prompts: Sequence[Sequence[int]], kv_format: str, progress: Callable[[str], None]
    ) -> PoolCalibration:
        """Return the calibration of a pool: a forward per prompt for the means, and one for the heads."""
        bits = KV_LAYOUTS[kv_format][0].bits
        offsets = None
        if bits == 4 and not (self._shape.softcap or self._shape.sinks):
            means = KeyMeans(self._shape.layers)
            self._show(prompts, means, lambda line: progress(f"mean keys: {line}"))
            offsets = rounded_offsets(means.means())
        unraised = PoolCalibration(self._loaded.fingerprint.hex(), kv_format, (), offsets)
        moved, eight = StoredRows(kv_format, unraised), StoredRows("int8")
        heads = HeadMeter(self._shape, (moved, eight))
        self._show(prompts, heads, lambda line: progress(f"outlier heads: {line}"))
        errors = heads.errors()
        own, others = (
            find_outliers([(one.layer, one.kv_head, one.key) for one in errors if one.format == name], of)
            for name, of in ((moved.name, bits or 8), (eight.name, 8))
        )
        lost = {(one.layer, one.kv_head) for one in others} if bits == 4 else {(x.layer, x.kv_head) for x in own}
        named = sorted((one.layer, one.kv_head) for one in own)
        raised = tuple(RaisedHead(*head, "model" if head in lost else "int8") for head in named)
        return PoolCalibration(unraised.fingerprint, kv_format, raised, offsets)

    def _show(self, prompts: Sequence[Sequence[int]], meter: Meter, progress: Callable[[str], None]) -> None:
        """Let a meter see the attention calls of all prompts."""
        for i, prompt in enumerate(prompts):
            ids = torch.tensor([list(prompt[: self._loaded.max_context])], device=self._loaded.device)
            rows = torch.tensor([ids.shape[1] - 1], device=ids.device)
            self._logits(ids, rows, _CodecStep(self._shape.windows, None, meter))
            progress(f"prompt {i + 1} of {len(prompts)}")

    def _measure(self, prompt: list[int]) -> None:
        device = self._loaded.device
        ids = torch.tensor([prompt], device=device)
        rows = torch.arange(FIRST_ROW, len(prompt) - 1, device=device)
        targets = ids[0, FIRST_ROW + 1 :]
        windows = self._shape.windows
        exact = self._logits(ids, rows, _CodecStep(windows, None, self._heads))
        self._noise.add(exact, self._logits(ids, rows, None), targets)
        for way, meter in zip(self._ways, self._meters, strict=True):
            meter.add(exact, self._logits(ids, rows, _CodecStep(windows, way, None)), targets)

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

    def _quality(self, name: str, way: StoredRows, meter: LogitsMeter) -> FormatQuality:
        sizes = [one.bytes_per_token(self._shape) for one in (way, StoredRows("model"))]
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


class _CodecStep:
    """Attends to rows that went through a format and back, or to rows as they are.

    Attributes:
        layers: Layer index of each call so far.
    """

    def __init__(self, windows: tuple[int | None, ...], stored: StoredRows | None, meter: Meter | None) -> None:
        self.layers: list[int] = []
        self._windows = windows
        self._stored = stored
        self._meter = meter

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
        call = Call(scaling, self._windows[layer], options.get("softcap"), options.get("s_aux"))
        q, k, v = query[0].float(), key[0], value[0]
        if self._meter is not None:
            self._meter.add(layer, q, k, v, call)
        if self._stored is not None:
            k, v = self._stored.keys(layer, k), self._stored.values(layer, v)
        return attend(q, k.float(), v.float(), call).transpose(0, 1)[None].to(query.dtype)


def _outliers(meter: HeadMeter, names: Sequence[str]) -> tuple[OutlierHead, ...]:
    """Return the heads that stand out at 4 bits, then those at 8."""
    named: dict[int, str] = {}
    for name in names:
        bits = KV_LAYOUTS[name][0].bits if name in KV_LAYOUTS else None  # not where they are calibrated
        if bits is not None:
            named.setdefault(bits, name)
    heads = meter.errors()
    found: list[OutlierHead] = []
    for bits, name in sorted(named.items()):
        own = [(one.layer, one.kv_head, one.key) for one in heads if one.format == name]
        found.extend(find_outliers(own, bits))
    return tuple(found)
