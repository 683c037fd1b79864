"""Whether a model is still as it was when its weights were read. Asked before every step, so the loops run in C."""

from __future__ import annotations

from operator import is_

import torch
from torch import nn

__all__ = ["Snapshot"]

_NUMBERS = ("variance_epsilon", "scaling")
"""Attributes that a decoder of ours has read, where a module has them."""


class Snapshot:
    """What a model consists of. Holds its modules and tensors, so that nothing new can lie where they lay."""

    def __init__(self, model: nn.Module) -> None:
        """Note what the model consists of now; changes nothing."""
        modules = list(model.modules())
        self._forwards = {kind: kind.forward for kind in {type(module) for module in modules}}
        self._hooks = [hooks for one in modules for hooks in (one._forward_hooks, one._forward_pre_hooks)]
        self._attributes = [module.__dict__ for module in modules]
        self._children = [module._modules for module in modules if module._modules]
        self._former_children = [dict(children) for children in self._children]
        held = [(owner, name) for one in modules for owner in (one._parameters, one._buffers) for name in owner]
        numbers = [(own, name) for own in self._attributes for name in _NUMBERS if name in own]
        self._owners, self._names = zip(*held, *numbers, strict=True)
        self._values = [owner[name] for owner, name in (*held, *numbers)]
        self._tensors = [value for value in self._values if isinstance(value, torch.Tensor)]
        # Where a weight lies says enough: what it is cast or moved to lies elsewhere, for the former memory is held.
        self._kept = [tensor.detach() for tensor in self._tensors]
        self._places = list(map(torch.Tensor.data_ptr, self._tensors))

    def holds(self) -> bool:
        """Return whether nothing was hung on the model, patched, replaced, cast or moved since; changes nothing.

        A weight that was changed in place is the same weight.
        """
        return (
            not any(self._hooks)
            and not any("forward" in own for own in self._attributes)
            and all(kind.forward is forward for kind, forward in self._forwards.items())
            and self._children == self._former_children
            and all(map(is_, map(dict.get, self._owners, self._names), self._values))
            and list(map(torch.Tensor.data_ptr, self._tensors)) == self._places
        )
