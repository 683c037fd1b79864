"""What pool formats cost on somebody's own prompts: the figures that ``prefixkv calibrate`` reports. Plain data."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

__all__ = ["CalibrationReport", "FormatQuality", "HeadError", "OutlierHead", "find_outliers"]

_SHOWN_HEADS = 12

OUTLIER_SCORE = 3.5
"""Robust standard deviations above the median, of the logarithm of the error, from which a head is an outlier."""

OUTLIER_TIMES_MEDIAN = 2.0
"""And so many times the median at least: where all heads are alike, a little more is no reason to act."""

_NORMAL_MAD = 0.6745
"""Median absolute deviation of a normal distribution, in standard deviations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatQuality:
    """Logits of the whole model with K and V through a format in all layers, against logits without.

    Attributes:
        name: The format; ``"stock"`` for the model's own attention, which differs by rounding alone.
        kl_mean: Kullback-Leibler divergence from the exact distribution of the next token, in nats, mean over tokens.
        kl_p99: Its 99th percentile.
        top1_agreement: Share of tokens with the same most likely next token.
        nll_change: By how much the negative log-likelihood of the real next token grows, in nats.
        bytes_per_token: Bytes that K and V of one token take over all layers.
        bytes_ratio: The same as a share of the ``model`` format.
    """

    name: str
    kl_mean: float
    kl_p99: float
    top1_agreement: float
    nll_change: float
    bytes_per_token: int
    bytes_ratio: float


@dataclass(frozen=True, slots=True)
class HeadError:
    """Error of the attention output of the query heads that share one kv head, root mean square, relative to it.

    Attributes:
        format: The format.
        layer: Layer index.
        kv_head: Head index.
        key: With only K in the format.
        value: With only V in the format.
        both: With both.
    """

    format: str
    layer: int
    kv_head: int
    key: float
    value: float
    both: float


@dataclass(frozen=True, slots=True)
class OutlierHead:
    """A kv head whose keys lose far more than other heads' keys do.

    Attributes:
        layer: Layer index.
        kv_head: Head index.
        bits: Bits that K was stored in: 4 or 8.
        error: Its ``HeadError.key``.
        times_median: The same as a multiple of the median head's.
    """

    layer: int
    kv_head: int
    bits: int
    error: float
    times_median: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationReport:
    """What each format costs, measured. Prints as tables.

    Attributes:
        fingerprint: Of the model, tokenizer and template that were measured, in hexadecimal.
        dtype: What the model computes in.
        prompts: Prompts measured.
        skipped_prompts: Prompts too short to measure.
        cut_prompts: Prompts measured only up to the model's longest context.
        scored_tokens: Tokens that the figures of the whole model are averages over.
        nll: Negative log-likelihood of the real next token without quantisation, in nats, mean over tokens.
        noise: What rounding alone does: the model's own attention against ours. Differences below it mean nothing.
        formats: The whole model, one entry per format, in the order asked for.
        heads: Every head, one entry per format, layer and kv head.
        outliers: Heads that stand out, by bits, the largest multiple first; see :func:`find_outliers`.
    """

    fingerprint: str
    dtype: str
    prompts: int
    skipped_prompts: int
    cut_prompts: int
    scored_tokens: int
    nll: float
    noise: FormatQuality
    formats: tuple[FormatQuality, ...]
    heads: tuple[HeadError, ...]
    outliers: tuple[OutlierHead, ...]

    def to_json(self) -> str:
        """Return the report as JSON text, fields as they are named here. Infinities become null."""
        return json.dumps(_finite(asdict(self)), indent=1, allow_nan=False)

    def __str__(self) -> str:
        first = (
            f"{self.prompts} prompts, {self.scored_tokens} tokens, {self.dtype}; "
            f"negative log-likelihood {self.nll:.4f} without quantisation"
        )
        if self.skipped_prompts or self.cut_prompts:
            first += f"; {self.skipped_prompts} prompts too short, {self.cut_prompts} cut to the context"
        return "\n\n".join((first, self._quality_table(), self._head_table(), self._outlier_table()))

    def _quality_table(self) -> str:
        rows = [("format", "KL mean", "KL p99", "top-1", "NLL change", "bytes/token", "of model")]
        for one in (self.noise, *self.formats):
            rows.append(
                (
                    one.name,
                    f"{one.kl_mean:.5f}",
                    f"{one.kl_p99:.4f}",
                    f"{one.top1_agreement:.2%}",
                    f"{one.nll_change:+.5f}",
                    str(one.bytes_per_token),
                    f"{one.bytes_ratio:.3f}",
                )
            )
        note = "stock is the model's own attention, nothing quantised: the part of each figure that is rounding"
        return f"{_table(rows)}\n{note}"

    def _head_table(self) -> str:
        rows: list[Sequence[str]] = [
            ("attention output", "K median", "K worst", "V median", "V worst", "both median", "both worst")
        ]
        for one in self.formats:
            heads = [head for head in self.heads if head.format == one.name]
            cells = [one.name]
            for side in ("key", "value", "both"):
                errors = [getattr(head, side) for head in heads]
                cells += [f"{statistics.median(errors):.2%}", f"{max(errors):.2%}"]
            rows.append(cells)
        return _table(rows)

    def _outlier_table(self) -> str:
        if not self.outliers:
            return "no kv head stands out"
        rows = [("outlier head", "kv head", "K bits", "K error", "x median")]
        for one in self.outliers[:_SHOWN_HEADS]:
            rows.append(
                (
                    f"layer {one.layer}",
                    str(one.kv_head),
                    str(one.bits),
                    f"{one.error:.2%}",
                    f"{one.times_median:.1f}",
                )
            )
        hidden = len(self.outliers) - _SHOWN_HEADS
        return _table(rows) + (f"\nand {hidden} more" if hidden > 0 else "")


def find_outliers(heads: Sequence[tuple[int, int, float]], bits: int) -> tuple[OutlierHead, ...]:
    """Return the heads whose error is far above the others', the largest first; changes nothing.

    A head is one if the logarithm of its error lies more than :data:`OUTLIER_SCORE` robust standard deviations above
    the median and the error is :data:`OUTLIER_TIMES_MEDIAN` times the median or more. Errors of heads spread over
    orders of magnitude, so it is their logarithms that are near normal; and neither a median nor a median absolute
    deviation is moved by the heads that are looked for, as long as they are fewer than half.

    Args:
        heads: Layer, kv head and error of every head.
        bits: Bits that the keys were stored in.

    Source: the modified z-score of Iglewicz and Hoaglin (1993), here of logarithms and of one side.
    """
    logs = {(layer, head): math.log(error) for layer, head, error in heads if 0 < error < math.inf}
    if not logs:
        return ()
    middle = statistics.median(logs.values())
    spread = statistics.median(abs(log - middle) for log in logs.values()) / _NORMAL_MAD
    least = max(middle + OUTLIER_SCORE * spread, middle + math.log(OUTLIER_TIMES_MEDIAN))
    found = [
        OutlierHead(layer, head, bits, error, error / math.exp(middle))
        for layer, head, error in heads
        if error > 0 and math.log(error) >= least
    ]
    return tuple(sorted(found, key=lambda one: -one.error))


def _finite(value: object) -> object:
    """Return plain data with None for numbers that JSON cannot spell."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as aligned columns under a line: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        numbers = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        lines.append("  ".join((first.ljust(widths[0]), *numbers)))
    lines.insert(1, "-" * len(lines[0]))
    return "\n".join(lines)
