"""Every exception that prefixkv raises on purpose.

    PrefixKVError
    |-- ConfigError (ValueError)      a bad engine option, raised when it is built
    |-- PolicyError (ValueError)      a bad policy file or field, with its path
    |-- InvalidRequest (ValueError)   a bad request: code, path, hint
    |-- ContextOverflow (ValueError)  the prompt does not fit the context or the pool: limit, got
    |-- UnknownTenant                 the policies name no such tenant and have no default
    |-- QueueFull                     too many requests wait already
    |-- QuotaExceeded                 a tenant's (or the pool's) room, or a tenant's rate, is too small: retry_after_s
    |-- EngineClosed                  the engine was closed
    |-- ExecutionError                the forward or sampling of this request failed; ``__cause__`` says why
    |-- UnsupportedModel              the model cannot be served exactly: reason
    |-- IntegrityError                an invariant is broken; a bug, never a user's mistake
    `-- SnapshotError                 a stored snapshot is unreadable or not ours

Errors that answer a request are raised before anything is allocated, and none ever quotes message content.
"""

from __future__ import annotations

__all__ = [
    "ConfigError",
    "ContextOverflow",
    "EngineClosed",
    "ExecutionError",
    "IntegrityError",
    "InvalidRequest",
    "PolicyError",
    "PrefixKVError",
    "QueueFull",
    "QuotaExceeded",
    "SnapshotError",
    "UnknownTenant",
    "UnsupportedModel",
]


class PrefixKVError(Exception):
    """Base of every error below."""


class ConfigError(PrefixKVError, ValueError):
    """An engine option is out of range; the message names the field, the value and what is accepted."""


class PolicyError(PrefixKVError, ValueError):
    """A policy is malformed; the message starts with the path of the field."""


class InvalidRequest(PrefixKVError, ValueError):
    """A request cannot be served as written.

    Attributes:
        code: Stable machine-readable word, such as ``"unknown_role"``.
        path: Where in the request, such as ``"messages[2].content"``.
        hint: What to do about it. Never quotes content.
    """

    def __init__(self, code: str, path: str, hint: str) -> None:
        super().__init__(f"{path}: {hint} [{code}]")
        self.code = code
        self.path = path
        self.hint = hint

    def __reduce__(self) -> tuple[type[InvalidRequest], tuple[str, str, str]]:
        return type(self), (self.code, self.path, self.hint)


class ContextOverflow(PrefixKVError, ValueError):
    """The request needs more tokens than the context, or the pool, can ever hold.

    Attributes:
        limit: Most tokens that fit.
        got: Tokens the request needs; a lower bound where the text was refused before it was tokenised.
    """

    def __init__(self, limit: int, got: int, what: str = "the model's context") -> None:
        super().__init__(f"the request needs {got} tokens and {what} holds {limit}; send less text or fewer max_tokens")
        self.limit = limit
        self.got = got
        self.what = what

    def __reduce__(self) -> tuple[type[ContextOverflow], tuple[int, int, str]]:
        return type(self), (self.limit, self.got, self.what)


class UnknownTenant(PrefixKVError):
    """The policies list no such tenant and give no default."""


class QueueFull(PrefixKVError):
    """The engine or the tenant has too many waiting requests; try again later."""


class QuotaExceeded(PrefixKVError):
    """The request needs more than its tenant, or what is not pinned of the pool, has.

    Attributes:
        retry_after_s: Seconds after which the tenant's tokens per minute allow a request again; None where waiting
            does not help, because the request alone needs too much of the pool.
    """

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[type[QuotaExceeded], tuple[str, float | None]]:
        return type(self), (str(self), self.retry_after_s)


class EngineClosed(PrefixKVError):
    """The engine was closed, or its thread died; in the second case ``__cause__`` is why."""


class ExecutionError(PrefixKVError):
    """Running this request failed inside the model or the sampler; other requests go on."""


class UnsupportedModel(PrefixKVError):
    """The model cannot be served exactly.

    Attributes:
        reason: What is missing or what the load-time self-test found.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class IntegrityError(PrefixKVError):
    """An invariant of the cache does not hold."""


class SnapshotError(PrefixKVError):
    """A stored snapshot cannot be read, or was not written by this engine."""
