"""Reads a policy file: bounded, UTF-8, no key twice, and every fault with its line."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

from prefixkv.errors import PolicyError

__all__ = ["parse_file", "read_file"]

_MAX_FILE_BYTES = 2**20
_MAX_NODES = 10**6
"""A few lines of YAML whose aliases stand for aliases stand for billions of values."""


def read_file(path: Path) -> bytes:
    """Return what a file holds, or its beginning if that is too much already.

    Raises:
        PolicyError: If it cannot be read.
    """
    try:
        with path.open("rb") as file:
            return file.read(_MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = error.strerror if isinstance(error, OSError) else None
        raise PolicyError(f"{path}: cannot be read ({reason or error})") from None


def parse_file(path: Path, content: bytes) -> Any:
    """Return the document as Python values; None if it is empty.

    Raises:
        PolicyError: If it is not well-formed; the message starts with the line where one is known.
    """
    parse = {".toml": _parse_toml, ".json": _parse_json, ".yaml": _parse_yaml, ".yml": _parse_yaml}.get(
        path.suffix.lower()
    )
    if parse is None:
        raise PolicyError("the ending must be .yaml, .yml, .toml or .json")
    if len(content) > _MAX_FILE_BYTES:
        raise PolicyError(f"is larger than {_MAX_FILE_BYTES} bytes; load more policies than that as a mapping")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PolicyError(
            f"line {_line(content, error.start)}: is no UTF-8 text (byte 0x{content[error.start]:02x})"
        ) from None
    try:
        return parse(text) if text.strip() else None
    except RecursionError:
        raise PolicyError("is nested too deeply") from None
    except PolicyError:
        raise
    except ValueError as error:  # such as a number of ten thousand digits
        raise PolicyError(str(error)) from None


def _line(text: str | bytes, place: int) -> int:
    before = text[:place]
    return 1 + (before.count("\n") if isinstance(before, str) else before.count(b"\n"))


def _parse_toml(text: str) -> Any:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = re.fullmatch(r"(.*) \(at (.*)\)", str(error), re.DOTALL)
        raise PolicyError(f"{found[2]}: {found[1]}" if found else str(error)) from None


_JSON_TOKEN = re.compile(r'("(?:[^"\\]|\\.)*")(\s*:)?|[{}]', re.DOTALL)


def _parse_json(text: str) -> Any:
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise PolicyError(f"line {error.lineno}, column {error.colno}: {error.msg}") from None
    # The reader keeps the last of two equal keys without a word and knows no lines. The text is well-formed by now.
    objects: list[set[str]] = []
    for token in _JSON_TOKEN.finditer(text):
        if token[0] == "{":
            objects.append(set())
        elif token[0] == "}":
            objects.pop()
        elif token[2] is not None:
            key = json.loads(token[1])
            if key in objects[-1]:
                raise PolicyError(f"line {_line(text, token.start())}: {_twice(key)}")
            objects[-1].add(key)
    return data


def _twice(key: object) -> str:
    return f"the key {key!r} stands here twice, and one of the two would be lost"


class _Loader(yaml.SafeLoader):
    """Reads the plain words of YAML 1.2.

    In YAML 1.1 ``no`` is False, ``010`` is 8 and ``24:00`` is 1440; a tenant called ``no`` would not be found, and a
    limit would be another one than the file seems to say.
    """

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - none of those of YAML 1.1


_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("str", "bool", "null", "int", "float", "merge", "seq", "map")}


def _construct_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    return int(node.value)


for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"null|Null|NULL|~|", ["n", "N", "~", ""]),
    ("int", r"[-+]?[0-9]+", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+", "-+.0123456789"),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", "-+."),
    ("merge", r"<<", "<"),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z"), list(_first))
_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)


def _parse_yaml(text: str) -> Any:
    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _check_node(node, {})
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
        raise PolicyError(where + ", ".join(filter(None, (error.context, error.problem)))) from None
    except KeyError:  # !!bool maybe
        raise PolicyError("a tag does not fit its value") from None
    except yaml.reader.ReaderError as error:
        raise PolicyError(f"line {_line(text, error.position)}: {error.reason}") from None
    finally:
        if loader is not None:
            loader.dispose()


def _check_node(node: yaml.Node, sizes: dict[int, int]) -> int:
    """Return how many values a node stands for, aliases resolved; refuses too many, endless ones and equal keys."""
    size = sizes.get(id(node))
    if size is not None:
        if not size:
            raise _fault("an alias stands inside what it stands for", node)
        return size
    sizes[id(node)] = 0
    if node.tag not in _TAGS:
        raise _fault(f"{node.tag!r} is no tag of a policy file", node)
    children: list[yaml.Node] = []
    if isinstance(node, yaml.SequenceNode):
        children = node.value
    elif isinstance(node, yaml.MappingNode):
        children = [part for pair in node.value for part in pair]
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    raise _fault(_twice(key.value), key)
                seen.add((key.tag, key.value))
    sizes[id(node)] = size = 1 + sum(_check_node(child, sizes) for child in children)
    if size > _MAX_NODES:
        raise _fault(f"with its aliases resolved it has over {_MAX_NODES} values", node)
    return size


def _fault(problem: str, node: yaml.Node) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
