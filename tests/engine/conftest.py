"""Engines over tiny random models, and the rule that every one of them ends clean."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from prefixkv import CacheConfig, Engine, EngineConfig, SchedulerConfig, errors
from tests.support import byte_tokenizer, tiny_model

MakeEngine = Callable[..., Engine]


@pytest.fixture(params=["numba", "torch"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Run with the compiled kernels, and as on a machine without numba."""
    if request.param == "numba":
        pytest.importorskip("numba", reason="the extra `cpu` is not installed")
    else:
        monkeypatch.setattr("prefixkv.kv.views.find_spec", lambda name: None)
    yield request.param


@pytest.fixture
def make_engine() -> Iterator[MakeEngine]:
    """Make engines that are checked and closed when the test ends; by default what they store is exact."""
    engines: list[Engine] = []

    def make(
        arch: str = "llama",
        *,
        model: Any = None,
        blocks: int | None = None,
        block_size: int = 16,
        memory: int | str = "32MiB",
        kv_format: str = "model",
        policies: Any = None,
        clock: Callable[[], float] = time.monotonic,
        **config: Any,
    ) -> Engine:
        scheduler = config.pop("scheduler", SchedulerConfig())
        model = model if model is not None else tiny_model(arch)
        tokenizer = byte_tokenizer()
        if blocks is not None:
            probe = Engine(
                model,
                tokenizer,
                config=EngineConfig(cache=CacheConfig(kv_format=kv_format, block_size=block_size, memory="1MiB")),
            )
            memory = blocks * int(probe.stats().block_bytes)
            probe.close()
        cache = CacheConfig(kv_format=kv_format, block_size=block_size, memory=memory)
        engine = Engine(
            model,
            tokenizer,
            config=EngineConfig(cache=cache, scheduler=scheduler, debug=True, **config),
            policies=policies,
            clock=clock,
        )
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        try:
            engine.check()
        except errors.EngineClosed:
            continue  # the test closed it
        stats = engine.stats()
        engine.close()
        assert stats.running == stats.waiting == 0
        assert stats.blocks_free + stats.blocks_idle + stats.blocks_in_use == stats.blocks_total


@pytest.fixture
def engine(make_engine: MakeEngine) -> Engine:
    """A tiny llama with room to spare."""
    return make_engine()
