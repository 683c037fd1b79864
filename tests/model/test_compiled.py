"""Small steps by compiled kernels are the fused decoder's, to the rounding of bfloat16."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("numba", reason="the extra `cpu` is not installed")

from prefixkv.config import CacheConfig
from prefixkv.kernels.numba_amx import refuse_amx
from prefixkv.kernels.numba_build import use_threads
from prefixkv.kernels.numba_layer import LayerWeights, StepRoom
from prefixkv.kernels.numba_step import Head, run_head
from prefixkv.model.batch import Chunk
from prefixkv.model.compiled import MOST_MISSES, CompiledLayers
from prefixkv.model.load import wrap
from prefixkv.model.runner import ModelRunner
from tests.support import byte_tokenizer, demo_loaded, random_ids, tiny_model

needs_amx = pytest.mark.skipif(refuse_amx() is not None, reason=str(refuse_amx()))

WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
KINDS = {
    "llama": ("llama", {}),
    "one kv head": ("llama", {"num_key_value_heads": 1}),
    "as many kv heads": ("llama", {"num_key_value_heads": 4}),
    "window": ("mistral", {"sliding_window": 9}),
    "qkv bias": ("qwen2", {}),
    "qk norm": ("qwen3", {}),
    "all biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "layers without RoPE": ("llama", {"kind": "smollm3", "no_rope_layers": [1, 0]}),
}


def runner_of(kind: str, kv_format: str = "model") -> ModelRunner:
    arch, changes = KINDS[kind]
    torch.manual_seed(0)
    model = tiny_model(arch, **{**WIDE, **changes}).to(torch.bfloat16)
    with torch.no_grad():  # biases start as zeros and norms as ones
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return ModelRunner.build(
        wrap(model, byte_tokenizer()), CacheConfig(memory="4MiB", block_size=16, kv_format=kv_format)
    )


@needs_amx
@pytest.mark.parametrize("tokens", [1, 5, 16, 17, 33, 64, 130])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_gives_what_the_fused_decoder_gives(kind: str, tokens: int) -> None:
    """Chunks and decodes, over rows of an earlier step, in one group of tokens and several."""
    runner = runner_of(kind)
    assert runner.decoder == "compiled", runner.step_refusal
    first = [Chunk(random_ids(20), 0, [3, 1], False), Chunk(random_ids(9, 1), 0, [5], False)]
    step = [Chunk(random_ids(1, 8), 9, [5], True)]
    if tokens > 1:
        step.insert(0, Chunk(random_ids(tokens - 1, 7), 20, [3, 1, 2, 4, *range(7, 13)], True))
    runner.execute(first)
    got = runner.execute(step)
    rows = [[part.clone() for part in (*layer.key, *layer.value)] for layer in runner.storage.layers]
    assert runner._fused is not None
    runner._fused.use_torch()
    want = runner.execute(step)
    # A long chunk's attention rounds its weights to bfloat16 in torch, and not in the kernel.
    assert (got - want).abs().mean() < 0.015 * want.std()
    torch.testing.assert_close(got, want, atol=0.15, rtol=0)
    for before, layer in zip(rows, runner.storage.layers, strict=True):
        for had, has in zip(before, (*layer.key, *layer.value), strict=True):
            torch.testing.assert_close(had.float(), has.float(), atol=0.06, rtol=0.06)


@needs_amx
@pytest.mark.parametrize("kv_format", ["int8", "k8v4", "k4v8", "int4"])
def test_every_format_is_read_and_written(kv_format: str) -> None:
    runner = runner_of("llama", kv_format=kv_format)
    assert runner.decoder == "compiled"
    ids = random_ids(40)
    chunks = [Chunk([token], at, [0, 1, 2], True) for at, token in enumerate(ids)]
    got = torch.cat([runner.execute([chunk]) for chunk in chunks])
    assert runner._fused is not None
    runner._fused.use_torch()
    want = torch.cat([runner.execute([chunk]) for chunk in chunks])
    assert (got - want).abs().mean() < 0.03 * want.std()


@needs_amx
def test_a_row_outside_the_pool_is_refused() -> None:
    """Kernels write to addresses; what the batch says is checked before, and by the kernel again."""
    from prefixkv.model.batch import ForwardBatch

    runner = runner_of("llama")
    chunk = Chunk([1], 0, [0], True)
    batch = ForwardBatch.build([chunk], block_size=16, num_blocks=runner.num_blocks, device=torch.device("cpu"))
    batch.attention.slot_mapping[0] = runner.num_blocks * 16
    with pytest.raises(IndexError, match="outside the pool"):
        runner._forward(batch, runner.storage, runner._fused)


@pytest.fixture(params=[torch.float64, torch.bfloat16])
def other_default(request: pytest.FixtureRequest) -> Iterator[Callable[[], None]]:
    """What changes torch's default dtype, until the test ends."""
    yield lambda: torch.set_default_dtype(request.param)
    torch.set_default_dtype(torch.float32)


@needs_amx
def test_a_step_does_not_depend_on_the_default_dtype(other_default: Callable[[], None]) -> None:
    """It is one for all threads, and transformers changes it while it loads a model: kernels wrote beyond the room."""
    runner = runner_of("llama", kv_format="int8")
    few = [Chunk(random_ids(9), 0, [5], True), Chunk(random_ids(1), 0, [4], True)]
    many = [Chunk(random_ids(90), 0, [3, 1, 2, 0, 6, 7], True)]  # needs a larger room
    want = [runner.execute(few), runner_of("llama", kv_format="int8").execute(many)]
    other_default()
    for _ in range(2):
        for step, logits in zip((few, many), want, strict=True):
            got = runner.execute(step)
            assert got.dtype == torch.float32
            assert torch.equal(got, logits)
        assert runner._fused is not None
        assert runner._fused._few is not None
        runner._fused._few._misses = MOST_MISSES  # layer by layer the second time


@needs_amx
@pytest.mark.parametrize("rows", [[0], [3, 1, 16], list(range(40))])
def test_the_head_takes_any_rows_of_the_step(rows: list[int]) -> None:
    bf = torch.bfloat16
    x, norm, weight = torch.randn(40, 64).to(bf), (1 + torch.randn(64) / 8).to(bf), torch.randn(128, 64).to(bf)
    square = torch.zeros(192, 64, dtype=bf)
    layer = LayerWeights(
        heads=1, kv_heads=1, dim=64, turns=False, eps=(1e-5, 1e-5), head_eps=0.0, in_norm=norm, qkv=square,
        qkv_bias=None, q_norm=None, k_norm=None, out=square[:64], out_bias=None, mlp_norm=norm,
        gate_up=square[:128], gate_up_bias=None, down=square[:64], down_bias=None,
    )  # fmt: skip
    room = StepRoom(layer, 48)
    room.begin(x)
    got = run_head(room, Head(norm, 1e-5, weight), np.array(rows))
    want = torch.nn.functional.linear(torch.nn.functional.rms_norm(x[rows], (64,), norm, 1e-5), weight).float()
    torch.testing.assert_close(got, want, atol=0.01, rtol=0.01)


@needs_amx
def test_a_number_that_is_none_stays_none() -> None:
    """A broken row must not come out as a plausible one: sampling refuses logits that are not finite."""
    runner = runner_of("llama")
    with torch.no_grad():
        runner._model.get_input_embeddings().weight[5, 3] = torch.nan
    logits = runner.execute([Chunk([5], 0, [0], True), Chunk([6], 0, [1], True)])
    assert logits[0].isnan().all()
    assert logits[1].isfinite().all()


@pytest.mark.parametrize(
    ("arch", "changes", "reason"),
    [
        ("llama", {}, "multiples of 32"),
        ("olmo2", WIDE, "norms what a layer adds"),
        ("llama", {**WIDE, "hidden_act": "gelu"}, "activation"),
    ],
)
def test_other_shapes_stay_with_torch_and_it_says_why(arch: str, changes: dict[str, Any], reason: str) -> None:
    model = tiny_model(arch, **changes).to(torch.bfloat16)
    runner = ModelRunner.build(wrap(model, byte_tokenizer()), CacheConfig(memory="1MiB", block_size=16))
    assert runner.decoder == "fused"
    assert reason in str(runner.step_refusal)


def test_other_dtypes_stay_with_torch() -> None:
    runner = ModelRunner.build(wrap(tiny_model("llama", **WIDE), byte_tokenizer()), CacheConfig(memory="1MiB"))
    assert "bfloat16" in str(runner.step_refusal)


@pytest.mark.parametrize("kv_format", ["model", "int8"])
def test_heads_too_large_for_the_kernels_are_computed_by_torch(kv_format: str) -> None:
    """What refuses attention by kernels refuses steps by kernels: they share its room."""
    model = tiny_model("llama", **{**WIDE, "head_dim": 1024}).to(torch.bfloat16)
    cache = CacheConfig(memory="16MiB", block_size=16, kv_format=kv_format)
    runner = ModelRunner.build(wrap(model, byte_tokenizer()), cache)
    assert (runner.backend, runner.decoder) == ("torch", "fused")
    assert runner.step_refusal == runner.refusals["numba"]
    assert "the most is 512" in runner.step_refusal
    runner.close()


def test_no_kernel_is_called_on_a_threading_layer_that_was_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``workqueue`` two engines that call kernels at once end the process."""
    import numba

    monkeypatch.setattr(numba.config, "THREADING_LAYER", "workqueue")
    runner = runner_of("llama")
    assert (runner.backend, runner.decoder) == ("torch", "fused")
    assert "workqueue" in str(runner.step_refusal)
    runner.close()


@needs_amx
def test_steps_that_raise_in_the_self_test_stay_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever they raise, the model is served."""

    def fail(*args: object) -> torch.Tensor:
        raise MemoryError("no room")

    monkeypatch.setattr(CompiledLayers, "forward", fail)
    runner = runner_of("llama")
    assert (runner.backend, runner.decoder) == ("numba", "fused")
    assert runner.step_refusal == "self-test failed: MemoryError: no room"
    assert runner.execute([Chunk([5], 0, [0], True)]).isfinite().all()
    runner.close()


@needs_amx
def test_the_demo_models_steps_are_compiled() -> None:
    loaded = demo_loaded()
    runner = ModelRunner.build(loaded, CacheConfig(memory="16MiB"))
    assert runner.decoder == "compiled"
    runner.close()


@needs_amx
def test_steps_go_layer_by_layer_where_threads_do_not_run_at_the_same_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With more shares than threads one thread would wait for another that never comes."""
    runner = runner_of("llama", kv_format="int8")
    step = [Chunk(random_ids(9), 0, [5], True), Chunk(random_ids(33, 1), 0, [3, 1, 2], True)]
    want = runner.execute(step)
    assert runner._fused is not None
    few = runner._fused._few
    assert few is not None
    monkeypatch.setattr("prefixkv.kernels.numba_layer.use_threads", lambda: use_threads() + 1)
    former, few._room = few._room, few._new_room(64)
    assert torch.equal(runner.execute(step), want)
    few._room, room = former, few._room
    assert torch.equal(runner.execute(step), want)
    assert few._misses == 0, "a process that was paused once is slow for good"
    few._room = room
    for _ in range(MOST_MISSES + 1):
        assert torch.equal(runner.execute(step), want)
    assert few._misses == MOST_MISSES
    assert caplog.text.count("layer by layer") == 1
