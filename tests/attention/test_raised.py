"""Attention over a pool that is calibrated: raised heads are read where they are stored better, offsets do no harm."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixkv.attention.base import AttentionBackend
from prefixkv.attention.cpu import NumbaBackend
from prefixkv.attention.torch_ref import TorchBackend
from prefixkv.cache.spec import RaisedHead
from tests.attention.scenes import scene

SPANS = [(0, 60), (33, 1), (200, 7), (90, 1), (0, 1)]
SOME = (RaisedHead(0, 2, "int8"), RaisedHead(0, 0, "model"))


@pytest.fixture(params=[NumbaBackend, TorchBackend])
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    if request.param is NumbaBackend:
        pytest.importorskip("numba", reason="the extra `cpu` is not installed")
    return request.param()  # type: ignore[no-any-return]


@settings(max_examples=25)
@given(
    spans=st.lists(st.tuples(st.integers(0, 90), st.sampled_from([1, 1, 3, 20])), min_size=1, max_size=4),
    heads=st.dictionaries(st.integers(0, 2), st.sampled_from(["int8", "model"])),
    group=st.integers(1, 4),
    window=st.one_of(st.none(), st.integers(1, 100)),
    softcap=st.sampled_from([None, 2.0]),
    sinks=st.booleans(),
)
@pytest.mark.parametrize("name", ["numba", "torch"])
def test_any_step_equals_the_oracle(
    name: str,
    spans: list[tuple[int, int]],
    heads: dict[int, str],
    group: int,
    window: int | None,
    softcap: float | None,
    sinks: bool,
) -> None:
    """Prefill and decode, any heads raised, none and all of them included."""
    if name == "numba":
        pytest.importorskip("numba", reason="the extra `cpu` is not installed")
    raised = tuple(RaisedHead(0, head, kv_format) for head, kv_format in heads.items())
    case = scene(spans, kv_format="int4", kv_heads=3, group=group, raised=raised)
    got = case.attend(
        NumbaBackend() if name == "numba" else TorchBackend(), window=window, softcap=softcap, sinks=sinks
    )
    want = case.oracle(window=window, softcap=softcap, sinks=sinks)
    torch.testing.assert_close(got, want, atol=3e-4, rtol=1e-3)


def test_long_chunks_of_sixteen_bit_models_are_read_there_too(backend: AttentionBackend) -> None:
    """They go another way through the backend; the tolerance is bfloat16's."""
    case = scene(SPANS, kv_format="int4", dtype="bfloat16", kv_heads=3, raised=SOME)
    torch.testing.assert_close(case.attend(backend).float(), case.oracle(), atol=0.03, rtol=0.03)


def test_raised_heads_come_closer_to_exact_rows_and_others_stay(backend: AttentionBackend) -> None:
    """Another oracle: the same rows unquantised. A backend that read the pool's rows for all heads would fail."""
    plain, raised, exact = (
        scene(SPANS, kv_format=name, kv_heads=3, raised=some)
        for name, some in (("int4", ()), ("int4", SOME), ("model", ()))
    )
    want = exact.oracle()
    errors = [
        (case.attend(backend) - want).square().mean((0, 2)).sqrt().view(3, -1).mean(1) for case in (plain, raised)
    ]
    assert errors[1][0] < 1e-3 < 0.01 < errors[0][0]
    assert errors[1][2] < errors[0][2] / 4
    assert errors[1][1] == errors[0][1]


def test_offsets_change_no_reply_and_save_bits(backend: AttentionBackend) -> None:
    """Softmax does not see what is subtracted from all keys of a head, and codes no longer spend their range on it."""
    around = torch.randn(3, 32, generator=torch.Generator().manual_seed(5)) * 4
    exact, bare, centred = (
        scene(SPANS, kv_format=name, kv_heads=3, key_offsets=around, subtracts=subtracts)
        for name, subtracts in (("model", False), ("int4", False), ("int4", True))
    )
    want = exact.oracle()
    errors = [(case.attend(backend) - want).square().mean().sqrt() for case in (bare, centred)]
    assert errors[1] < errors[0] / 2
    assert errors[1] < 0.2 * want.square().mean().sqrt()
    torch.testing.assert_close(centred.attend(backend), centred.oracle(), atol=3e-4, rtol=1e-3)
    table = torch.tensor([[0]])
    assert centred.storage.gather(0, table)[0].abs().mean() < 1.5 < bare.storage.gather(0, table)[0].abs().mean()
