"""What a token costs where some heads are stored better, and which heads cannot be."""

from __future__ import annotations

import pytest

from prefixkv.cache.spec import KVCacheSpec, LayerSpec, RaisedHead
from prefixkv.errors import ConfigError

LAYERS = (LayerSpec(2, 64, 64), LayerSpec(3, 32, 64))


def spec(kv_format: str, *raised: RaisedHead, dtype: str = "bfloat16") -> KVCacheSpec:
    return KVCacheSpec(LAYERS, dtype, kv_format, 16, raised)


def test_a_raised_head_costs_its_rows_in_both_formats() -> None:
    """int8: a byte a number and four for the scale; as computed: two bytes a number in bfloat16."""
    plain = spec("int4").bytes_per_token
    raised = spec("int4", RaisedHead(0, 1, "int8"), RaisedHead(1, 2, "model"))
    assert raised.bytes_per_token == plain + (64 + 4) * 2 + (32 + 64) * 2
    assert raised.bytes_per_block == 16 * raised.bytes_per_token


@pytest.mark.parametrize(
    ("pool", "own"),
    [("int4", "k8v4"), ("int4", "k4v8"), ("int4", "int8"), ("k8v4", "int8"), ("k4v8", "int8"), ("int8", "model")],
)
def test_better_in_one_and_worse_in_none_is_raised(pool: str, own: str) -> None:
    assert spec(pool, RaisedHead(1, 0, own)).bytes_per_token > spec(pool).bytes_per_token
    with pytest.raises(ConfigError, match=rf"^heads\[0\]\.kv_format='{pool}': a head can only be raised"):
        spec(own, RaisedHead(1, 0, pool))


@pytest.mark.parametrize(
    ("pool", "head", "word"),
    [
        ("int4", RaisedHead(2, 0, "int8"), r"heads\[1\].layer=2: the model has layers 0 to 1"),
        ("int4", RaisedHead(-1, 0, "int8"), r"heads\[1\].layer=-1"),
        ("int4", RaisedHead(0, 2, "int8"), r"heads\[1\].kv_head=2: layer 0 has kv heads 0 to 1"),
        ("int4", RaisedHead(1, -1, "int8"), r"heads\[1\].kv_head=-1"),
        ("int4", RaisedHead(1, 1, "int3"), r"heads\[1\].kv_format='int3': available"),
        ("int4", RaisedHead(1, 1, "int4"), "only be raised"),
        ("k8v4", RaisedHead(1, 1, "k4v8"), "only be raised"),
        ("int4", RaisedHead(0, 0, "model"), "named twice"),
    ],
)
def test_what_is_no_raise_of_a_head_there_is_refused(pool: str, head: RaisedHead, word: str) -> None:
    """A file may have been edited by hand: the message says which entry, and what would be right."""
    with pytest.raises(ConfigError, match=word):
        spec(pool, RaisedHead(0, 0, "int8"), head)
