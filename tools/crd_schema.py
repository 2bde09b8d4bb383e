"""The schema of a custom resource, taken from its CustomResourceDefinition, small enough to keep for tests.

    python tools/crd_schema.py CRD.yaml v1 "where the CRD is from" > tests/k8s/schemas/KIND.json

Descriptions are left out, and what stands in it more than once (the pod template, mostly) is written once.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

_LEAST_SHARED = 200  # characters; less isn't worth a reference


def schema_of(crd: dict[str, Any], version: str) -> dict[str, Any]:
    """The openAPIV3Schema of one version, without descriptions."""
    [found] = [each for each in crd["spec"]["versions"] if each["name"] == version]
    schema: dict[str, Any] = _bare(found["schema"]["openAPIV3Schema"])
    return schema


def shared(schema: dict[str, Any]) -> dict[str, Any]:
    """The same schema, with what is repeated under $defs."""
    counts: Counter[str] = Counter()
    _count(schema, counts)
    names: dict[str, str] = {}
    defs: dict[str, Any] = {}

    def short(node: Any) -> Any:
        if isinstance(node, list):
            return [short(each) for each in node]
        if not isinstance(node, dict):
            return node
        text = json.dumps(node, sort_keys=True)
        if counts[text] < 2:
            return {key: short(each) for key, each in node.items()}
        if text not in names:
            names[text] = f"shared{len(names)}"
            defs[names[text]] = {key: short(each) for key, each in node.items()}
        return {"$ref": f"#/$defs/{names[text]}"}

    made = short(schema)
    return {**made, "$defs": defs}


def _bare(node: Any) -> Any:
    """Without descriptions; a property of that name is an object and stays."""
    if isinstance(node, list):
        return [_bare(each) for each in node]
    if not isinstance(node, dict):
        return node
    return {
        key: _bare(each) for key, each in node.items() if not (key == "description" and isinstance(each, str))
    }


def _count(node: Any, counts: Counter[str]) -> None:
    """Schemas only: a $ref may stand in place of one, but not of a map of properties."""
    if isinstance(node, dict):
        text = json.dumps(node, sort_keys=True)
        if isinstance(node.get("type"), str) and len(text) >= _LEAST_SHARED:
            counts[text] += 1
    for each in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        _count(each, counts)


def main() -> int:
    """Print it."""
    path, version, source = sys.argv[1:]
    crd = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    json.dump({"$comment": source, **shared(schema_of(crd, version))}, sys.stdout, indent=1)
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
