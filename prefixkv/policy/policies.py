"""All tenants' rules: read, checked against each other, and checked against the pool that they divide."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from prefixkv.errors import InvalidRequest, PolicyError, UnknownTenant
from prefixkv.policy.base import PolicyModel, shown
from prefixkv.policy.file import parse_file, read_file
from prefixkv.policy.tenant import TenantPolicy
from prefixkv.scope import Principal

__all__ = ["PolicySet"]

_SHOWN_FLOORS = 3


class PolicySet(PolicyModel):
    """All tenants' policies.

    Attributes:
        tenants: Tenant id to its policy.
        default: Policy of tenants not listed; None refuses them with ``UnknownTenant``. It has no floor and no
            partition: every name that somebody comes up with would have one.
    """

    tenants: dict[str, TenantPolicy] = Field(default_factory=dict)
    default: TenantPolicy | None = None

    @classmethod
    def load(cls, source: PolicySet | Mapping[str, Any] | str | PathLike[str] | None) -> PolicySet:
        """Read policies from a file (.yaml, .yml, .toml, .json), a mapping, or pass a PolicySet through.

        None gives one permissive default policy. Files are UTF-8, at most 1 MiB. YAML is read with the plain words of
        its version 1.2: ``yes``, ``1_000`` and ``10:30`` are text.

        Raises:
            PolicyError: If the file cannot be read or a field is wrong; the message starts with where.
        """
        if source is None:
            return cls(default=TenantPolicy())
        if isinstance(source, PolicySet):
            return source
        if isinstance(source, Mapping):
            return cls._from(source)
        if not isinstance(source, str | PathLike):
            raise PolicyError(f"policies: expected a path, a mapping or a PolicySet, got {type(source).__name__}")
        path = Path(source)
        return cls.from_content(path, read_file(path))

    @classmethod
    def from_content(cls, path: Path, content: bytes) -> PolicySet:
        """Read policies from what a file holds; its ending says in which language.

        Raises:
            PolicyError: As :meth:`load`; every line starts with the path.
        """
        try:
            data = parse_file(path, content)
            if not isinstance(data, Mapping):
                what = "is empty" if data is None else f"holds a {type(data).__name__}"
                raise PolicyError(f"the file {what}; it must hold a mapping with 'tenants' and 'default'")
            return cls._from({key: value for key, value in data.items() if key != "$schema"})  # editors put it there
        except PolicyError as error:
            raise PolicyError("\n".join(f"{path}: {line}" for line in str(error).splitlines())) from None

    @classmethod
    def _from(cls, data: Mapping[Any, Any]) -> PolicySet:
        for key in data:
            if not isinstance(key, str):
                raise PolicyError(f"{key!r}: expected 'tenants' or 'default'")
        return cls(**data)

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        faults = [*self._bad_ids(), *self._bad_default()]
        shares = {name: amount.share for name, amount in self._floors() if amount.share is not None}
        total = math.fsum(shares.values())
        if total > 1 + 1e-9:
            largest = sorted(shares.items(), key=lambda item: -item[1])
            told = [f"{shown(name)} {share * 100:.6g} %" for name, share in largest[:_SHOWN_FLOORS]]
            told += ["..."] * (len(largest) > _SHOWN_FLOORS)
            faults.append(
                f"tenants: the floors, min_pool, add up to {total * 100:.6g} % of the pool ({', '.join(told)}); "
                f"lower them by {(total - 1) * 100:.6g} points"
            )
        if faults:
            raise PolicyError("\n".join(faults))
        return self

    def _bad_ids(self) -> Iterator[str]:
        for name in self.tenants:
            try:
                Principal(name)
            except InvalidRequest:
                yield f"tenants.{shown(name)}: no caller can have this name; it must be text of 1 to 256 bytes"

    def _bad_default(self) -> Iterator[str]:
        if self.default is not None and self.default.isolation == "strict":
            yield "default.isolation: a partition needs a tenant's name: list the tenants that shall have one"
        elif self.default is not None and self.default.min_pool is not None:
            yield "default.min_pool: a floor needs a tenant's name: list the tenants that shall have one"

    def _floors(self) -> Iterator[tuple[str, Any]]:
        for name, policy in self.tenants.items():
            if policy.min_pool is not None:
                yield name, policy.min_pool

    def get(self, tenant: str) -> TenantPolicy:
        """Return a tenant's policy.

        Raises:
            UnknownTenant: If it is not listed and there is no default.
        """
        policy = self.tenants.get(tenant, self.default)
        if policy is None:
            raise UnknownTenant("this tenant is not in the policies, and there is no default; list it, or write one")
        return policy

    def check_fits(
        self, num_blocks: int, block_size: int, bytes_per_block: int, kv_formats: Collection[str] | None = None
    ) -> None:
        """Check the policies against the pool that they divide.

        Args:
            num_blocks: Blocks in the pool.
            block_size: Tokens of one.
            bytes_per_block: Bytes of one.
            kv_formats: Formats that the engine has a pool of; None checks none.

        Raises:
            PolicyError: If the floors need more blocks than there are, a partition has none, a floor is above its
                ceiling, or a format has no pool; one line each, which starts with where.
        """
        pool = num_blocks, block_size, bytes_per_block
        faults = []
        for path, policy in self._all():
            if policy.min_pool is not None:
                floor = policy.min_pool.wanted_blocks(*pool)
                if policy.isolation == "strict" and floor == 0:
                    faults.append(
                        f"{path}.min_pool: a partition of {policy.min_pool} is less than one block "
                        f"({block_size} tokens, {bytes_per_block} bytes)"
                    )
                ceiling = num_blocks if policy.max_pool is None else max(1, policy.max_pool.blocks(*pool))
                if floor > ceiling:
                    above = "the pool" if policy.max_pool is None else f"the ceiling, max_pool, of {policy.max_pool}"
                    faults.append(
                        f"{path}.min_pool: the floor of {policy.min_pool} is {floor} blocks, and {above} has {ceiling}"
                    )
            if policy.kv_format is not None and kv_formats is not None and policy.kv_format not in kv_formats:
                faults.append(
                    f"{path}.kv_format: the engine has no pool of {policy.kv_format}; it has {', '.join(kv_formats)}"
                )
        total = sum(amount.wanted_blocks(*pool) for _, amount in self._floors())
        if total > num_blocks:
            faults.append(f"tenants: the floors, min_pool, need {total} blocks and the pool has {num_blocks}")
        if faults:
            raise PolicyError("\n".join(faults))

    def _all(self) -> Iterator[tuple[str, TenantPolicy]]:
        for name, policy in self.tenants.items():
            yield f"tenants.{shown(name)}", policy
        if self.default is not None:
            yield "default", self.default
