"""The report of a calibration: who counts as an outlier, and how it prints."""

from __future__ import annotations

import json
import random

from hypothesis import given
from hypothesis import strategies as st

from prefixkv.measure.calibration import (
    OUTLIER_TIMES_MEDIAN,
    CalibrationReport,
    FormatQuality,
    HeadError,
    OutlierHead,
    find_outliers,
)


def heads(errors: list[float]) -> list[tuple[int, int, float]]:
    """Two kv heads a layer."""
    return [(i // 2, i % 2, error) for i, error in enumerate(errors)]


def ordinary(count: int, seed: int = 0) -> list[float]:
    """Errors as models show them: near log-normal, a third up and down."""
    draw = random.Random(seed)
    return [0.02 * draw.lognormvariate(0, 0.3) for _ in range(count)]


def test_an_outlier_is_named_with_its_multiple_of_the_median() -> None:
    found = find_outliers(heads([0.01, 0.01, 0.01, 0.08, 0.01]), 8)
    assert found == (OutlierHead(1, 1, 8, 0.08, found[0].times_median),)
    assert round(found[0].times_median, 9) == 8


def test_the_largest_comes_first() -> None:
    errors = ordinary(60)
    errors[7], errors[31] = 0.3, 0.9
    assert [(one.layer, one.kv_head) for one in find_outliers(heads(errors), 4)] == [(15, 1), (3, 1)]


def test_ordinary_spread_names_nobody() -> None:
    """An operator who raises heads for nothing pays bytes for nothing."""
    named = [one for seed in range(50) for one in find_outliers(heads(ordinary(90, seed)), 4)]
    assert len(named) <= 5, "of 4,500 heads"


def test_outliers_do_not_hide_each_other() -> None:
    """A mean and a standard deviation would be moved by them; a third of all heads still leaves the median alone."""
    errors = ordinary(60)
    for i in range(0, 60, 3):
        errors[i] = 1.0 + i
    assert len(find_outliers(heads(errors), 4)) == 20


def test_heads_that_are_all_alike_have_no_outlier_for_a_trifle() -> None:
    """Without the second rule the least difference would count: the median deviation is zero."""
    assert find_outliers(heads([0.01] * 20 + [0.011]), 8) == ()


@given(st.lists(st.one_of(st.just(0.0), st.floats(1e-9, 1e3), st.just(float("inf"))), max_size=40))
def test_whatever_the_errors_only_large_ones_are_named(errors: list[float]) -> None:
    """Zeros (a head that gives nothing) and infinities (its energy is zero) are no reason to fail."""
    known = sorted(error for error in errors if 0 < error < float("inf"))
    for one in find_outliers(heads(errors), 8):
        assert one.error >= OUTLIER_TIMES_MEDIAN * known[(len(known) - 1) // 2] * (1 - 1e-9)


def report(**over: object) -> CalibrationReport:
    sizes = {"bytes_per_token": 100, "bytes_ratio": 0.5}
    quality = FormatQuality(name="int8", kl_mean=0.001, kl_p99=0.02, top1_agreement=0.99, nll_change=-0.1, **sizes)
    stock = FormatQuality(name="stock", kl_mean=0.0, kl_p99=0.0, top1_agreement=1.0, nll_change=0.0, **sizes)
    fields: dict[str, object] = {
        "fingerprint": "ab",
        "dtype": "float32",
        "prompts": 2,
        "skipped_prompts": 0,
        "cut_prompts": 0,
        "scored_tokens": 40,
        "nll": 1.5,
        "noise": stock,
        "formats": (quality,),
        "heads": (HeadError("int8", 0, 0, 0.01, 0.02, 0.03), HeadError("int8", 0, 1, 0.03, 0.04, float("inf"))),
        "outliers": (),
    }
    return CalibrationReport(**{**fields, **over})


def test_it_prints_aligned_tables() -> None:
    outliers = tuple(OutlierHead(i, 1, 4, 0.5, 9.0) for i in range(20))
    text = str(report(outliers=outliers, skipped_prompts=3))
    tables = [part.splitlines() for part in text.split("\n\n")]
    assert "3 prompts too short" in tables[0][0]
    assert [len(table) for table in tables] == [1, 5, 3, 15]
    for (header, line, *rest), num_rows in zip(tables[1:], (2, 1, 12), strict=True):
        assert set(line) == {"-"}
        assert {len(row) for row in (line, *rest[:num_rows])} == {len(header)}
    assert "99.00%" in text and "and 8 more" in text
    assert "no kv head stands out" in str(report())


def test_json_has_every_field_and_is_json() -> None:
    """Infinity is no JSON, and a strict reader would refuse the whole file for it."""
    data = json.loads(report().to_json(), parse_constant=lambda word: 1 / 0)
    assert data["formats"][0]["kl_mean"] == 0.001
    assert data["heads"][0] == {"format": "int8", "layer": 0, "kv_head": 0, "key": 0.01, "value": 0.02, "both": 0.03}
    assert data["heads"][1]["both"] is None
    assert data["noise"]["name"] == "stock"
