"""The collector is paused while much is made that lasts, and is then as it was."""

import gc
from collections.abc import Iterator

import pytest

from prefixkv.collector import paused_collector


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.enable()
    yield
    (gc.enable if was_on else gc.disable)()


def test_it_is_off_inside_and_on_again_behind_an_error() -> None:
    with pytest.raises(KeyError), paused_collector():
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()


def test_whoever_has_turned_it_off_keeps_it_off() -> None:
    gc.disable()
    with paused_collector(), paused_collector():
        pass
    assert not gc.isenabled()
