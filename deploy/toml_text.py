"""A configuration as the TOML text of a file."""

from __future__ import annotations

import json
from collections.abc import Mapping


def toml_of(tables: Mapping[str, Mapping[str, object]]) -> str:
    """One table after the other, keys in order, so that equal settings give equal text.

    Values are what a configuration file can hold: strings, numbers, booleans, lists of strings.
    """
    parts = []
    for table, values in sorted(tables.items()):
        lines = [f"{key} = {_literal(value)}" for key, value in sorted(values.items())]
        parts.append("\n".join([f"[{table}]", *lines]) + "\n")
    return "\n".join(parts)


def _literal(value: object) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(_literal(part) for part in value)}]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False).replace(
        "\x7f", "\\u007f"
    )  # JSON's strings and booleans are TOML's
