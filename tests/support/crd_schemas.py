"""Whether a custom resource fits the schema of its CustomResourceDefinition, unknown fields counted as errors.

An API server prunes what the schema doesn't know without a word; here a typing error in a manifest must be found.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jsonschema import Draft202012Validator

_OF_EVERY_OBJECT = frozenset(("apiVersion", "kind", "metadata"))


def problems(schema: Mapping[str, Any], resource: Mapping[str, Any]) -> list[str]:
    """What is wrong, a line each with its place.

    schema  openAPIV3Schema; repeated parts may stand under $defs
    """
    found = [
        f"{'.'.join(map(str, error.absolute_path))}: {error.message}"
        for error in Draft202012Validator(schema).iter_errors(resource)
    ]
    for name, value in resource.items():
        if name not in _OF_EVERY_OBJECT:
            known = _resolved(schema, schema).get("properties", {})
            found += [f"{name}: unknown field"] if name not in known else []
            found += _unknown(schema, known[name], value, name) if name in known else []
    return found


def _unknown(root: Mapping[str, Any], schema: Any, value: Any, place: str) -> Iterator[str]:
    schema = _resolved(root, schema)
    if isinstance(value, list):
        for index, each in enumerate(value):
            yield from _unknown(root, schema.get("items", {}), each, f"{place}.{index}")
    if not isinstance(value, dict) or schema.get("x-kubernetes-preserve-unknown-fields"):
        return
    properties, others = schema.get("properties", {}), schema.get("additionalProperties")
    for name, each in value.items():
        inner = properties.get(name, others)
        if isinstance(inner, dict):
            yield from _unknown(root, inner, each, f"{place}.{name}")
        elif inner is None and not (schema.get("type") == "object" and not properties and others is None):
            yield f"{place}.{name}: unknown field"


def _resolved(root: Mapping[str, Any], schema: Any) -> dict[str, Any]:
    while "$ref" in schema:
        schema = root["$defs"][schema["$ref"].removeprefix("#/$defs/")]
    return dict(schema)
