"""Recorded traffic: JSON lines in, requests out, in the order in which they are replayed."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

from prefixkv.chat.messages import check_messages, check_tools
from prefixkv.errors import ConfigError, InvalidRequest
from prefixkv.scope import Principal

__all__ = ["TraceRequest", "count_lone", "expand", "interleave", "parse_line", "read_trace"]

_DEFAULT_TENANT = "default"


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request as it was sent.

    Attributes:
        where: File and line, for messages to the user.
        principal: Who asked.
        messages: The turns up to the reply that was asked for.
        tools: Schemas of its tools, or None.
        slots: Values of its slots, or None.
        timestamp_s: When, in seconds; None where the line does not say.
    """

    where: str
    principal: Principal
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    slots: Mapping[str, str] | None = None
    timestamp_s: float | None = None


def read_trace(path: Path, *, conversations: bool = False) -> list[TraceRequest]:
    """Return the requests of a file: by timestamp where all have one, else in the order of the file.

    A line is a JSON object with ``messages`` and, where there are, ``tools``, ``tenant``, ``user``, ``session``,
    ``slots`` and ``timestamp`` (a number, or ISO 8601 text); other fields are left alone. A line whose last message is
    an assistant turn is a whole conversation, see :func:`expand`; any other line is one request. Lines that name no
    tenant are the tenant ``default``; a line that names no session is a session of its own.

    Args:
        path: The file.
        conversations: Take every line for a conversation, whatever its last message is.

    Raises:
        ConfigError: If the file cannot be read or holds no request.
        InvalidRequest: ``bad_line``, or what the checks of messages and tools find, with file and line.
    """
    found: list[TraceRequest] = []
    try:
        with path.open("rb") as lines:
            for number, raw in enumerate(lines, 1):
                if raw.strip():
                    found += parse_line(raw, f"{path.name}:{number}", conversations=conversations)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from None
    if not found:
        raise ConfigError(f'{path}: holds no request; give one JSON object with "messages" per line')
    if all(request.timestamp_s is not None for request in found):
        found.sort(key=lambda request: request.timestamp_s or 0.0)  # stable: turns of one line stay in order
    return found


def parse_line(raw: bytes, where: str, *, conversations: bool = False) -> list[TraceRequest]:
    """Return the requests of one line; changes nothing.

    Args:
        raw: The line.
        where: Its file and number.
        conversations: Take it for a conversation, whatever its last message is.

    Raises:
        InvalidRequest: As :func:`read_trace`. It never quotes the line.
    """
    try:
        data = json.loads(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError):  # what json says of a mistake quotes the line
        raise InvalidRequest("bad_line", where, "is not a JSON object in UTF-8") from None
    if not isinstance(data, dict):
        raise InvalidRequest("bad_line", where, "is not a JSON object")
    if "messages" not in data:
        raise InvalidRequest("bad_line", where, 'has no "messages"')
    try:
        tenant = _identity(data, "tenant") or _DEFAULT_TENANT
        request = TraceRequest(
            where,
            Principal(tenant, _identity(data, "user"), _identity(data, "session") or where),
            check_messages(data["messages"]),
            check_tools(data.get("tools")),
            _slots(data.get("slots")),
            _timestamp_s(data.get("timestamp")),
        )
    except InvalidRequest as error:
        raise InvalidRequest(error.code, f"{where}: {error.path}", error.hint) from None
    is_conversation = conversations or request.messages[-1]["role"] == "assistant"
    return list(expand(request)) if is_conversation else [request]


def expand(conversation: TraceRequest) -> Iterator[TraceRequest]:
    """Yield the requests that a conversation was made by: one per reply, with the turns before it; changes nothing.

    Assistant turns in a row are one reply, and one without any turn before it was not asked for. What stands behind
    the last reply is a request whose reply was not recorded.
    """
    messages = conversation.messages
    roles = [message["role"] for message in messages]
    ends = [i for i in range(1, len(roles)) if roles[i] == "assistant" and roles[i - 1] != "assistant"]
    if roles[-1] != "assistant":
        ends.append(len(roles))
    for end in ends:
        yield TraceRequest(
            conversation.where,
            conversation.principal,
            messages[:end],
            conversation.tools,
            conversation.slots,
            conversation.timestamp_s,
        )


def interleave(requests: Iterable[TraceRequest], num_at_once: int) -> list[TraceRequest]:
    """Return the same requests as if so many conversations were held at the same time; changes nothing.

    A conversation is what one principal sent, in the order given. They take turns, a request each; when one is over,
    the next in line takes its place.
    """
    sessions: dict[Principal, deque[TraceRequest]] = {}
    for request in requests:
        sessions.setdefault(request.principal, deque()).append(request)
    waiting = iter(sessions.values())
    active = deque(islice(waiting, num_at_once))
    ordered: list[TraceRequest] = []
    while active:
        session = active.popleft()
        ordered.append(session.popleft())
        if session:
            active.append(session)
        else:
            active.extend(islice(waiting, 1))
    return ordered


def count_lone(requests: Iterable[TraceRequest]) -> int:
    """Return how many requests hold an earlier reply and are yet all that their principal sent; changes nothing.

    Many of them mean that sessions were left out, or that lines are whole conversations.
    """
    by_principal: dict[Principal, list[TraceRequest]] = {}
    for request in requests:
        by_principal.setdefault(request.principal, []).append(request)
    alone = [sent[0] for sent in by_principal.values() if len(sent) == 1]
    return sum(any(message["role"] == "assistant" for message in request.messages) for request in alone)


def _identity(data: Mapping[str, Any], name: str) -> str | None:
    value = data.get(name)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if value is None or isinstance(value, str):
        return value
    raise InvalidRequest("bad_line", name, "must be text or a whole number")


def _slots(value: object) -> dict[str, str] | None:
    if value is None:
        return None
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise InvalidRequest("bad_line", "slots", "must map slot names to text")
    return value


def _timestamp_s(value: object) -> float | None:
    if value is None:
        return None
    seconds = math.nan
    if isinstance(value, str):
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            moment = None
        if moment is not None:
            # Without a zone it is as good as any, as long as all are the same.
            seconds = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    elif isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value) if abs(value) < 1e300 else math.nan
    if not math.isfinite(seconds):
        raise InvalidRequest("bad_line", "timestamp", "must be a number or a time in ISO 8601")
    return seconds
