"""Check of tool arguments against the JSON schema of a tool's parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (dict,), "array": (list,), "string": (str,), "boolean": (bool,), "null": (type(None),),
    "integer": (int,), "number": (int, float),
}  # fmt: skip


def fits(value: Any, schema: Any) -> bool:
    """Return whether a JSON value fits a schema, as far as types, names, `required` and `enum` tell.

    Other keywords are ignored. An object with named properties may have no other ones, unless the schema has
    `additionalProperties`. That is stricter than JSON schema, because unknown names show that no call was intended.
    """
    if not isinstance(schema, Mapping):
        return True
    if "enum" in schema and value not in schema["enum"]:
        return False
    if "type" in schema and not _has_type(value, schema["type"]):
        return False
    if isinstance(value, list):
        return all(fits(item, schema.get("items")) for item in value)
    if not isinstance(value, dict):
        return True
    properties = schema.get("properties", {})
    closed = bool(properties) and not schema.get("additionalProperties")
    return all(name in value for name in schema.get("required", ())) and all(
        fits(item, properties[name]) if name in properties else not closed for name, item in value.items()
    )


def _has_type(value: Any, names: Any) -> bool:
    """Return whether a value has one of the types of a schema. Unknown types are accepted."""
    for name in [names] if isinstance(names, str) else names:
        if name not in _TYPES:
            return True
        # In Python, bool is a subclass of int.
        if isinstance(value, _TYPES[name]) and (name == "boolean" or not isinstance(value, bool)):
            return True
    return False
