"""The parts of a decoder layer of the llama shape, on a model's own weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

__all__ = ["DecoderLayer", "Linear", "Norm", "same"]


@dataclass(frozen=True, slots=True)
class Linear:
    """A projection of [T, in] to [T, out]."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [T, out]; changes nothing."""
        return functional.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class Norm:
    """RMS norm over the last dimension."""

    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return x, normed; changes nothing."""
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


def same(x: torch.Tensor) -> torch.Tensor:
    """Return x: the norm that a family does not have."""
    return x


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One decoder layer. A norm that the family does not have is the identity.

    Attributes:
        norms: Before attention, behind attention, before the MLP, behind the MLP.
        qkv: Merged projection to [T, (H + 2K) * D].
        qk_norm: Norms of queries and keys, None if there are none.
        qk_norm_per_head: Whether they are taken per head, or over the whole row.
        out: Back from [T, H * D].
        gate_up: Merged projection to [T, 2I].
        act: Activation of the gate.
        down: Back from [T, I].
        rotates: Whether the layer has RoPE.
        scaling: Factor of the scores.
    """

    norms: tuple[Callable[[torch.Tensor], torch.Tensor], ...]
    qkv: Linear
    qk_norm: tuple[Norm, Norm] | None
    qk_norm_per_head: bool
    out: Linear
    gate_up: Linear
    act: Callable[[torch.Tensor], torch.Tensor]
    down: Linear
    rotates: bool
    scaling: float
