"""The fused decoder is the stock model in fewer operations, on the same weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from prefixkv.config import CacheConfig
from prefixkv.errors import UnsupportedModel
from prefixkv.model import hook
from prefixkv.model.batch import Chunk
from prefixkv.model.fused import FAMILIES
from prefixkv.model.load import wrap
from prefixkv.model.runner import ModelRunner
from tests.support import SERVED, byte_tokenizer, random_ids, stock_greedy, tiny_model

FUSED = [arch for arch, (kind, _) in SERVED.items() if kind in FAMILIES]
STEPS = [Chunk(random_ids(40), 0, [3, 1, 2], True), Chunk(random_ids(20, 1), 0, [5, 6], True)]


def make(model: Any, **cache: Any) -> ModelRunner:
    return ModelRunner.build(wrap(model, byte_tokenizer()), CacheConfig(memory="2MiB", block_size=16, **cache))


@pytest.mark.parametrize("arch", FUSED)
def test_it_gives_the_logits_of_the_stock_layers(arch: str, monkeypatch: Any) -> None:
    runner = make(tiny_model(arch))
    assert runner.decoder == "fused"
    fused = runner.execute(STEPS)
    monkeypatch.setattr(runner, "_fused", None)
    torch.testing.assert_close(fused, runner.execute(STEPS), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("arch", FUSED)
def test_it_serves_bfloat16_as_well(arch: str) -> None:
    """OLMo 2 turns its queries in float32: what comes back must be of the model's dtype."""
    runner = make(tiny_model(arch).to(torch.bfloat16))
    assert runner.decoder == "fused", runner.decoder_refusal
    assert runner.execute(STEPS).isfinite().all()


def test_every_family_it_names_is_tried() -> None:
    """SmolLM3 leaves RoPE out of some layers; it has a tiny model of its own here."""
    assert {SERVED[arch][0] for arch in FUSED} | {"smollm3"} == set(FAMILIES)


def test_layers_without_rope_stay_without(monkeypatch: Any) -> None:
    runner = make(tiny_model("llama", kind="smollm3", no_rope_layers=[1, 0], layer_types=["full_attention"] * 2))
    assert runner.decoder == "fused"
    fused = runner.execute(STEPS)
    monkeypatch.setattr(runner, "_fused", None)
    torch.testing.assert_close(fused, runner.execute(STEPS), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("arch", ["gemma2", "gpt2", "mixtral"])
def test_other_models_keep_their_own_layers_and_it_says_why(arch: str) -> None:
    runner = make(tiny_model(arch))
    assert runner.decoder == "stock"
    assert runner.decoder_refusal


def test_no_weight_lies_in_memory_twice_and_the_users_model_is_as_it_was() -> None:
    model = tiny_model("qwen2")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    want = stock_greedy(model, random_ids(30), 8)
    runner = make(model)
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[name])
    assert stock_greedy(model, random_ids(30), 8) == want
    attention = model.model.layers[0].self_attn
    shared = attention.q_proj.weight.untyped_storage().data_ptr()
    assert attention.v_proj.weight.untyped_storage().data_ptr() == shared
    again = make(model)
    assert attention.q_proj.weight.untyped_storage().data_ptr() == shared
    torch.testing.assert_close(again.execute(STEPS), runner.execute(STEPS))


def test_a_weight_changed_in_place_is_seen() -> None:
    """An adapter merged into the model by its owner must not be missed."""
    model = tiny_model("llama")
    runner = make(model)
    before = runner.execute(STEPS)
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(0.5)
    assert not torch.allclose(before, runner.execute(STEPS))


@pytest.mark.parametrize("how", ["hook", "pre-hook", "patched method", "patched class"])
def test_what_the_owner_hangs_on_the_model_is_run(how: str, monkeypatch: Any) -> None:
    model = tiny_model("llama")
    runner = make(model)
    layer, calls = model.model.layers[1].mlp, []
    if how == "hook":
        layer.register_forward_hook(lambda *args: calls.append(1))
    elif how == "pre-hook":
        layer.register_forward_pre_hook(lambda *args: calls.append(1))
    else:
        stock = type(layer).forward

        def patched(self: Any, *args: Any) -> Any:
            calls.append(1)
            return stock(self, *args)

        if how == "patched class":
            monkeypatch.setattr(type(layer), "forward", patched)
        else:
            monkeypatch.setattr(layer, "forward", patched.__get__(layer))
    runner.execute(STEPS)
    assert calls


def _turned(weight: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(-weight.detach().clone())


def _assign_data(model: Any) -> None:
    weight = model.model.layers[0].self_attn.k_proj.weight
    weight.data = -weight.data


def _assign_state(model: Any) -> None:
    state = {name: weight.clone() for name, weight in model.state_dict().items()}
    state["model.layers.1.mlp.up_proj.weight"] *= -1
    model.load_state_dict(state, assign=True)


def _new_layer(model: Any) -> None:
    model.model.layers[0] = copy.deepcopy(model.model.layers[1])
    model.model.layers[0].self_attn.layer_idx = 0


def _new_projection(model: Any) -> None:
    torch.manual_seed(1)
    model.model.layers[0].self_attn.q_proj = torch.nn.Linear(64, 64).to(model.dtype)  # with a bias


def _new_activation(model: Any) -> None:
    model.model.layers[1].mlp.act_fn = torch.nn.ReLU()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "data of a weight": _assign_data,
    "state assigned": _assign_state,
    "layer": _new_layer,
    "projection": _new_projection,
    "activation": _new_activation,
    "norm's weight": lambda model: setattr(model.model.norm, "weight", _turned(model.model.norm.weight)),
    "head's weight": lambda model: setattr(model.lm_head, "weight", _turned(model.lm_head.weight)),
    "embeddings": lambda model: model.set_input_embeddings(
        torch.nn.Embedding.from_pretrained(_turned(model.model.embed_tokens.weight))
    ),
    "list of layers": lambda model: setattr(model.model, "layers", torch.nn.ModuleList([*model.model.layers][::-1])),
    "frequencies": lambda model: model.model.rotary_emb.register_buffer("inv_freq", torch.ones(8)),
    "epsilon": lambda model: setattr(model.model.layers[0].input_layernorm, "variance_epsilon", 10.0),
    "scaling": lambda model: setattr(model.model.layers[1].self_attn, "scaling", 3.0),
    "cast to bfloat16": lambda model: model.to(torch.bfloat16),
    "cast there and back": lambda model: model.to(torch.bfloat16).to(torch.float32),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_part_that_was_replaced_is_served_as_it_is_now(change: str) -> None:
    """By the stock modules, which are the model; ours would compute with what it no longer has."""
    model = tiny_model("llama")
    runner = make(model, kv_format="model")
    before = runner.execute(STEPS)
    assert runner._fused is not None and runner._fused.is_current()
    CHANGES[change](model)
    if change == "list of layers":
        for index, layer in enumerate(model.model.layers):
            layer.self_attn.layer_idx = index
    assert (runner._fused.is_current(), runner.decoder) == (False, "stock")
    got = runner.execute(STEPS)
    with torch.inference_mode():
        want = torch.cat([model(torch.tensor([chunk.token_ids])).logits[0, -1:].float() for chunk in STEPS])
    assert (got - want).abs().mean() < (0.02 if "cast" in change else 1e-4) * want.std()
    assert "cast" in change or not torch.allclose(got, before, atol=1e-3)
    runner.close()


def test_layers_that_take_over_are_proved_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at load, where they do not run: a model that was changed may no longer agree with its pool."""
    model = tiny_model("llama")
    runner = make(model, kv_format="model")
    head = model.model.layers[0].self_attn

    def skips_the_pool(hidden_states: torch.Tensor, **options: Any) -> tuple[torch.Tensor, None]:
        if hook._ACTIVE.get() is not None:
            hidden_states = hidden_states * 1.1
        return type(head).forward(head, hidden_states, **options)  # type: ignore[no-any-return]

    monkeypatch.setattr(head, "forward", skips_the_pool)
    for _ in range(2):  # it stays refused
        with pytest.raises(UnsupportedModel, match="self-test failed"):
            runner.execute(STEPS)
    monkeypatch.undo()
    model.lm_head.weight = _turned(model.lm_head.weight)  # a change that its own layers serve
    runner.execute(STEPS)


def test_a_second_engine_on_the_model_does_not_disturb_the_first() -> None:
    """It finds the weights moved and merged, and leaves them where they are."""
    model = tiny_model("llama")
    first, second = make(model), make(model)
    for runner in (first, second):
        assert runner._fused is not None and runner._fused.is_current()


def test_an_adapter_on_a_layer_is_not_fused_away() -> None:
    """A wrapped projection has weights that merging would not see."""
    model = tiny_model("llama")

    class Adapted(torch.nn.Module):
        def __init__(self, inner: torch.nn.Linear) -> None:
            super().__init__()
            self.inner, self.extra = inner, torch.nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * self.extra

    model.model.layers[0].self_attn.q_proj = Adapted(model.model.layers[0].self_attn.q_proj)
    runner = make(model)
    assert runner.decoder == "stock"
    assert "Adapted" in (runner.decoder_refusal or "")
