"""Choose an attention backend and remember why the others were refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prefixkv.attention.base import AttentionBackend, AttentionSpec
from prefixkv.attention.cpu import NumbaBackend
from prefixkv.attention.torch_ref import TorchBackend
from prefixkv.errors import UnsupportedModel
from prefixkv.kernels.readiness import prepare

__all__ = ["BackendChoice", "prepare_backends", "select_backend"]


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """The backend that will run, and the reason of each better one that will not.

    Attributes:
        backend: The first that can run the model.
        refusals: Name of a refused backend to its reason, in order of preference.
    """

    backend: AttentionBackend
    refusals: dict[str, str]


def prepare_backends(device_type: str) -> None:
    """Let what has to be compiled on this machine be loaded, or begin to compile it in the background."""
    if device_type == "cpu":
        prepare()


def select_backend(spec: AttentionSpec, candidates: Sequence[AttentionBackend] | None = None) -> BackendChoice:
    """Return the first backend that supports the model; changes nothing.

    Args:
        spec: What the model asks for.
        candidates: Backends, best first; None takes all that are known.

    Raises:
        UnsupportedModel: If none can run it; the reason lists every refusal.
    """
    refusals: dict[str, str] = {}
    for backend in (NumbaBackend(), TorchBackend()) if candidates is None else candidates:
        reason = backend.supports(spec)
        if reason is None:
            return BackendChoice(backend, refusals)
        refusals[backend.name] = reason
    listed = "; ".join(f"{name}: {reason}" for name, reason in refusals.items()) or "there are none"
    raise UnsupportedModel(f"no attention backend can run this model ({listed})")
