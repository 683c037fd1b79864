"""The compiled kernels against the token-by-token oracle, and what must not depend on who else is in the batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixkv.attention.base import AttentionSpec
from prefixkv.attention.cpu import NumbaBackend
from prefixkv.cache.spec import KV_LAYOUTS, KVCacheSpec, LayerSpec
from prefixkv.errors import IntegrityError
from prefixkv.kv.formats import TORCH_DTYPES
from tests.attention.scenes import Scene, scene

numba = pytest.importorskip("numba", reason="the extra `cpu` is not installed")

FORMATS = sorted(KV_LAYOUTS)
EXACT = {"atol": 3e-4, "rtol": 1e-3}
"""Queries and weights have 16 bits where rows are quantised; measured: 1.3e-4."""

SPANS = st.lists(
    st.tuples(st.one_of(st.integers(0, 80), st.sampled_from([255, 256, 257, 600])), st.sampled_from([1, 1, 1, 2, 7])),
    min_size=1,
    max_size=4,
)


def attend(case: Scene, **options: Any) -> torch.Tensor:
    return case.attend(NumbaBackend(), **options)


def alone(case: Scene, seq: int) -> Scene:
    """The same sequence over the same pool, with nobody beside it."""
    meta = case.meta
    start = sum(meta.query_lens[:seq])
    end = start + meta.query_lens[seq]
    blocks = meta.block_tables_host[seq]
    single = replace(
        meta,
        query_lens=(meta.query_lens[seq],),
        kv_lens=(meta.kv_lens[seq],),
        positions_host=meta.positions_host[start:end],
        visible_host=meta.visible_host[start:end],
        block_tables_host=(blocks,),
        block_table=torch.tensor([blocks], dtype=torch.int32),
        scratch={},
    )
    return Scene(case.storage, single, case.q[start:end])


@settings(max_examples=60)
@given(
    spans=SPANS,
    kv_format=st.sampled_from(FORMATS),
    block_size=st.sampled_from([1, 3, 16, 32, 256]),
    group=st.integers(1, 8),
    kv_heads=st.integers(1, 3),
    dims=st.sampled_from([(32, 32), (64, 64), (80, 96), (96, 80), (128, 32), (48, 256), (16, 16)]),
    window=st.one_of(st.none(), st.integers(1, 300)),
    softcap=st.sampled_from([None, 2.0]),
    sinks=st.booleans(),
    seed=st.integers(0, 5),
)
def test_any_step_equals_the_oracle(
    spans: list[tuple[int, int]],
    kv_format: str,
    block_size: int,
    group: int,
    kv_heads: int,
    dims: tuple[int, int],
    window: int | None,
    softcap: float | None,
    sinks: bool,
    seed: int,
) -> None:
    """Decodes and chunks, every format, grouping, block size, window, softcap and sinks, over several splits."""
    case = scene(
        spans, kv_format=kv_format, block_size=block_size, group=group, kv_heads=kv_heads, dims=dims, seed=seed
    )
    options: dict[str, Any] = {"window": window, "softcap": softcap, "sinks": sinks}
    torch.testing.assert_close(attend(case, **options), case.oracle(**options), **EXACT)


@settings(max_examples=20)
@given(
    spans=st.lists(
        st.tuples(st.integers(0, 150), st.one_of(st.integers(1, 40), st.sampled_from([64, 130]))),
        min_size=1,
        max_size=3,
    ),
    kv_format=st.sampled_from(FORMATS),
    block_size=st.sampled_from([16, 32, 48, 256]),
    group=st.integers(1, 8),
    kv_heads=st.integers(1, 3),
    dims=st.sampled_from([(32, 32), (64, 64), (80, 96), (128, 32), (48, 256), (16, 24), (256, 128)]),
    window=st.one_of(st.none(), st.integers(1, 200)),
    sinks=st.booleans(),
    seed=st.integers(0, 5),
)
def test_any_chunk_of_a_bfloat16_model_equals_the_oracle(
    spans: list[tuple[int, int]],
    kv_format: str,
    block_size: int,
    group: int,
    kv_heads: int,
    dims: tuple[int, int],
    window: int | None,
    sinks: bool,
    seed: int,
) -> None:
    """By the matrix unit where there is one: tiles that are not full, blocks of any size that it can read, windows."""
    spec = KVCacheSpec((LayerSpec(kv_heads, *dims),), "bfloat16", kv_format, block_size)
    if NumbaBackend().supports(AttentionSpec(spec, (kv_heads * group,), (window,), False, False, "cpu")):
        return
    case = scene(
        spans,
        kv_format=kv_format,
        dtype="bfloat16",
        block_size=block_size,
        group=group,
        kv_heads=kv_heads,
        dims=dims,
        seed=seed,
    )
    options: dict[str, Any] = {"window": window, "sinks": sinks}
    torch.testing.assert_close(attend(case, **options).float(), case.oracle(**options), atol=0.03, rtol=0.03)


@pytest.mark.slow
@settings(max_examples=300)
@given(
    spans=SPANS,
    kv_format=st.sampled_from(FORMATS),
    dtype=st.sampled_from(sorted(TORCH_DTYPES)),
    block_size=st.integers(1, 64),
    group=st.integers(1, 8),
    kv_heads=st.integers(1, 3),
    dims=st.tuples(*[st.sampled_from([8, 16, 24, 32, 40, 64, 80, 96, 112, 128, 160, 192, 256])] * 2),
    shared=st.integers(0, 20),
    window=st.one_of(st.none(), st.integers(1, 300)),
    softcap=st.sampled_from([None, 50.0]),
    sinks=st.booleans(),
    seed=st.integers(0, 5),
)
def test_any_shape_that_is_not_refused_equals_the_oracle(
    spans: list[tuple[int, int]],
    kv_format: str,
    dtype: str,
    block_size: int,
    group: int,
    kv_heads: int,
    dims: tuple[int, int],
    shared: int,
    window: int | None,
    softcap: float | None,
    sinks: bool,
    seed: int,
) -> None:
    """The same, wider: every dtype, odd head sizes, and sequences that share blocks."""
    spec = KVCacheSpec((LayerSpec(kv_heads, *dims),), dtype, kv_format, block_size)
    if NumbaBackend().supports(AttentionSpec(spec, (kv_heads * group,), (window,), False, False, "cpu")):
        return
    shared = min(shared, *(-(-(start + length) // block_size) for start, length in spans))
    case = scene(
        spans,
        kv_format=kv_format,
        dtype=dtype,
        block_size=block_size,
        group=group,
        kv_heads=kv_heads,
        dims=dims,
        shared_blocks=shared,
        seed=seed,
    )
    options: dict[str, Any] = {"window": window, "softcap": softcap, "sinks": sinks}
    bounds = EXACT if dtype == "float32" else {"atol": 0.05, "rtol": 0.05}
    torch.testing.assert_close(attend(case, **options).float(), case.oracle(**options), **bounds)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kv_format", FORMATS)
def test_sixteen_bit_models_stay_close_to_the_oracle(kv_format: str, dtype: str) -> None:
    """The result comes in the queries' dtype and differs by its rounding."""
    case = scene([(300, 1), (9, 6), (270, 1)], kv_format=kv_format, dtype=dtype, dims=(64, 64), block_size=32)
    got = attend(case)
    assert got.dtype == TORCH_DTYPES[dtype]
    torch.testing.assert_close(got.float(), case.oracle(), atol=0.03, rtol=0.03)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_without_a_matrix_unit_long_chunks_take_torchs_products(
    kv_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Part before, own part and their merge; also where the chunk is cut, beside decodes, and at the very start."""
    from prefixkv.attention.cpu_chunk import flash_attention

    if flash_attention() is None:
        pytest.skip("this processor or this torch has no 16-bit products")
    monkeypatch.setattr("prefixkv.kernels.numba_layout.refuse_amx", lambda: "not here")
    case = scene([(0, 130), (300, 1), (70, 280)], kv_format=kv_format, dtype="bfloat16", dims=(64, 64), seed=1)
    got = attend(case)
    (step,) = (value for key, value in case.meta.scratch.items() if key[0] == "numba")
    assert [chunk[1:] for chunk in step.chunks] == [(0, 0, 130), (2, 131, 411)]
    torch.testing.assert_close(got.float(), case.oracle(), atol=0.03, rtol=0.03)


@pytest.mark.parametrize("change", [{"softcap": 5.0}, {"sinks": True}, {"window": 90}])
def test_what_the_products_do_not_know_goes_to_the_kernel(change: dict[str, Any]) -> None:
    """A window, a softcap and sinks, over chunks long enough for the other way."""
    case = scene([(70, 140), (0, 130)], dtype="bfloat16", dims=(64, 64))
    torch.testing.assert_close(attend(case, **change).float(), case.oracle(**change), atol=0.03, rtol=0.03)


def test_without_the_private_operator_the_kernel_does_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch may drop it any day."""
    monkeypatch.setattr("prefixkv.kernels.numba_layout.refuse_amx", lambda: "not here")
    monkeypatch.setattr("prefixkv.attention.cpu_chunk.flash_attention", lambda: None)
    case = scene([(70, 140)], dtype="bfloat16", dims=(64, 64))
    torch.testing.assert_close(attend(case).float(), case.oracle(), atol=0.03, rtol=0.03)


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("group", [1, 3, 5])
@pytest.mark.parametrize(("dtype", "value_dim"), [("float32", 48), ("float32", 64), ("bfloat16", 64)])
def test_the_bits_of_a_result_do_not_depend_on_the_batch(
    kv_format: str, group: int, dtype: str, value_dim: int
) -> None:
    """Neither on strangers, nor on neighbours who read the same blocks, nor on how many those are."""
    spans = [(700, 1), (560, 1), (513, 1), (999, 1), (40, 5), (600, 1), (512, 1), (90, 70)]
    case = scene(
        spans, kv_format=kv_format, dtype=dtype, group=group, block_size=32, shared_blocks=5, dims=(64, value_dim)
    )
    # Some end soon behind the shared blocks; a window makes others begin behind them.
    for window in (None, 300):
        together = attend(Scene(case.storage, replace(case.meta, scratch={}), case.q), window=window)
        start = 0
        for seq, (_, length) in enumerate(spans):
            single = attend(alone(case, seq), window=window)
            assert torch.equal(together[start : start + length], single)
            start += length


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_bits_of_a_result_do_not_depend_on_what_others_ask(kv_format: str, dtype: str) -> None:
    """Queries that are computed side by side: what the others find, and when, changes nothing of one's own."""
    case = scene([(700, 40), (300, 1), (290, 1)], kv_format=kv_format, dtype=dtype, block_size=32, dims=(64, 64))
    before = attend(case)
    for kept in (0, 17, 40):
        others = case.q * torch.linspace(3, -3, len(case.q))[:, None, None].to(case.q.dtype)
        others[kept] = case.q[kept]
        got = attend(Scene(case.storage, replace(case.meta, scratch={}), others))
        assert torch.equal(got[kept], before[kept])
        assert not torch.equal(got, before)


def test_shared_blocks_are_read_once() -> None:
    """Of four sequences over 512 common rows, the plan reads those rows once, and the rest per sequence."""
    from prefixkv.attention.cpu_plan import plan_step

    case = scene([(600 + i, 1) for i in range(4)], block_size=32, shared_blocks=16)
    plan = plan_step(case.meta, range(4), window=None, group=3, block_size=32)
    _, first, last, _, members, _ = plan.items.T
    assert sorted(zip(first.tolist(), last.tolist(), members.tolist(), strict=True)) == [
        (0, 256, 4),
        (256, 512, 4),
        (512, 601, 1),
        (512, 602, 1),
        (512, 603, 1),
        (512, 604, 1),
    ]


def test_the_visible_length_belongs_to_the_token() -> None:
    """Tokens of one chunk may see fewer rows than their position says, as behind a patched span."""
    case = scene([(10, 4), (300, 1), (280, 140)], dtype="bfloat16", dims=(64, 64))
    visible = [3, 14, 5, 9, 257, *(200 + i for i in range(140))]
    meta = replace(case.meta, visible_host=tuple(visible), visible_tokens=torch.tensor(visible))
    case = Scene(case.storage, meta, case.q)
    torch.testing.assert_close(attend(case).float(), case.oracle(), atol=0.03, rtol=0.03)


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize(
    ("dtype", "block_size", "dim"), [("float32", 8, 32), ("float32", 16, 64), ("bfloat16", 16, 32)]
)
@pytest.mark.parametrize("number", [1e4, torch.nan])
def test_rows_that_nobody_sees_do_not_count(
    kv_format: str, dtype: str, block_size: int, dim: int, number: float
) -> None:
    """Whatever numbers lie behind the end or before the window, the result is the same bit for bit."""
    case = scene(
        [(5, 1), (300, 1), (6, 3), (290, 20)], kv_format=kv_format, dtype=dtype, block_size=block_size, dims=(dim, dim)
    )
    meta, (k, v) = case.meta, torch.full((2, 1, 2, dim), number)
    before = attend(case, window=40)
    for table, length, low in zip(meta.block_tables_host, meta.kv_lens, (0, 261, 0, 251), strict=True):
        # Before a window lie own rows; some of them get a weight of 0 in products of 16 and 32 bits.
        before_it = range(low) if number == number else range(low // 32 * 32)
        for row in (*before_it, *range(length, len(table) * block_size)):
            case.storage.write(0, torch.tensor([table[row // block_size] * block_size + row % block_size]), k, v)
    after = attend(Scene(case.storage, replace(meta, scratch={}), case.q), window=40)
    assert torch.equal(before, after)


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize(
    ("dtype", "block_size", "dim"), [("float32", 4, 32), ("float32", 16, 64), ("bfloat16", 16, 32)]
)
def test_not_a_number_in_one_sequence_stays_there(kv_format: str, dtype: str, block_size: int, dim: int) -> None:
    """And is not lost on the way either: codes and maxima know no NaN."""
    spans = [(30, 20), (3, 1), (26, 1), (4, 5)] if dtype == "bfloat16" else [(30, 1), (3, 1), (26, 1), (4, 5)]
    case = scene(spans, kv_format=kv_format, dtype=dtype, block_size=block_size, dims=(dim, dim))
    clean, own = attend(case), spans[0][1]
    table = torch.tensor(case.meta.block_tables_host[0])
    slots = (table[:, None] * block_size + torch.arange(block_size)).flatten()
    fine = torch.ones(len(slots), 2, dim)
    for k, v in ((fine * torch.nan, fine), (fine, fine * torch.nan)):
        case.storage.write(0, slots, k, v)
        got = attend(Scene(case.storage, replace(case.meta, scratch={}), case.q))
        assert got[:own].isnan().all()
        assert torch.equal(got[own:], clean[own:])
    bad, last = case.q.clone(), len(case.q) - 1
    bad[last, 1, 7] = torch.nan
    got = attend(Scene(case.storage, replace(case.meta, scratch={}), bad))
    assert got[last, 1].isnan().all()
    assert torch.equal(got[own:last], clean[own:last])


def test_many_equal_heads_share_their_kv_head() -> None:
    """More queries in a group than one pass usually takes."""
    case = scene([(70, 1), (40, 3)], group=71, kv_heads=1, dims=(64, 64))
    torch.testing.assert_close(attend(case), case.oracle(), **EXACT)
    case = scene([(70, 1), (40, 3)], group=71, kv_heads=1, dims=(64, 64), dtype="bfloat16")
    torch.testing.assert_close(attend(case).float(), case.oracle(), atol=0.03, rtol=0.03)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_thread_and_two_give_the_same_bits(dtype: str) -> None:
    """Threads take items as they come; who takes which changes nothing."""
    if numba.config.NUMBA_NUM_THREADS < 2:
        pytest.skip("numba was started with one thread")
    case = scene([(700, 1), (350, 1), (20, 70)], block_size=32, dtype=dtype)
    results, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(attend(Scene(case.storage, replace(case.meta, scratch={}), case.q)))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)


def test_layers_of_one_step_may_have_different_windows() -> None:
    """Plans are remembered between layers: a full layer must not get a sliding layer's plan."""
    case = scene([(20, 1), (9, 4)], block_size=4)
    for window in (5, None, 5, 3, None):
        torch.testing.assert_close(attend(case, window=window), case.oracle(window=window), **EXACT)


def test_a_block_that_does_not_exist_is_refused() -> None:
    """The kernel reads addresses: a wrong block id would read somebody else's memory."""
    case = scene([(20, 1)])
    meta = replace(case.meta, block_tables_host=((0, case.storage.num_blocks),), scratch={})
    with pytest.raises(IntegrityError, match="block"):
        attend(Scene(case.storage, meta, case.q))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device_type": "cuda"}, "CPU only"),
        ({"cache": KVCacheSpec((LayerSpec(1, 30, 32),), "float32", "int8", 16)}, "whole units"),
        ({"cache": KVCacheSpec((LayerSpec(1, 576, 512),), "float32", "int8", 16)}, "overflow"),
        ({"cache": KVCacheSpec((LayerSpec(1, 40, 40),), "float32", "int4", 16)}, "groups of 10"),
    ],
)
def test_what_it_cannot_do_it_refuses_at_load(changes: dict[str, Any], reason: str) -> None:
    """With a reason that a user can act on."""
    spec = AttentionSpec(
        KVCacheSpec((LayerSpec(1, 32, 32),), "float32", "int8", 16), (2,), (None,), False, False, "cpu"
    )
    assert NumbaBackend().supports(spec) is None
    assert reason in str(NumbaBackend().supports(replace(spec, **changes)))
