"""A calibration is made from prompts, finds what was planted, restores the quality, and a pool built with it agrees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from prefixkv.config import CacheConfig
from prefixkv.errors import ConfigError
from prefixkv.kv.calibration import PoolCalibration
from prefixkv.measure.calibration import CalibrationReport, FormatQuality
from prefixkv.model import calibrate as module
from prefixkv.model.batch import Chunk
from prefixkv.model.calibrate import calibrate, calibrate_pool
from prefixkv.model.hook import Attachment, active_step
from prefixkv.model.load import LoadedModel, wrap
from prefixkv.model.meters import StoredRows
from prefixkv.model.runner import ModelRunner
from tests.support import byte_tokenizer, demo_loaded, random_ids, tiny_model

MANY_HEADS = {"num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4}
PROMPTS = [random_ids(90, i) for i in range(3)]


def tiny(arch: str = "llama", **over: Any) -> LoadedModel:
    return wrap(tiny_model(arch, **over), byte_tokenizer())


def plant(model: PreTrainedModel, layer: int, head: int, channel: int, times: float = 50) -> None:
    """Make two numbers that RoPE turns together large in the keys of a head, and as small in its queries.

    What the model says stays the same; what its keys lose in few bits does not.
    """
    attention = model.model.layers[layer].self_attn
    with torch.no_grad():
        for own in (channel, channel + 8):
            attention.k_proj.weight[head * 16 + own] *= times
            for query in (2 * head, 2 * head + 1):
                attention.q_proj.weight[query * 16 + own] /= times


def quality(report: CalibrationReport) -> dict[str, FormatQuality]:
    return {one.name: one for one in report.formats}


@pytest.mark.parametrize(("layer", "head", "channel"), [(0, 3, 0), (1, 2, 5), (2, 1, 3)])
@pytest.mark.parametrize("kv_format", ["int4", "k4v8", "int8"])
def test_a_planted_outlier_head_is_found_and_its_override_restores_the_quality(
    kv_format: str, layer: int, head: int, channel: int
) -> None:
    """The divergence of a pool of that format falls back to what it was before anything was planted."""
    model = tiny_model("llama", **MANY_HEADS)
    before = calibrate(wrap(model, byte_tokenizer()), PROMPTS, [kv_format]).formats[0]
    plant(model, layer, head, channel)
    report, made = calibrate_pool(wrap(model, byte_tokenizer()), PROMPTS, [kv_format], kv_format)
    found = quality(report)
    assert [(one.layer, one.kv_head, one.kv_format) for one in made.heads] == [(layer, head, "model")]
    assert found[kv_format].kl_mean > 1.5 * before.kl_mean
    assert found[f"{kv_format}*"].kl_mean < 1.1 * before.kl_mean
    assert found[f"{kv_format}*"].bytes_per_token == found[kv_format].bytes_per_token + 2 * 16 * 4
    worst = {one.format: one.key for one in report.heads if (one.layer, one.kv_head) == (layer, head)}
    assert worst[f"{kv_format}*"] < 1e-6 < worst[kv_format]


def test_without_outliers_nothing_is_raised_and_mean_keys_are_left_out() -> None:
    """Another way to the means: what the model's own attention is given."""
    loaded = tiny()
    report, made = calibrate_pool(loaded, PROMPTS, ["int8"], "int4")
    assert [one.name for one in report.formats] == ["int8", "int4*"]
    assert made.heads == ()
    assert (made.fingerprint, made.kv_format) == (loaded.fingerprint.hex(), "int4")
    keys: list[list[torch.Tensor]] = [[], []]

    class Step:
        def mask(self, arguments: dict[str, Any]) -> None:
            return None

        def attend(self, owner: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> torch.Tensor:
            keys[owner.layer_idx].append(k[0, :, 4:])
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return out.transpose(1, 2)

    attachment = Attachment(loaded.model)
    with torch.inference_mode(), active_step(Step()):
        for prompt in PROMPTS:
            loaded.model(input_ids=torch.tensor([prompt]), use_cache=False)
    attachment.detach()
    offsets = made.offset_tensors()
    assert offsets is not None
    for got, seen in zip(offsets, keys, strict=True):
        torch.testing.assert_close(got, torch.cat(seen, 1).mean(1), atol=1e-4, rtol=1e-3)


def test_keys_far_from_zero_lose_less_without_their_mean() -> None:
    """A bias gives every key of a head the same part; softmax does not see it, and codes need not hold it."""
    model = tiny_model("qwen2")
    with torch.no_grad():
        for layer in model.model.layers:
            # Channels that RoPE hardly turns: only there a mean over positions is large.
            layer.self_attn.k_proj.bias.view(2, 16)[:, [7, 15]] = 20.0
    report, made = calibrate_pool(wrap(model, byte_tokenizer()), PROMPTS, ["int4"], "int4")
    found = quality(report)
    assert made.heads == ()
    assert found["int4*"].kl_mean < 0.6 * found["int4"].kl_mean
    assert found["int4*"].bytes_per_token == found["int4"].bytes_per_token


@pytest.mark.parametrize(("arch", "kv_format"), [("gemma2", "int4"), ("gpt_oss", "int4"), ("llama", "k8v4")])
def test_offsets_are_left_out_where_they_would_do_harm_or_nothing(arch: str, kv_format: str) -> None:
    """A cap and sinks see them; 8 bits have no need of them."""
    loaded = tiny(arch)
    _, made = calibrate_pool(loaded, PROMPTS, [kv_format], kv_format)
    assert made.key_offsets is None
    assert calibrate(loaded, PROMPTS, ["int4"]).formats[0].kl_mean > 0  # given back as it was


def test_the_model_format_has_nothing_to_calibrate() -> None:
    with pytest.raises(ConfigError, match="quantised format"):
        calibrate_pool(tiny(), PROMPTS, ["int8"], "model")
    with pytest.raises(ConfigError, match="int3"):
        calibrate_pool(tiny(), PROMPTS, ["int8"], "int3")


# -- pools built with it ------------------------------------------------------------------------------------------


def made_for(loaded: LoadedModel, kv_format: str, folder: Path) -> Path:
    _, made = calibrate_pool(loaded, PROMPTS, [kv_format], kv_format)
    path = folder / "calibration.json"
    path.write_text(made.to_json(), encoding="utf-8")
    return path


def all_logits(runner: ModelRunner, ids: list[int]) -> torch.Tensor:
    """Logits of all tokens: a chunk, then token by token."""
    first = runner.execute([Chunk(ids[:60], 0, [0, 1, 2, 3, 4, 5], True)])
    rest = [runner.execute([Chunk([ids[at]], at, [0, 1, 2, 3, 4, 5], True)]) for at in range(60, len(ids))]
    return torch.cat([first, *rest])


def divergence(p: torch.Tensor, q: torch.Tensor) -> float:
    log_p, log_q = p.double().log_softmax(-1), q.double().log_softmax(-1)
    return float((log_p.exp() * (log_p - log_q)).sum(-1).mean())


@pytest.mark.parametrize("backend", ["numba", "torch"])
def test_a_pool_with_the_calibration_restores_the_quality(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill and decode through the real pool, against the pool that keeps everything."""
    if backend == "numba":
        pytest.importorskip("numba", reason="the extra `cpu` is not installed")
    else:
        monkeypatch.setattr("prefixkv.kv.views.find_spec", lambda name: None)
    model = tiny_model("llama", **MANY_HEADS)
    plant(model, 1, 2, 5)
    loaded = wrap(model, byte_tokenizer())
    path = made_for(loaded, "int4", tmp_path)
    logits = {}
    for name, options in {
        "model": {"kv_format": "model"},
        "int4": {"kv_format": "int4"},
        "int4*": {"kv_format": "int4", "calibration": path},
    }.items():
        runner = ModelRunner.build(loaded, CacheConfig(memory="2MiB", block_size=16, **options))
        assert runner.backend == backend
        logits[name] = all_logits(runner, random_ids(90, 11))
        assert runner.storage.nbytes == runner.num_blocks * runner.spec.bytes_per_block <= 2 * 2**20
        runner.close()
    assert divergence(logits["model"], logits["int4*"]) < 0.5 * divergence(logits["model"], logits["int4"])


@pytest.mark.parametrize("heads", [[], [{"layer": 1, "kv_head": 0, "kv_format": "int8"}]])
def test_compiled_steps_read_and_write_a_calibrated_pool(tmp_path: Path, heads: list[dict[str, Any]]) -> None:
    """Both with offsets alone and with a raised head, they compute what torch does."""
    pytest.importorskip("numba", reason="the extra `cpu` is not installed")
    from prefixkv.kernels.numba_amx import refuse_amx

    if refuse_amx() is not None:
        pytest.skip(str(refuse_amx()))
    loaded = wrap(tiny_model("llama", head_dim=32).to(torch.bfloat16), byte_tokenizer())
    path = made_for(loaded, "int4", tmp_path)
    data = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**data, "heads": heads}), encoding="utf-8")
    runner = ModelRunner.build(loaded, CacheConfig(memory="2MiB", block_size=16, kv_format="int4", calibration=path))
    assert runner.decoder == "compiled", runner.step_refusal
    assert runner.format == f"int4, calibrated, {len(heads)} heads raised"
    ids = random_ids(80)
    steps = [
        Chunk(ids[:60], 0, [0, 1, 2, 3, 4], True),
        *(Chunk([ids[i]], i, [0, 1, 2, 3, 4], True) for i in range(60, 80)),
    ]
    got = torch.cat([runner.execute([step]) for step in steps])
    assert runner._fused is not None
    runner._fused.use_torch()
    want = torch.cat([runner.execute([step]) for step in steps])
    assert (got - want).abs().mean() < 0.03 * want.std()
    runner.close()


def test_a_calibration_of_another_model_or_shape_is_refused_and_the_model_released(tmp_path: Path) -> None:
    loaded = tiny()
    path = made_for(loaded, "int4", tmp_path)
    other = tiny("qwen3")
    with pytest.raises(ConfigError, match="was made for the model"):
        ModelRunner.build(other, CacheConfig(kv_format="int4", calibration=path))
    with pytest.raises(ConfigError, match="was made for kv_format='int4'"):
        ModelRunner.build(loaded, CacheConfig(kv_format="k4v8", calibration=path))
    with pytest.raises(ConfigError, match="cannot be read"):
        ModelRunner.build(loaded, CacheConfig(kv_format="int4", calibration=tmp_path / "none.json"))
    data = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**data, "heads": [{"layer": 9, "kv_head": 0, "kv_format": "int8"}]}), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"heads\[0\].layer=9"):
        ModelRunner.build(loaded, CacheConfig(kv_format="int4", calibration=path))
    capped = tiny("gemma2")
    path.write_text(json.dumps({**data, "fingerprint": capped.fingerprint.hex()}), encoding="utf-8")
    with pytest.raises(ConfigError, match="caps its scores"):
        ModelRunner.build(capped, CacheConfig(kv_format="int4", calibration=path))
    assert [one.model.config._attn_implementation for one in (loaded, other, capped)] == ["sdpa", "sdpa", "eager"]


@pytest.mark.data
@pytest.mark.slow
def test_the_demo_models_int4_loses_less_with_a_calibration(data_dir: Path) -> None:
    """Loose guards, on prompts that it was not made from."""
    loaded = demo_loaded()
    lines = (data_dir / "conversations" / "sgd" / "dialogues.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = []
    for line in lines[::200][:4]:
        turns = [turn for turn in json.loads(line)["messages"] if turn["role"] != "tool" and turn["content"]]
        prompts.append(loaded.tokenizer.apply_chat_template(turns, tokenize=True, return_dict=False)[:200])
    _, made = calibrate_pool(loaded, prompts[:2], ["int8"], "int4")
    assert len(made.heads) <= 9
    ways = [StoredRows("int4"), StoredRows("int4", made)]
    with module._attached(loaded) as shape:
        report = module._Calibration(loaded, shape, ways).run(prompts[2:], 2, lambda line: None)
    found = quality(report)
    assert found["int4*"].kl_mean < 0.85 * found["int4"].kl_mean
    assert found["int4*"].kl_mean <= 0.04
    assert found["int4*"].bytes_ratio <= 0.36


def test_a_calibration_is_plain_values(tmp_path: Path) -> None:
    """What was measured is what is loaded: the file holds the very numbers."""
    loaded = tiny()
    _, made = calibrate_pool(loaded, PROMPTS, ["int4"], "int4")
    path = tmp_path / "c.json"
    path.write_text(made.to_json(), encoding="utf-8")
    assert PoolCalibration.read(path) == made
