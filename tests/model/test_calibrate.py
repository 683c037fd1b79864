"""Calibration measures what a pool would do, on the model as it is, and leaves it so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from prefixkv.attention.torch_ref import TorchBackend, oracle_attention
from prefixkv.cache.spec import KVCacheSpec, LayerSpec
from prefixkv.errors import ConfigError, IntegrityError, InvalidRequest, UnsupportedModel
from prefixkv.kv.storage import KVStorage
from prefixkv.measure.calibration import FormatQuality
from prefixkv.model import meters as module
from prefixkv.model.batch import Chunk, ForwardBatch
from prefixkv.model.calibrate import CalibrationReport, calibrate
from prefixkv.model.hook import Attachment, PoolStep, active_step, layer_index, score_scaling
from prefixkv.model.inspect import observe
from prefixkv.model.load import LoadedModel, wrap
from tests.support import SERVED, byte_tokenizer, demo_loaded, random_ids, tiny_model

FIRST = 15
MANY_HEADS = {"num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4}


def tiny(arch: str = "llama", **over: Any) -> LoadedModel:
    return wrap(tiny_model(arch, **over), byte_tokenizer())


def quality(report: CalibrationReport) -> dict[str, FormatQuality]:
    return {one.name: one for one in report.formats}


@pytest.mark.parametrize("arch", sorted(SERVED))
def test_the_model_format_costs_nothing(arch: str) -> None:
    """The path itself adds nothing, and attends as the model does: windows, soft caps and sinks included."""
    report = calibrate(tiny(arch), [random_ids(40), random_ids(33, 1)], ["model"])
    (one,) = report.formats
    assert (one.kl_mean, one.kl_p99, one.top1_agreement, one.nll_change) == (0, 0, 1, 0)
    assert all((head.key, head.value, head.both) == (0, 0, 0) for head in report.heads)
    assert report.noise.kl_mean < 1e-7
    assert report.noise.top1_agreement == 1
    assert report.scored_tokens == 40 + 33 - 2 * (FIRST + 1)


def test_fewer_bits_cost_more_and_codecs_cost_the_same_in_every_format() -> None:
    names = ["int8", "k8v4", "k4v8", "int4"]
    report = calibrate(tiny(), [random_ids(60), random_ids(80, 1)], names)
    found = quality(report)
    assert list(found) == names
    assert 0 < found["int8"].kl_mean < found["k8v4"].kl_mean < found["int4"].kl_mean
    assert found["int8"].kl_mean < 0.002
    assert found["k4v8"].kl_mean < found["int4"].kl_mean
    assert all(one.kl_p99 > one.kl_mean for one in report.formats)
    assert [one.bytes_per_token for one in report.formats] == [160, 128, 128, 96]
    assert found["int8"].bytes_ratio == 160 / 512
    heads = {name: [head for head in report.heads if head.format == name] for name in names}
    assert [(head.layer, head.kv_head) for head in heads["int4"]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for eight, mixed, other, four in zip(*heads.values(), strict=True):
        assert eight.key == mixed.key < other.key == four.key
        assert eight.value == other.value < mixed.value == four.value
        assert max(four.key, four.value) < four.both < four.key + four.value


@pytest.mark.parametrize(("layer", "head", "channel"), [(0, 3, 0), (1, 2, 5), (2, 1, 9)])
def test_a_planted_outlier_head_is_found_and_named(layer: int, head: int, channel: int) -> None:
    """One channel of one head's keys is 50 times as large, as real models have them; nobody else is accused."""
    model = tiny_model("llama", **MANY_HEADS)
    prompts = [random_ids(90, i) for i in range(3)]
    assert calibrate(wrap(model, byte_tokenizer()), prompts, ["int8", "int4"]).outliers == ()
    with torch.no_grad():
        model.model.layers[layer].self_attn.k_proj.weight[head * 16 + channel] *= 50
    report = calibrate(wrap(model, byte_tokenizer()), prompts, ["int8", "int4"])
    assert [(one.layer, one.kv_head, one.bits) for one in report.outliers] == [(layer, head, 4), (layer, head, 8)]
    named = {(one.format, one.layer, one.kv_head): one for one in report.heads}
    assert report.outliers[0].error == named["int4", layer, head].key
    assert report.outliers[1].times_median > 3  # turned by a Hadamard matrix, which hides the rest


Rows = tuple[torch.Tensor, torch.Tensor]


def pool(k: torch.Tensor, v: torch.Tensor, name: str) -> KVStorage:
    """Return a pool of one block that holds k [T, K, D] and v [T, K, Dv]."""
    layers = (LayerSpec(k.shape[1], k.shape[-1], v.shape[-1]),)
    storage = KVStorage(KVCacheSpec(layers, "float32", name, len(k)), 1, "cpu")
    storage.write(0, torch.arange(len(k)), k, v)
    return storage


def given_back(k: torch.Tensor, v: torch.Tensor, name: str) -> Rows:
    """Return what a pool gives back for k [T, K, D] and v [T, K, Dv]."""
    keys, values = pool(k, v, name).gather(0, torch.tensor([[0]]))
    return keys[0].transpose(0, 1), values[0].transpose(0, 1)


def one_chunk(ids: list[int]) -> ForwardBatch:
    chunk = Chunk(ids, 0, [0], False)
    device = torch.device("cpu")
    return ForwardBatch.build([chunk], block_size=len(ids), num_blocks=1, device=device, all_logits=True)


class OracleStep:
    """Attends with the oracle over unquantised rows, and keeps what each call was given."""

    def __init__(self, ids: list[int], windows: tuple[int | None, ...]) -> None:
        self.calls: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]] = {}
        self._meta = one_chunk(ids).attention
        self._windows = windows

    def mask(self, arguments: dict[str, Any]) -> None:
        return None

    def attend(
        self, owner: torch.nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: object, options: Any
    ) -> torch.Tensor:
        layer = layer_index(owner)
        named = {"softcap": options.get("softcap"), "sinks": options.get("s_aux")}
        named |= {"scaling": score_scaling(owner, q, options), "window": self._windows[layer]}
        self.calls[layer] = (q[0].transpose(0, 1), k[0].transpose(0, 1), v[0].transpose(0, 1), named)
        return self.output(layer, *self.calls[layer][1:3])[None]

    def output(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Return [T, H, Dv] of a call with other rows."""
        q, _, _, named = self.calls[layer]
        return oracle_attention(0, q, pool(k, v, "model"), self._meta, **named)


@pytest.mark.parametrize("arch", ["llama", "gemma2", "gpt_oss"])
def test_errors_of_heads_are_those_of_the_oracle(arch: str) -> None:
    """Another way to the same numbers: rows from real pools, attended head by head and token by token."""
    loaded = tiny(arch)
    ids = random_ids(40)
    report = calibrate(loaded, [ids], ["k4v8"])
    attachment = Attachment(loaded.model)
    step = OracleStep(ids, observe(loaded.model).windows)
    with torch.inference_mode(), active_step(step):
        loaded.model(input_ids=torch.tensor([ids]), use_cache=False)
    attachment.detach()
    for head in report.heads:
        _, k, v, _ = step.calls[head.layer]
        stored_k, stored_v = given_back(k, v, "k4v8")
        exact, *others = (
            step.output(head.layer, *rows)[FIRST:].unflatten(1, (2, -1))[:, head.kv_head]
            for rows in ((k, v), (stored_k, v), (k, stored_v), (stored_k, stored_v))
        )
        want = [((other - exact).square().sum() / exact.square().sum()).sqrt().item() for other in others]
        assert [head.key, head.value, head.both] == pytest.approx(want, rel=1e-3)


@pytest.mark.parametrize("arch", ["llama", "gemma2", "gpt_oss", "gpt2"])
def test_the_whole_model_is_measured_as_a_pool_would_make_it(arch: str) -> None:
    """Another way to the same numbers: the rows are written to a pool of the format and attended to in it."""
    loaded = tiny(arch)
    ids = random_ids(40)
    report = calibrate(loaded, [ids], ["int4"])
    with torch.inference_mode():
        exact = loaded.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
        attachment = Attachment(loaded.model)
        shape = observe(loaded.model)
        storage = KVStorage(KVCacheSpec(shape.layers, shape.dtype, "int4", len(ids)), 1, "cpu")
        batch = one_chunk(ids)
        with active_step(PoolStep(storage, TorchBackend(), batch.attention, shape.windows)):
            pooled = loaded.model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits[0]
        attachment.detach()
    log_p, log_q = (side[FIRST:-1].double().log_softmax(-1) for side in (exact, pooled))
    divergence = (log_p.exp() * (log_p - log_q)).sum(-1)
    real = torch.tensor(ids[FIRST + 1 :])[:, None]
    (one,) = report.formats
    assert one.kl_mean == pytest.approx(float(divergence.mean()), rel=1e-2)
    assert one.kl_p99 == pytest.approx(float(divergence.max()), rel=1e-2)
    assert one.top1_agreement == float((log_p.argmax(-1) == log_q.argmax(-1)).double().mean())
    assert one.nll_change == pytest.approx(float((log_p - log_q).gather(1, real).mean()), rel=1e-2, abs=1e-5)
    assert report.nll == pytest.approx(float(-log_p.gather(1, real).mean()), rel=1e-5)


def test_small_tiles_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long prompts and large vocabularies are measured in pieces."""
    loaded, prompts = tiny("gpt_oss"), [random_ids(50)]
    whole = calibrate(loaded, prompts, ["int8"])
    monkeypatch.setattr(module, "_TILE_SCORES", 1000)
    monkeypatch.setattr(module, "_TILE_LOGITS", 1000)
    pieces = calibrate(loaded, prompts, ["int8"])
    assert pieces.formats[0].kl_mean == pytest.approx(whole.formats[0].kl_mean, rel=1e-2)
    assert pieces.nll == pytest.approx(whole.nll)
    assert [one.both for one in pieces.heads] == pytest.approx([one.both for one in whole.heads], rel=1e-3)


def test_prompts_are_cut_to_the_context_and_short_ones_skipped() -> None:
    """A recorded conversation may be longer than the model bears; a greeting holds nothing to measure."""
    loaded = tiny("llama", max_position_embeddings=48)
    long = random_ids(100)
    lines: list[str] = []
    report = calibrate(
        loaded, [long, random_ids(FIRST + 1), [], random_ids(FIRST + 2, 3)], ["int8"], progress=lines.append
    )
    assert (report.prompts, report.skipped_prompts, report.cut_prompts) == (2, 2, 1)
    assert report.scored_tokens == 48 - (FIRST + 1) + 1
    same = calibrate(loaded, [long[:48], random_ids(FIRST + 2, 3)], ["int8"])
    assert (same.formats, same.heads, same.cut_prompts) == (report.formats, report.heads, 0)
    assert [line.split(" (")[0] for line in lines] == ["prompt 1 of 2: 48 tokens", "prompt 2 of 2: 17 tokens"]


@pytest.mark.parametrize(
    ("prompts", "formats", "error", "word"),
    [
        ([random_ids(30)], [], ConfigError, "formats"),
        ([random_ids(30)], ["int8", "int8"], ConfigError, "once"),
        ([random_ids(30)], ["int3"], ConfigError, "int3"),
        ([], ["int8"], ConfigError, "16 tokens"),
        ([random_ids(16)], ["int8"], ConfigError, "16 tokens"),
        ([random_ids(30), [*random_ids(30), 320]], ["int8"], InvalidRequest, r"prompts\[1\]\[30\].*bad_token_id"),
        ([[True] * 30], ["int8"], InvalidRequest, "bad_token_id"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    prompts: Any, formats: list[str], error: type[Exception], word: str
) -> None:
    loaded = tiny()
    with pytest.raises(error, match=word):
        calibrate(loaded, prompts, formats)
    assert loaded.model.config._attn_implementation == "sdpa"


def test_a_format_that_cannot_hold_the_rows_is_refused_before_work_starts() -> None:
    """4 bits need pairs."""
    loaded = tiny("gpt2", n_embd=60, hidden_size=60)
    lines: list[str] = []
    with pytest.raises(ConfigError, match="int8"):
        calibrate(loaded, [random_ids(30)], ["int8", "int4"], progress=lines.append)
    assert not lines
    assert calibrate(loaded, [random_ids(30)], ["int8"]).formats[0].kl_mean > 0


def test_a_model_that_cannot_be_served_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="ALiBi"):
        calibrate(tiny("bloom"), [random_ids(30)], ["int8"])


def test_the_model_is_left_as_it_was() -> None:
    """It belongs to its user: also after a forward failed."""
    loaded = tiny()
    ids = torch.tensor([random_ids(20)])
    before = loaded.model(input_ids=ids).logits
    calibrate(loaded, [random_ids(30)], ["int8"])
    assert loaded.model.config._attn_implementation == "sdpa"
    handle = loaded.model.model.layers[1].register_forward_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        calibrate(loaded, [random_ids(30)], ["int8"])
    handle.remove()
    assert loaded.model.config._attn_implementation == "sdpa"
    assert torch.equal(loaded.model(input_ids=ids).logits, before)


def test_a_forward_that_does_not_come_by_is_noticed() -> None:
    """If somebody changes the attention meanwhile, figures of the stock model must not pass for a format's."""
    loaded = tiny()

    def change(line: str) -> None:
        loaded.model.set_attn_implementation("sdpa")

    with pytest.raises(IntegrityError, match="0 attention calls"):
        calibrate(loaded, [random_ids(30), random_ids(30, 1)], ["int8"], progress=change)


def test_the_report_names_what_was_measured() -> None:
    loaded = tiny()
    data = json.loads(calibrate(loaded, [random_ids(30)], ["int8"]).to_json())
    assert (data["fingerprint"], data["dtype"]) == (loaded.fingerprint.hex(), "float32")
    assert len(data["heads"]) == 4


@pytest.mark.data
def test_the_demo_models_figures_on_real_dialogues_stay_low(data_dir: Path) -> None:
    """Loose guards; bfloat16 alone moves the distribution by 0.001 to 0.002."""
    loaded = demo_loaded()
    lines = (data_dir / "conversations" / "sgd" / "dialogues.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = []
    for line in lines[::300][:2]:
        turns = [turn for turn in json.loads(line)["messages"] if turn["role"] != "tool" and turn["content"]]
        prompts.append(loaded.tokenizer.apply_chat_template(turns, tokenize=True, return_dict=False)[:160])
    report = calibrate(loaded, prompts, ["int8", "k8v4", "int4"])
    found = quality(report)
    assert found["int8"].kl_mean < found["k8v4"].kl_mean < found["int4"].kl_mean
    assert found["int8"].kl_mean <= 0.005
    assert found["k8v4"].kl_mean <= 0.03
    assert found["int8"].top1_agreement >= 0.95
    assert report.noise.kl_mean < found["int8"].kl_mean + 0.002
    assert report.outliers == ()
