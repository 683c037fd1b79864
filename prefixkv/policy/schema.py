"""Describes a policy file to an editor, as a JSON schema."""

from __future__ import annotations

import inspect
import re
from typing import Any

from prefixkv.policy.base import PolicyModel
from prefixkv.policy.policies import PolicySet
from prefixkv.policy.tenant import SlotPolicy, TenantPolicy, TTLPolicy

__all__ = ["json_schema"]

_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of a policy file. It takes every valid file; amounts that must fit together it cannot see.

    The words that an editor shows beside a field are those of this package's docstrings.
    """
    schema = PolicySet.model_json_schema()
    schema["properties"]["$schema"] = {"type": "string", "description": "Where this schema is, for the editor."}
    for model in (SlotPolicy, TTLPolicy, TenantPolicy):
        _describe(schema["$defs"][model.__name__], model)
    _describe(schema, PolicySet)
    return {"$schema": _DIALECT, **schema, "title": "Policies of prefixkv"}


def _describe(schema: dict[str, Any], model: type[PolicyModel]) -> None:
    """Put what the docstring says of each field beside the field; changes ``schema``."""
    text, _, attributes = inspect.cleandoc(model.__doc__ or "").partition("\n\nAttributes:\n")
    schema["description"] = _plain(text)
    words = dict(re.findall(r"^    (\w+): ((?:.+\n?)(?:^     .+\n?)*)", attributes, re.MULTILINE))
    for name, field in schema["properties"].items():
        field.pop("title", None)
        if name in words:
            field["description"] = _plain(words[name])


def _plain(text: str) -> str:
    return " ".join(re.sub(r":\w+:`(\w+)`|``(.+?)``", r"\1\2", text).split())
