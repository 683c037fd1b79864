"""One chat request as a value, for batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prefixkv.config import SamplingParams
from prefixkv.scope import Principal

__all__ = ["ChatRequest"]


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """The arguments of :meth:`Engine.chat`."""

    messages: Sequence[Mapping[str, Any]]
    principal: Principal
    tools: Sequence[Mapping[str, Any]] | None = None
    slots: Mapping[str, str] | None = None
    sampling: SamplingParams | None = None
    template_kwargs: Mapping[str, Any] | None = None
    timeout_s: float | None = None
    few_shot: int | None = None
    continue_final_message: bool = False
