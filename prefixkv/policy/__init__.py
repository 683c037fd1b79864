"""What each tenant may do: frozen pydantic models, read from YAML, TOML, JSON or Python.

``values`` holds the kinds of a field, ``base`` the model they stand in, ``tenant`` one tenant's rules, ``policies`` all
tenants' rules, ``file`` reads files, ``schema`` describes them to an editor.
"""

from prefixkv.policy.policies import PolicySet
from prefixkv.policy.schema import json_schema
from prefixkv.policy.tenant import SlotPolicy, TenantPolicy, TTLPolicy
from prefixkv.policy.values import CLOCK_UNITS, DEFAULT_SCOPES, SEGMENT_KINDS, PoolAmount

__all__ = [
    "CLOCK_UNITS",
    "DEFAULT_SCOPES",
    "SEGMENT_KINDS",
    "PolicySet",
    "PoolAmount",
    "SlotPolicy",
    "TTLPolicy",
    "TenantPolicy",
    "json_schema",
]
