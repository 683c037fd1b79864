"""The file that makes a quantised pool lose less on one model: better formats for some heads, offsets for keys.

``prefixkv calibrate --write`` makes it and ``CacheConfig.calibration`` names it. JSON, read strictly: it decides what
every later token sees.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from os import PathLike
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from prefixkv.cache.spec import KV_LAYOUTS, KVCacheSpec, RaisedHead
from prefixkv.errors import ConfigError

__all__ = ["PoolCalibration", "rounded_offsets"]

_VERSION = "prefixkv-calibration v1"
_MOST_BYTES = 64 * 2**20
_MOST_OFFSET = 1e4
_HINT = "make it with: prefixkv calibrate --write FILE --for FORMAT"

_Offset = Annotated[float, Field(ge=-_MOST_OFFSET, le=_MOST_OFFSET, allow_inf_nan=False)]


class _Head(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    layer: int = Field(ge=0)
    kv_head: int = Field(ge=0)
    kv_format: str


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    version: Literal["prefixkv-calibration v1"]
    fingerprint: str = Field(pattern=r"^[0-9a-f]{2,128}$")
    kv_format: str
    heads: list[_Head]
    key_offsets: list[list[list[_Offset]]] | None


@dataclass(frozen=True, slots=True)
class PoolCalibration:
    """What a pool of one format is built with for one model.

    Attributes:
        fingerprint: Of the model, tokenizer and template it was made on, in hexadecimal.
        kv_format: The pool's format.
        heads: Heads that are stored in a better one.
        key_offsets: [L][K][D] subtracted from keys before they are stored in 4 bits, or None.
    """

    fingerprint: str
    kv_format: str
    heads: tuple[RaisedHead, ...]
    key_offsets: tuple[tuple[tuple[float, ...], ...], ...] | None

    @classmethod
    def read(cls, path: str | PathLike[str]) -> PoolCalibration:
        """Read a file; changes nothing.

        Raises:
            ConfigError: If it cannot be read, or is not such a file; with the path of the field.
        """
        name = os.fspath(path)
        try:
            with Path(name).expanduser().open("rb") as file:
                raw = file.read(_MOST_BYTES + 1)
        except (OSError, RuntimeError, ValueError) as error:  # the last two: a user or a name that cannot be
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"CacheConfig.calibration={name!r}: cannot be read ({reason}); {_HINT}") from None
        if len(raw) > _MOST_BYTES:
            raise ConfigError(f"CacheConfig.calibration={name!r}: is larger than {_MOST_BYTES} bytes; {_HINT}")
        try:
            data = _File.model_validate_json(raw)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
            raise ConfigError(
                f"CacheConfig.calibration={name!r}: {where}{': ' if where else ''}{first['msg']}; {_HINT}"
            ) from None
        offsets = data.key_offsets
        return cls(
            data.fingerprint,
            data.kv_format,
            tuple(RaisedHead(one.layer, one.kv_head, one.kv_format) for one in data.heads),
            None if offsets is None else tuple(tuple(tuple(row) for row in layer) for layer in offsets),
        )

    def to_json(self) -> str:
        """Return the text of the file, a head or a row of offsets a line."""
        heads = [{"layer": one.layer, "kv_head": one.kv_head, "kv_format": one.kv_format} for one in self.heads]
        offsets = "null"
        if self.key_offsets is not None:
            layers = [",\n   ".join(json.dumps(row) for row in layer) for layer in self.key_offsets]
            offsets = "[\n" + ",\n".join(f"  [{layer}]" for layer in layers) + "\n ]"
        fields = {
            "version": json.dumps(_VERSION),
            "fingerprint": json.dumps(self.fingerprint),
            "kv_format": json.dumps(self.kv_format),
            "heads": "[" + ",".join(f"\n  {json.dumps(head)}" for head in heads) + "\n ]",
            "key_offsets": offsets,
        }
        return "{\n" + ",\n".join(f' "{name}": {text}' for name, text in fields.items()) + "\n}\n"

    @property
    def digest(self) -> bytes:
        """Digest of everything that changes what is stored."""
        return blake2b(self.to_json().encode(), digest_size=16).digest()

    def check_made_for(self, fingerprint: str, kv_format: str) -> None:
        """Refuse to serve another model or format.

        Raises:
            ConfigError: If it was made for another one.
        """
        if self.kv_format != kv_format:
            raise ConfigError(
                f"CacheConfig.calibration: was made for kv_format={self.kv_format!r}, the pool has {kv_format!r}; "
                f"choose that format or make another file"
            )
        if self.fingerprint != fingerprint:
            raise ConfigError(
                f"CacheConfig.calibration: was made for the model {self.fingerprint[:12]}, this is {fingerprint[:12]} "
                f"(weights, dtype, tokenizer and template count); {_HINT}"
            )

    def applied(self, spec: KVCacheSpec, *, biased: bool) -> KVCacheSpec:
        """Return the spec of the pool with the raised heads in it; changes nothing.

        Args:
            spec: The pool without.
            biased: Whether the model caps its scores or has attention sinks: then softmax does see offsets.

        Raises:
            ConfigError: If heads or offsets do not fit the model or the format.
        """
        try:
            raised = replace(spec, raised=self.heads)
        except ConfigError as error:
            raise ConfigError(f"CacheConfig.calibration: {error}") from None
        if self.key_offsets is None:
            return raised
        if KV_LAYOUTS[spec.kv_format][0].bits != 4:
            raise ConfigError(
                f"CacheConfig.calibration: key_offsets: are for keys of 4 bits, not for {spec.kv_format!r}; set them "
                "to null"
            )
        if biased:
            raise ConfigError(
                "CacheConfig.calibration: key_offsets: the model caps its scores or has attention sinks, so offsets "
                "would change its replies; set them to null"
            )
        if len(self.key_offsets) != len(spec.layers):
            raise ConfigError(
                f"CacheConfig.calibration: key_offsets: {len(self.key_offsets)} layers, the model has "
                f"{len(spec.layers)}"
            )
        for i, (layer, rows) in enumerate(zip(spec.layers, self.key_offsets, strict=True)):
            if [len(row) for row in rows] != [layer.key_dim] * layer.num_kv_heads:
                raise ConfigError(
                    f"CacheConfig.calibration: key_offsets[{i}]: must be {layer.num_kv_heads} rows of "
                    f"{layer.key_dim} numbers"
                )
        return raised

    def offset_tensors(self) -> list[torch.Tensor] | None:
        """Return [K, D] float32 per layer, or None."""
        if self.key_offsets is None:
            return None
        return [torch.tensor(layer, dtype=torch.float32) for layer in self.key_offsets]


def rounded_offsets(means: Sequence[torch.Tensor]) -> tuple[tuple[tuple[float, ...], ...], ...]:
    """Return means of keys, [K, D] per layer, as they are written: with four digits. Numbers too large become 0."""
    return tuple(
        tuple(tuple(float(f"{x:.4g}") if abs(x) <= _MOST_OFFSET else 0.0 for x in row) for row in layer.tolist())
        for layer in means
    )
