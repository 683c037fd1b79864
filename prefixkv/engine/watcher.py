"""Follows a policy file: whenever it changes, an engine reloads it."""

from __future__ import annotations

import hashlib
import logging
import math
import os
import threading
import weakref
from collections.abc import Callable
from os import PathLike
from pathlib import Path

from prefixkv.errors import ConfigError, EngineClosed, PolicyError
from prefixkv.policy import PolicySet
from prefixkv.policy.file import read_file

__all__ = ["OnError", "PolicyWatcher"]

logger = logging.getLogger("prefixkv")

OnError = Callable[[PolicyError], object] | None

_MAX_INTERVAL_S = 3600.0
_LOOKS_BEFORE_ABSENT = 3


class PolicyWatcher:
    """Reads a policy file again and again, and reloads it when it holds something new.

    It looks at the content, so a rename, a link that is moved or a write within one tick of the clock is seen, and
    touching the file is not. New content counts once two looks in a row have found it: a file that is being written
    may be valid and half empty. What is broken changes nothing and is told once. The thread knows the watcher only
    weakly, so an engine that is dropped ends it.

    Args:
        path: The file; it may be absent for a moment.
        reload: Takes the new policies; what it raises is told like a broken file.
        interval_s: Seconds between two looks.
        on_error: Called with what is wrong, on the watcher's thread; errors go to the logger ``prefixkv`` as well.

    Raises:
        ConfigError: If the interval or ``on_error`` will not do.
        PolicyError: If the file is broken now; the policies stay as they are.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        reload: Callable[[PolicySet], None],
        interval_s: float = 1.0,
        on_error: OnError = None,
    ) -> None:
        if isinstance(interval_s, bool) or not isinstance(interval_s, int | float) or not _is_interval(interval_s):
            raise ConfigError(f"interval_s={interval_s!r}: must be seconds above 0, {_MAX_INTERVAL_S:.0f} at most")
        if on_error is not None and not callable(on_error):
            raise ConfigError(f"on_error={type(on_error).__name__}: must be a function that takes the error, or None")
        if not isinstance(path, str | PathLike):
            raise PolicyError(f"policies: expected the path of a file, got {type(path).__name__}")
        self.path = Path(path)
        self.error: PolicyError | None = None
        """What is wrong with the file as it stands; None if its policies are in force."""
        self._reload = reload
        self._on_error = on_error
        self._absent_looks = 0
        content = read_file(self.path)
        self._settled = self._seen = _digest(content)
        self._policies = PolicySet.from_content(self.path, content)
        self._apply(self._policies)
        self._stop = threading.Event()
        self._process = os.getpid()
        self._thread = threading.Thread(
            target=_watch, args=(weakref.ref(self), self._stop, interval_s), name="prefixkv-policies", daemon=True
        )
        weakref.finalize(self, self._stop.set).atexit = False

    def start(self, former: PolicyWatcher | None = None) -> PolicyWatcher:
        """Begin to watch instead of another watcher; returns itself."""
        if former is not None:
            former.close()
            self._apply(self._policies)  # the former one may have reloaded its file meanwhile
        self._thread.start()
        return self

    def close(self) -> None:
        """End watching: nothing is reloaded and nobody is called any more. Idempotent."""
        if os.getpid() != self._process:
            return  # the thread, and maybe whoever holds the lock, stayed in the parent
        self._stop.set()
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join()

    def look(self) -> bool:
        """Look at the file once and reload it if it has settled on something new; returns whether to go on."""
        try:
            content = read_file(self.path)
        except PolicyError as error:
            self._absent_looks += 1
            if self._absent_looks == _LOOKS_BEFORE_ABSENT:
                self._settled = self._seen = b""  # it is read again even if it comes back as it was
                self._tell(error)
            return True
        self._absent_looks = 0
        seen, self._seen = self._seen, _digest(content)
        if self._seen == self._settled or self._seen != seen:
            return True
        self._settled = self._seen
        try:
            self._policies = PolicySet.from_content(self.path, content)
            self._apply(self._policies)
        except PolicyError as error:
            self._tell(error)
        except EngineClosed:
            return False
        else:
            self.error = None
            logger.info("%s: policies reloaded", self.path)
        return True

    def _apply(self, policies: PolicySet) -> None:
        try:
            self._reload(policies)
        except PolicyError as error:
            # An engine that finds that they do not fit its pool knows of no file.
            raise PolicyError("\n".join(f"{self.path}: {line}" for line in str(error).splitlines())) from None

    def _tell(self, error: PolicyError) -> None:
        self.error = error
        logger.error("the policies stay as they are: %s", error)
        if self._on_error is not None:
            self._on_error(error)


def _is_interval(value: float) -> bool:
    return math.isfinite(value) and 0 < value <= _MAX_INTERVAL_S


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content).digest()


def _watch(watcher: weakref.ref[PolicyWatcher], stop: threading.Event, interval_s: float) -> None:
    while not stop.wait(interval_s):
        current = watcher()
        if current is None:
            return
        try:
            if not current.look():
                return
        except Exception:  # on_error is not ours; a watcher that died of it would leave old policies in force for ever
            logger.exception("%s: watching goes on", current.path)
        del current
