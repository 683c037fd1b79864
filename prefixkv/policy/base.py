"""The model behind every policy: frozen, no unknown fields, and faults that say where they are, one a line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ModelWrapValidatorHandler, ValidationError, model_validator

from prefixkv.errors import PolicyError

__all__ = ["PolicyModel", "shown"]

_PLAIN = {
    "model_type": "must be a mapping of fields; {} leaves all of them as they are",
    "dict_type": "must be a mapping",
}


class PolicyModel(BaseModel):
    """A value whose faults are ``PolicyError``, with one line each: the path of the field, then what is wrong."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise PolicyError(_explain(error, type(self).model_fields)) from None

    @model_validator(mode="wrap")  # the other modes see a nested model only once Python has refused such a name
    @classmethod
    def _check_names(cls, value: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        if isinstance(value, Mapping):
            for key in value:
                if not isinstance(key, str):
                    raise PolicyError(f"{key!r}: is no field; there are {', '.join(cls.model_fields)}")
        return validate(value)


def shown(name: object) -> str:
    """Return a step of a path as it is told: as it is, or quoted where it would break the line or hide an end."""
    text = str(name)
    return text if text and text.isprintable() and not any(char.isspace() for char in text) else repr(text)


def _explain(error: ValidationError, known: Iterable[str]) -> str:
    lines = []
    for item in error.errors(include_url=False, include_input=False):
        steps = list(item["loc"])
        is_key = steps[-1:] == ["[key]"]
        path = ".".join(map(shown, steps[:-1] if is_key else steps))
        cause = item.get("ctx", {}).get("error")
        if isinstance(cause, PolicyError):
            # A policy inside this one: its lines start with their own paths.
            lines += [f"{path}.{line}" if path else line for line in str(cause).splitlines()]
            continue
        message = _PLAIN.get(item["type"], item["msg"].removeprefix("Value error, "))
        if item["type"] == "extra_forbidden":
            message = _no_such_field(str(steps[-1]), list(known))
        elif is_key and item["type"] == "string_type":
            message = "a name must be text; put it in quotes"
        lines.append(f"{path}: {message}" if path else message)
    return "\n".join(lines)


def _no_such_field(name: str, known: list[str]) -> str:
    close = get_close_matches(name, known, 1)
    meant = f", did you mean {close[0]}?" if close else ";"
    return f"there is no such field{meant} there are {', '.join(known)}"
