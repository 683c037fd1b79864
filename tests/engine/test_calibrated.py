"""An engine whose pool is calibrated: hits are misses, purge leaves nothing, another file is another cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from prefixkv import CacheConfig, Engine, EngineConfig, Principal, SamplingParams, SchedulerConfig
from prefixkv.errors import ConfigError
from prefixkv.model.calibrate import calibrate_pool
from prefixkv.model.load import wrap
from tests.engine.test_generate import prompts, run_together
from tests.support import byte_tokenizer, random_ids, tiny_model

SAMPLING = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
HEADS = [{"layer": 0, "kv_head": 1, "kv_format": "int8"}, {"layer": 1, "kv_head": 0, "kv_format": "model"}]


def file_for(model: Any, folder: Path, kv_format: str = "int4") -> Path:
    """A calibration of the model, with two heads raised by hand."""
    _, made = calibrate_pool(wrap(model, byte_tokenizer()), [random_ids(60)], [kv_format], kv_format)
    path = folder / "calibration.json"
    path.write_text(json.dumps({**json.loads(made.to_json()), "heads": HEADS}), encoding="utf-8")
    return path


def make(model: Any, **cache: Any) -> Engine:
    options: dict[str, Any] = {"kv_format": "int4", "memory": "16MiB", "block_size": 16, **cache}
    config = EngineConfig(
        cache=CacheConfig(**options),
        scheduler=SchedulerConfig(max_prefill_tokens=48),
        debug=True,
        secret=b"0123456789abcdef",
    )
    return Engine(model, byte_tokenizer(), config=config)


@pytest.mark.parametrize("arch", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_a_hit_gives_the_tokens_of_a_miss(arch: str, backend: str, tmp_path: Path) -> None:
    """Full attention, a window, a softcap with a window, sinks; prompts longer than a step's budget."""
    model = tiny_model(arch, head_dim=32)
    with make(model, calibration=file_for(model, tmp_path)) as engine:
        asked = prompts(250, [5, 33, 90, 130])
        cold = [engine.complete(p, principal=Principal("a"), sampling=SAMPLING) for p in asked]
        warm = [engine.complete(p, principal=Principal("a"), sampling=SAMPLING) for p in asked]
        assert [r.token_ids for r in warm] == [r.token_ids for r in cold]
        assert [r.usage.cached_tokens for r in warm] == [len(p) - 1 for p in asked]
        # Diverging inside a block copies rows.
        forked = [[*p[:-3], 7, 8, 9] for p in asked]
        hits = [engine.complete(p, principal=Principal("a"), sampling=SAMPLING) for p in forked]
        misses = [engine.complete(p, principal=Principal("b"), sampling=SAMPLING) for p in forked]
        assert [r.token_ids for r in hits] == [r.token_ids for r in misses]
        crowd = run_together(engine, [(p, Principal("a")) for p in asked * 2], SAMPLING)
        assert [r.token_ids for r in crowd] == [r.token_ids for r in cold] * 2
        engine.check()
        engine.purge("a")
        engine.purge("b")
        engine.check()
        assert engine._runner.storage.is_zero(range(engine._runner.num_blocks))


def test_bytes_are_accounted_and_described(tmp_path: Path) -> None:
    model = tiny_model("llama", head_dim=32)
    with make(model) as plain, make(model, calibration=file_for(model, tmp_path)) as engine:
        extra = 2 * (32 + 4) + 2 * 32 * 4
        assert engine.stats().block_bytes == plain.stats().block_bytes + 16 * extra
        assert "format int4, calibrated, 2 heads raised; " in engine.describe()
        assert "format int4; " in plain.describe()


def test_another_calibration_is_another_cache(tmp_path: Path) -> None:
    """Rows stored with other offsets or in another format must never be found: keys of blocks differ."""
    model = tiny_model("llama", head_dim=32)
    path = file_for(model, tmp_path)
    other = tmp_path / "other.json"
    other.write_text(json.dumps({**json.loads(path.read_text("utf-8")), "heads": HEADS[:1]}), encoding="utf-8")
    again = tmp_path / "again.json"
    again.write_text(json.dumps(json.loads(path.read_text("utf-8")), indent=3), encoding="utf-8")
    keys = []
    for calibration in (None, path, other, again):
        with make(model, calibration=calibration) as engine:
            keys.append(engine._runner.pool_key)
    assert len(set(keys)) == 3 and keys[1] == keys[3]


def test_a_file_for_another_model_is_refused_before_the_model_is_touched(tmp_path: Path) -> None:
    model = tiny_model("llama", head_dim=32)
    path = file_for(tiny_model("qwen3", head_dim=32), tmp_path)
    with pytest.raises(ConfigError, match=r"was made for the model .*prefixkv calibrate --write"):
        make(model, calibration=path)
    assert model.config._attn_implementation == "sdpa"
