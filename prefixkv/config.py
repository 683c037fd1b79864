"""Options of an engine and of a request: frozen values, checked when they are built."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

from prefixkv.errors import ConfigError, InvalidRequest

__all__ = ["KV_FORMATS", "CacheConfig", "EngineConfig", "SamplingParams", "SchedulerConfig", "parse_memory"]

KV_FORMATS = ("model", "int8", "k8v4", "k4v8", "int4")
"""Formats a pool can be built in: ``model`` keeps K and V as computed, the others store 8 or 4 bits a number."""

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", re.IGNORECASE | re.ASCII)


def _bad_memory(value: object) -> ConfigError:
    accepted = 'give bytes (1073741824), text ("1GiB", "25%") or a share of free memory between 0 and 1 (0.25)'
    return ConfigError(f"memory={value!r}: {accepted}")


def parse_memory(value: int | float | str) -> int | float:
    """Read an amount of memory.

    Args:
        value: Bytes (``2**30``), text (``"1GiB"``, ``"500MB"``, ``"25%"``), or a share of what is free (``0.25``).

    Returns:
        An int of bytes, or a float in (0, 1], a share.

    Raises:
        ConfigError: If it is none of these.
    """
    size: object = value
    try:
        if isinstance(value, str):
            text = value.strip()
            if text.endswith("%"):
                size = float(text[:-1]) / 100
            elif match := _SIZE.fullmatch(text):
                size = int(float(match[1]) * _UNITS[(match[2] or "").lower()])
    except (ValueError, OverflowError):
        raise _bad_memory(value) from None
    if isinstance(size, bool) or not isinstance(size, int | float):
        raise _bad_memory(value)
    if size <= 0 or (isinstance(size, float) and not size <= 1):  # NaN is neither above nor below
        raise _bad_memory(value)
    return size


def _check_int(owner: str, name: str, value: object, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        top = f" to {high}" if high is not None else " or more"
        raise ConfigError(f"{owner}.{name}={value!r}: must be a whole number, {low}{top}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The pool of KV blocks.

    Attributes:
        kv_format: How K and V are stored; one of :data:`KV_FORMATS`. ``"int8"`` takes half the memory of what a 16-bit
            model computes; ``"model"`` keeps every bit.
        memory: Size of the pool, see :func:`parse_memory`. Allocated once at load, never grown; the system
            commits it as rows are written, and the rest while the engine has nothing to do.
        block_size: Tokens per block.
        eviction: Which idle block goes first; ``"lru"``.
        calibration: File that ``prefixkv calibrate --write`` made for this model and format, or None.
    """

    kv_format: str = "int8"
    memory: int | float | str = "1GiB"
    block_size: int = 32
    eviction: str = "lru"
    calibration: str | PathLike[str] | None = None

    def __post_init__(self) -> None:
        if self.kv_format not in KV_FORMATS:
            raise ConfigError(f"CacheConfig.kv_format={self.kv_format!r}: available are {', '.join(KV_FORMATS)}")
        if self.eviction != "lru":
            raise ConfigError(f"CacheConfig.eviction={self.eviction!r}: available is lru")
        _check_int("CacheConfig", "block_size", self.block_size, 1, 4096)
        parse_memory(self.memory)
        if self.calibration is None:
            return
        if not isinstance(self.calibration, str | PathLike) or not os.fspath(self.calibration):
            raise ConfigError(f"CacheConfig.calibration={self.calibration!r}: must be the path of a file, or None")
        if self.kv_format == "model":
            raise ConfigError(
                "CacheConfig.calibration: kv_format='model' loses nothing that it could restore; choose the format "
                "that the file was made for, or leave it out"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """What one step may do. Decodes and prefill have separate budgets, so neither starves the other.

    Attributes:
        max_num_seqs: Sequences that run at the same time.
        max_prefill_tokens: Prompt tokens computed in one step, over all sequences; a longer prompt is cut in chunks.
        max_new_seqs_per_step: Sequences admitted in one step.
        max_queued_requests: Sequences that may wait; one more is refused with ``QueueFull``.
    """

    max_num_seqs: int = 64
    max_prefill_tokens: int = 512
    max_new_seqs_per_step: int = 2
    max_queued_requests: int = 4096

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_prefill_tokens", "max_new_seqs_per_step", "max_queued_requests"):
            _check_int("SchedulerConfig", name, getattr(self, name), 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All that an engine is built from besides the model and the policies.

    Attributes:
        cache: The pool.
        scheduler: The step.
        dtype: ``"auto"`` (as stored), ``"float32"``, ``"bfloat16"`` or ``"float16"``; for models loaded by name.
        device: ``"auto"`` (the GPU if torch sees one), ``"cpu"``, ``"cuda"``, ``"cuda:1"``; for models loaded by name.
        max_context: Most tokens of prompt and reply together; None takes the model's own limit.
        secret: Key of the scope keys, 16 bytes or more; None draws one at random for this engine.
        debug: Run ``check()`` whenever the engine falls idle. Slow, for tests.
    """

    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    dtype: str = "auto"
    device: str = "auto"
    max_context: int | None = None
    secret: bytes | None = field(default=None, repr=False)
    debug: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.cache, CacheConfig):
            raise ConfigError(f"EngineConfig.cache={self.cache!r}: must be a CacheConfig")
        if not isinstance(self.scheduler, SchedulerConfig):
            raise ConfigError(f"EngineConfig.scheduler={self.scheduler!r}: must be a SchedulerConfig")
        if self.dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise ConfigError(f"EngineConfig.dtype={self.dtype!r}: must be auto, float32, bfloat16 or float16")
        if not isinstance(self.device, str) or not self.device:
            raise ConfigError(
                f"EngineConfig.device={self.device!r}: must be a device's name, such as auto, cpu or cuda"
            )
        if not isinstance(self.debug, bool):
            raise ConfigError(f"EngineConfig.debug={self.debug!r}: must be True or False")
        if self.max_context is not None:
            _check_int("EngineConfig", "max_context", self.max_context, 2)
        if self.secret is not None and (not isinstance(self.secret, bytes) or len(self.secret) < 16):
            raise ConfigError("EngineConfig.secret: must be 16 bytes or more, or None")


_MAX_STOPS, _MAX_STOP_CHARS = 64, 1024
"""Every character of a reply is held against every stop string on the thread that all requests share."""

_MAX_BIAS = 1e30
"""Keeps a biased logit within float32."""


def _finite(value: Any) -> float | None:
    """Return a number as a float; None if it is none, or not finite, or too large for a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def _bad(name: str, hint: str) -> InvalidRequest:
    return InvalidRequest("bad_sampling", f"sampling.{name}", hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the reply of one request is drawn.

    Attributes:
        max_tokens: Most tokens generated, at least 1; None means until the context is full.
        temperature: 0 is greedy.
        top_k: Keep the k most likely tokens; 0 keeps all.
        top_p: Keep the smallest set of tokens with at least this probability, in (0, 1].
        min_p: Keep tokens at least this likely relative to the best one, in [0, 1].
        repetition_penalty: Above 1 makes tokens of the prompt and the reply less likely (CTRL's rule).
        presence_penalty: Subtracted once from logits of tokens already in the reply, in [-2, 2].
        frequency_penalty: Subtracted per occurrence in the reply, in [-2, 2].
        logit_bias: Token id to a number added to its logit.
        stop: Strings that end the reply; the text is cut before the first of them. At most 64 of 1,024 characters.
        stop_token_ids: Ids that end the reply, besides the model's own end tokens.
        include_stop: Keep the stop string in the text.
        ignore_eos: Go on after the model's end tokens (stop strings and ids still count).
        seed: Makes this request's draws repeatable whatever else is in the batch; None draws a seed.
        logprobs: Report the log-probability of each token and of this many best ones, 0 to 20; None reports none.
        n: Replies to draw; they share the prompt's blocks.

    Raises:
        InvalidRequest: If a value is out of range.
    """

    max_tokens: int | None = 256
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: Sequence[str] | str = ()
    stop_token_ids: Sequence[int] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    n: int = 1

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            self._check_int("max_tokens", 1)
        self._check_int("top_k", 0)
        self._check_int("n", 1, 128)
        if self.seed is not None:
            self._check_int("seed", -(2**63), 2**63 - 1)
        if self.logprobs is not None:
            self._check_int("logprobs", 0, 20)
        self._check_float("temperature", 0.0, 100.0)
        self._check_float("top_p", 0.0, 1.0)
        if self.top_p == 0:
            raise _bad("top_p", "must be above 0; use temperature=0 for greedy replies")
        self._check_float("min_p", 0.0, 1.0)
        self._check_float("repetition_penalty", 0.0, 100.0)
        if self.repetition_penalty == 0:
            raise _bad("repetition_penalty", "must be above 0; 1 means none")
        self._check_float("presence_penalty", -2.0, 2.0)
        self._check_float("frequency_penalty", -2.0, 2.0)
        self._check_bool("include_stop")
        self._check_bool("ignore_eos")
        object.__setattr__(self, "stop", self._strings())
        object.__setattr__(self, "stop_token_ids", self._ids())
        object.__setattr__(self, "logit_bias", self._bias())

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0

    def _check_int(self, name: str, low: int, high: int | None = None) -> None:
        value: Any = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
            raise _bad(name, f"must be a whole number, {low}" + (f" to {high}" if high is not None else " or more"))

    def _check_float(self, name: str, low: float, high: float) -> None:
        value = _finite(getattr(self, name))
        if value is None or not low <= value <= high:
            raise _bad(name, f"must be a finite number, {low:g} to {high:g}")

    def _check_bool(self, name: str) -> None:
        if not isinstance(getattr(self, name), bool):
            raise _bad(name, "must be True or False")

    def _strings(self) -> tuple[str, ...]:
        stop: Any = self.stop
        items = (stop,) if isinstance(stop, str) else stop
        if items is None:
            return ()
        if not isinstance(items, Sequence) or not all(isinstance(item, str) for item in items):
            raise _bad("stop", "must be a string or a list of strings")
        if len(items) > _MAX_STOPS or any(len(item) > _MAX_STOP_CHARS for item in items):
            raise _bad("stop", f"must be at most {_MAX_STOPS} strings of at most {_MAX_STOP_CHARS} characters")
        if not all(items):
            raise _bad("stop", "must not hold an empty string: it would stop every reply at once")
        return tuple(items)

    def _ids(self) -> tuple[int, ...]:
        ids: Any = self.stop_token_ids
        if ids is None:
            return ()
        if not isinstance(ids, Sequence) or not all(
            isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids
        ):
            raise _bad("stop_token_ids", "must be a list of token ids")
        return tuple(ids)

    def _bias(self) -> dict[int, float]:
        bias: Any = self.logit_bias
        if bias is None:
            return {}
        if not isinstance(bias, Mapping):
            raise _bad("logit_bias", "must map token ids to numbers")
        numbers = {}
        for key, value in bias.items():
            number = value if value == -math.inf else _finite(value)
            if isinstance(key, bool) or not isinstance(key, int) or key < 0 or number is None or number > _MAX_BIAS:
                raise _bad("logit_bias", "must map token ids to numbers (minus infinity forbids a token)")
            numbers[key] = number
        return numbers
