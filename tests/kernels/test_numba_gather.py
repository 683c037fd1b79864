"""Rows decoded by the kernel against the codecs."""

from __future__ import annotations

import pytest
import torch

from prefixkv.cache.spec import KV_LAYOUTS
from prefixkv.kv.formats import hadamard
from tests.attention.scenes import scene

pytest.importorskip("numba", reason="the extra `cpu` is not installed")


@pytest.mark.parametrize("kv_format", sorted(KV_LAYOUTS))
@pytest.mark.parametrize(("dims", "block_size"), [((64, 64), 32), ((80, 96), 7), ((48, 40), 1), ((16, 256), 16)])
def test_decoded_rows_equal_the_codec(kv_format: str, dims: tuple[int, int], block_size: int) -> None:
    """In the order of the table; rows that are stored turned come turned."""
    from prefixkv.kernels.numba_gather import gather_rows
    from prefixkv.kv.views import layer_view

    case = scene([(75, 1)], kv_format=kv_format, dtype="bfloat16", dims=dims, block_size=block_size)
    view = layer_view(case.storage, 0)
    k, v = (torch.full((2, 70, dim), torch.nan, dtype=torch.bfloat16) for dim in dims)
    gather_rows(view, case.meta.block_table[0], k, v)
    want_k, want_v = (rows[0, :, :70] for rows in case.storage.gather(0, case.meta.block_table))
    for got, want, turned, dim in zip((k, v), (want_k, want_v), view.turned, dims, strict=True):
        if turned:
            torch.testing.assert_close(got.float() @ hadamard(dim, k.device), want.float(), atol=0.03, rtol=0.02)
        else:
            # The codec's bfloat16 was rounded after a product of two float32 numbers; ours may fuse it with the sum.
            torch.testing.assert_close(got.float(), want.float(), atol=1e-6, rtol=0.008)
