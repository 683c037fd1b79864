"""What positions turn queries and keys by."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["Rope", "Turn"]

Turn = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""cos and sin [P, R/2] of some positions, and [T] int64 which row of them each token has."""

_FIRST_POSITIONS = 4096
"""Positions that the table begins with; it doubles."""


class Rope:
    """The model's cos and sin, from a table where they depend on the position alone."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._is_fixed = getattr(module, "rope_type", None) in ("default", "linear", "llama3", "yarn")
        self._table: tuple[torch.Tensor, torch.Tensor] | None = None

    def __call__(self, like: torch.Tensor, positions: torch.Tensor, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin [T, R/2], what RoPE turns R numbers of a head by.

        Args:
            like: Any tensor of the model's dtype and device.
            positions: [1, T].
            last: The largest of them.
        """
        cos, sin, rows = self.rows(like, positions, last)
        return cos[rows], sin[rows]

    def rows(self, like: torch.Tensor, positions: torch.Tensor, last: int) -> Turn:
        """Return the same as rows of a table, which are not copied."""
        if not self._is_fixed:
            return *self._compute(like, positions), torch.arange(positions.shape[1], device=like.device)
        if self._table is None or len(self._table[0]) <= last:
            every = torch.arange(max(_FIRST_POSITIONS, 2 * last), device=like.device)[None]
            self._table = self._compute(like, every)
        return *self._table, positions[0]

    def _compute(self, like: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self._module(like[None], positions)
        half = cos.shape[-1] // 2
        return cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()
