"""What is read from a file of requests, and in which order it is replayed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixkv.errors import ConfigError, InvalidRequest
from prefixkv.measure.trace import TraceRequest, count_lone, expand, interleave, parse_line, read_trace
from prefixkv.scope import Principal

SECRET = "hunter2"


def chat(roles: str, **fields: Any) -> dict[str, Any]:
    """A line whose messages have these roles: s(ystem), u(ser), a(ssistant)."""
    names = {"s": "system", "u": "user", "a": "assistant"}
    return {"messages": [{"role": names[r], "content": f"{r}{i}"} for i, r in enumerate(roles)], **fields}


def parsed(line: object, **options: Any) -> list[TraceRequest]:
    return parse_line(json.dumps(line).encode(), "f:1", **options)


def roles(request: TraceRequest) -> str:
    return "".join(message["role"][0] for message in request.messages)


def written(path: Path, *lines: object) -> Path:
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines), encoding="utf-8")
    return path


def test_a_line_that_waits_for_a_reply_is_one_request() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    line = chat("suau", tenant="acme", user="u", session=7, tools=tools, slots={"now": "10:00"}, timestamp=3, extra=1)
    (request,) = parsed(line)
    assert roles(request) == "suau"
    assert request.principal == Principal("acme", "u", "7")
    assert (request.tools, request.slots, request.timestamp_s) == (tools, {"now": "10:00"}, 3.0)


def test_a_line_that_ends_with_a_reply_is_a_request_per_reply() -> None:
    requests = parsed(chat("suauaua"))
    assert [roles(request) for request in requests] == ["su", "suau", "suauau"]
    assert len({request.principal for request in requests}) == 1


def test_any_line_is_a_conversation_when_asked_for() -> None:
    """Then what stands behind the last reply is a request too."""
    assert [roles(request) for request in parsed(chat("suauu"), conversations=True)] == ["su", "suauu"]


@pytest.mark.parametrize(
    ("given_roles", "asked"), [("aua", ["au"]), ("uaaua", ["u", "uaau"]), ("sa", ["s"]), ("a", [])]
)
def test_replies_in_a_row_are_one_and_nobody_asked_for_the_first_greeting(given_roles: str, asked: list[str]) -> None:
    assert [roles(request) for request in parsed(chat(given_roles))] == asked


@given(st.text("sua", min_size=1, max_size=12))
def test_every_expanded_request_is_a_prefix_that_a_reply_follows(letters: str) -> None:
    whole = TraceRequest("f:1", Principal("t"), chat(letters)["messages"])
    requests = list(expand(whole))
    lengths = [len(request.messages) for request in requests]
    assert lengths == sorted(set(lengths))
    for request in requests:
        length = len(request.messages)
        assert request.messages == whole.messages[:length]
        assert length == len(letters) or letters[length] == "a"
        assert letters[length - 1] != "a"


def test_lines_without_a_session_are_sessions_of_their_own(tmp_path: Path) -> None:
    requests = read_trace(written(tmp_path / "f.jsonl", chat("u"), "", chat("u"), chat("u", session="s")))
    assert [request.principal for request in requests] == [
        Principal("default", session="f.jsonl:1"),
        Principal("default", session="f.jsonl:3"),
        Principal("default", session="s"),
    ]


def test_requests_come_in_order_of_time_where_all_have_one(tmp_path: Path) -> None:
    lines = [
        chat("u", session="c", timestamp="2024-05-01T10:00:02+00:00"),
        chat("uaua", session="a", timestamp="2024-05-01T10:00:00"),
        chat("u", session="b", timestamp=1714557601),
    ]
    path = written(tmp_path / "f.jsonl", *lines)
    assert [(r.principal.session, roles(r)) for r in read_trace(path)] == [
        ("a", "u"),
        ("a", "uau"),
        ("b", "u"),
        ("c", "u"),
    ]
    written(path, *lines, chat("u", session="d"))
    assert [r.principal.session for r in read_trace(path)] == ["c", "a", "a", "b", "d"]


@pytest.mark.parametrize(
    ("line", "code", "place"),
    [
        (SECRET, "bad_line", "f.jsonl:2"),
        (f'{{"messages": "{SECRET}', "bad_line", "f.jsonl:2"),
        ("[" * 100_000, "bad_line", "f.jsonl:2"),
        ([SECRET], "bad_line", "f.jsonl:2"),
        ({"prompt": SECRET}, "bad_line", "f.jsonl:2"),
        ({"messages": SECRET}, "bad_messages", "messages"),
        ({"messages": []}, "no_messages", "messages"),
        ({"messages": [{"role": SECRET, "content": ""}]}, "unknown_role", "messages[0].role"),
        (chat("u", tools={SECRET: 1}), "bad_tools", "tools"),
        (chat("u", tenant=[SECRET]), "bad_line", "tenant"),
        (chat("u", tenant=SECRET * 99), "bad_principal", "principal.tenant"),
        (chat("u", user=""), "bad_principal", "principal.user"),
        (chat("u", session=True), "bad_line", "session"),
        (chat("u", slots={"now": [SECRET]}), "bad_line", "slots"),
        (chat("u", timestamp=SECRET), "bad_line", "timestamp"),
        ('{"messages": [{"role": "user", "content": "u"}], "timestamp": NaN}', "bad_line", "timestamp"),
        (chat("u", timestamp=10**400), "bad_line", "timestamp"),
    ],
)
def test_a_bad_line_is_named_and_never_quoted(tmp_path: Path, line: object, code: str, place: str) -> None:
    path = written(tmp_path / "f.jsonl", chat("u"), line)
    with pytest.raises(InvalidRequest) as caught:
        read_trace(path)
    assert caught.value.code == code
    assert caught.value.path.startswith("f.jsonl:2")
    assert caught.value.path.endswith(place)
    assert SECRET not in str(caught.value)


def test_bytes_that_are_no_text_are_a_bad_line(tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    path.write_bytes(b'{"messages": [{"role": "user", "content": "\xff"}]}')
    with pytest.raises(InvalidRequest, match=r"f\.jsonl:1: is not a JSON object in UTF-8"):
        read_trace(path)


@pytest.mark.parametrize("lines", [[], [chat("a")]])
def test_a_file_without_requests_says_what_it_should_hold(tmp_path: Path, lines: list[Any]) -> None:
    with pytest.raises(ConfigError, match="holds no request"):
        read_trace(written(tmp_path / "f.jsonl", *lines))


def test_a_file_that_is_absent_is_a_mistake_with_a_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.jsonl: cannot be read"):
        read_trace(tmp_path / "none.jsonl")


def test_interleaved_conversations_take_turns_and_the_next_one_fills_a_gap() -> None:
    requests = [TraceRequest(f"{name}{i}", Principal("t", session=name), []) for name in "abc" for i in range(2)]
    assert [one.where for one in interleave(requests, 2)] == ["a0", "b0", "a1", "b1", "c0", "c1"]
    assert [one.where for one in interleave(requests, 1)] == [one.where for one in requests]
    assert [one.where for one in interleave(requests, 9)] == ["a0", "b0", "c0", "a1", "b1", "c1"]


@given(st.lists(st.integers(0, 4), max_size=30), st.integers(1, 6))
def test_interleaving_keeps_all_requests_and_the_order_within_a_session(sessions: list[int], at_once: int) -> None:
    requests = [TraceRequest(str(i), Principal("t", session=f"s{s}"), []) for i, s in enumerate(sessions)]
    mixed = interleave(requests, at_once)
    for session in set(sessions):
        mine = [one for one in requests if one.principal.session == f"s{session}"]
        assert [one for one in mixed if one.principal.session == f"s{session}"] == mine
    assert len(mixed) == len(requests)


def test_only_requests_that_stand_alone_with_earlier_replies_are_counted() -> None:
    whole = parsed(chat("uaua", session="whole"))  # its second request has a reply, but is not alone
    assert count_lone(whole) == 0
    assert count_lone([*whole, *parsed(chat("u")), *parsed(chat("uau", session="x"))]) == 1
