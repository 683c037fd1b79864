"""The calibration file: written and read back, and everything that is wrong with one."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from prefixkv.cache.spec import KVCacheSpec, LayerSpec, RaisedHead
from prefixkv.errors import ConfigError
from prefixkv.kv.calibration import PoolCalibration, rounded_offsets

SPEC = KVCacheSpec((LayerSpec(2, 4, 4), LayerSpec(1, 4, 6)), "float32", "int4", 8)
OFFSETS = (((0.5, -1.25, 3.0, 0.0), (1e-5, 2.0, -3.0, 4.0)), ((1234.0, 0.1, 0.2, 0.3),))
MADE = PoolCalibration("ab" * 32, "int4", (RaisedHead(0, 1, "int8"), RaisedHead(1, 0, "model")), OFFSETS)


def written(folder: Path, data: object) -> Path:
    path = folder / "calibration.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data), encoding="utf-8")
    return path


def test_what_is_written_is_read(tmp_path: Path) -> None:
    for made in (MADE, replace(MADE, heads=(), key_offsets=None)):
        path = written(tmp_path, made.to_json())
        assert PoolCalibration.read(path) == made == PoolCalibration.read(str(path))
        assert json.loads(made.to_json())["version"] == "prefixkv-calibration v1"


def test_everything_that_changes_rows_changes_the_digest() -> None:
    """It is part of the keys that cached blocks are found by."""
    others = [
        replace(MADE, heads=()),
        replace(MADE, heads=(RaisedHead(0, 1, "model"), RaisedHead(1, 0, "model"))),
        replace(MADE, key_offsets=None),
        replace(MADE, key_offsets=(OFFSETS[0], ((1234.0, 0.1, 0.2, 0.4),))),
    ]
    assert len({one.digest for one in (MADE, *others)}) == 5
    assert MADE.digest == replace(MADE).digest


def edited(**changes: Any) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(MADE.to_json())
    return {**data, **changes}


HEAD = {"layer": 0, "kv_head": 0, "kv_format": "int8"}


@pytest.mark.parametrize(
    ("data", "word"),
    [
        ("", "JSON"),
        ("[]", "Input should be an object"),
        ('{"a": 1', "JSON"),
        ({k: v for k, v in edited().items() if k != "heads"}, "heads: Field required"),
        ({k: v for k, v in edited().items() if k != "key_offsets"}, "key_offsets: Field required"),
        (edited(more=1), "more: Extra inputs"),
        (edited(version="prefixkv-calibration v2"), "version: "),
        (edited(fingerprint="xy"), "fingerprint: "),
        (edited(fingerprint=12), "fingerprint: "),
        (edited(kv_format=4), "kv_format: "),
        (edited(heads={}), "heads: "),
        (edited(heads=[HEAD, {**HEAD, "layer": -1}]), r"heads\[1\].layer: "),
        (edited(heads=[{**HEAD, "layer": "0"}]), r"heads\[0\].layer: "),
        (edited(heads=[{**HEAD, "layer": True}]), r"heads\[0\].layer: "),
        (edited(heads=[{**HEAD, "kv_head": 0.5}]), r"heads\[0\].kv_head: "),
        (edited(heads=[{**HEAD, "kv_format": None}]), r"heads\[0\].kv_format: "),
        (edited(heads=[{**HEAD, "bits": 8}]), r"heads\[0\].bits: "),
        (edited(key_offsets=[[[0.0, "1"]]]), r"key_offsets\[0\]\[0\]\[1\]: "),
        (edited(key_offsets=[[[0.0, math.nan]]]), "key_offsets|JSON"),
        (edited(key_offsets=[[[0.0, math.inf]]]), "key_offsets|JSON"),
        (edited(key_offsets=[[[0.0], [1e30]]]), r"key_offsets\[0\]\[1\]\[0\]: "),
        (edited(key_offsets=[0.0]), r"key_offsets\[0\]: "),
    ],
)
def test_a_malformed_file_is_refused_with_the_path_of_the_field(tmp_path: Path, data: object, word: str) -> None:
    """It decides what every later token sees: nothing is guessed and nothing passed over."""
    path = written(tmp_path, data)
    with pytest.raises(ConfigError, match=word) as error:
        PoolCalibration.read(path)
    assert str(error.value).startswith(f"CacheConfig.calibration='{path}': ")
    assert "prefixkv calibrate --write" in str(error.value)


def test_a_file_that_is_absent_or_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read \(No such file"):
        PoolCalibration.read(tmp_path / "absent.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        PoolCalibration.read(tmp_path)
    for name in ("~no-such-user/x.json", "a\0b"):
        with pytest.raises(ConfigError, match="cannot be read"):
            PoolCalibration.read(name)
    monkeypatch.setattr("prefixkv.kv.calibration._MOST_BYTES", 100)
    with pytest.raises(ConfigError, match="larger than 100 bytes"):
        PoolCalibration.read(written(tmp_path, MADE.to_json()))


def test_another_model_or_format_is_refused_with_what_to_do() -> None:
    MADE.check_made_for("ab" * 32, "int4")
    with pytest.raises(ConfigError, match=r"kv_format='int4', the pool has 'int8'; choose"):
        MADE.check_made_for("ab" * 32, "int8")
    with pytest.raises(ConfigError, match=r"the model abababababab, this is cdcdcdcdcdcd .*make it with"):
        MADE.check_made_for("cd" * 32, "int4")


def test_it_is_applied_to_the_pool_it_fits() -> None:
    assert MADE.applied(SPEC, biased=False) == replace(SPEC, raised=MADE.heads)
    plain = replace(MADE, key_offsets=None)
    assert plain.applied(SPEC, biased=True) == plain.applied(replace(SPEC, kv_format="int4"), biased=False)
    tensors = MADE.offset_tensors()
    assert tensors is not None
    assert [tuple(layer.shape) for layer in tensors] == [(2, 4), (1, 4)]
    assert tensors[0][0].tolist() == [0.5, -1.25, 3.0, 0.0]
    assert plain.offset_tensors() is None


@pytest.mark.parametrize(
    ("made", "spec", "biased", "word"),
    [
        (replace(MADE, heads=(RaisedHead(2, 0, "int8"),)), SPEC, False, r"heads\[0\].layer=2"),
        (replace(MADE, heads=(RaisedHead(0, 0, "int4"),)), SPEC, False, r"heads\[0\].kv_format='int4'"),
        (replace(MADE, heads=()), replace(SPEC, kv_format="k8v4"), False, "keys of 4 bits"),
        (MADE, SPEC, True, "sinks.*set them to null"),
        (replace(MADE, key_offsets=OFFSETS[:1]), SPEC, False, "1 layers, the model has 2"),
        (replace(MADE, key_offsets=(OFFSETS[0], OFFSETS[0])), SPEC, False, r"key_offsets\[1\]: must be 1 rows of 4"),
        (replace(MADE, key_offsets=(OFFSETS[0], ((1.0,),))), SPEC, False, r"key_offsets\[1\]: must be 1 rows of 4"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(
    made: PoolCalibration, spec: KVCacheSpec, biased: bool, word: str
) -> None:
    with pytest.raises(ConfigError, match=f"^CacheConfig.calibration: .*{word}"):
        made.applied(spec, biased=biased)


def test_means_are_rounded_and_what_no_file_may_hold_is_left_out() -> None:
    means = torch.tensor([[0.123456, -98764e-9, 1e9, math.nan]], dtype=torch.float64)
    assert rounded_offsets([means]) == (((0.1235, -9.876e-05, 0.0, 0.0),),)
