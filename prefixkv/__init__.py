"""KV-cache reuse for chat, in process.

The path of one request:

    Engine.chat(messages, principal, tools, slots)
      chat.Segmenter.segment      messages -> Prompt: token ids + segments (kind, span, scope)
      cache.KVCacheManager.match  longest reusable prefix inside the principal's scopes, token-exact
      scheduler.schedule          who runs in this step: prefill chunks and decodes under separate budgets
      model.ModelRunner.execute   one packed forward: write K/V to the pool, then attend in place
      sampler, detokenizer        tokens -> text deltas, stop strings
      cache.KVCacheManager.commit full blocks and segment tails become reusable under their scope

Names below are imported when they are first used: ``import prefixkv`` alone does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from prefixkv import errors
from prefixkv.collector import paused_collector

if TYPE_CHECKING:
    from prefixkv.chat.explain import CacheReport, MissReason, SegmentReport
    from prefixkv.config import CacheConfig, EngineConfig, SamplingParams, SchedulerConfig
    from prefixkv.engine.aio import AsyncEngine
    from prefixkv.engine.engine import Engine
    from prefixkv.engine.request import ChatRequest
    from prefixkv.engine.result import ChatResult, Choice, Delta, Publication, PurgeReceipt, Timings, Usage
    from prefixkv.measure.metrics import EngineStats, TenantStats
    from prefixkv.policy import PolicySet, SlotPolicy, TenantPolicy, TTLPolicy
    from prefixkv.scope import Principal, ScopeLevel

__version__ = "0.1.0"

__all__ = [
    "AsyncEngine",
    "CacheConfig",
    "CacheReport",
    "ChatRequest",
    "ChatResult",
    "Choice",
    "Delta",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "MissReason",
    "PolicySet",
    "Principal",
    "Publication",
    "PurgeReceipt",
    "SamplingParams",
    "SchedulerConfig",
    "ScopeLevel",
    "SegmentReport",
    "SlotPolicy",
    "TTLPolicy",
    "TenantPolicy",
    "TenantStats",
    "Timings",
    "Usage",
    "errors",
]

if not TYPE_CHECKING:  # a type checker that saw __getattr__ would take every misspelt name for one of ours
    _HOMES = (
        ("chat.explain", "CacheReport MissReason SegmentReport"),
        ("config", "CacheConfig EngineConfig SamplingParams SchedulerConfig"),
        ("engine.aio", "AsyncEngine"),
        ("engine.engine", "Engine"),
        ("engine.request", "ChatRequest"),
        ("engine.result", "ChatResult Choice Delta Publication PurgeReceipt Timings Usage"),
        ("measure.metrics", "EngineStats TenantStats"),
        ("policy", "PolicySet SlotPolicy TTLPolicy TenantPolicy"),
        ("scope", "Principal ScopeLevel"),
    )

    def __getattr__(name: str) -> object:
        for module, names in _HOMES:
            if name in names.split():
                with paused_collector():
                    value = getattr(import_module(f"prefixkv.{module}"), name)
                globals()[name] = value  # found at once from now on
                return value
        raise AttributeError(f"module 'prefixkv' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
