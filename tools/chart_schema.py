"""Writes the settings of pdserve into the chart's values.schema.json, so that Helm refuses what pdserve would.

    python tools/chart_schema.py     after a change of pdserve/service/config.py

A test compares the file with the code. Settings that the chart decides itself are left out: to set them is an error.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run as a file, the folder of this one stands there instead

from pdserve.service.config import SETTINGS  # noqa: E402
from pdserve.service.settings import Setting  # noqa: E402

FILE = ROOT / "deploy" / "k8s" / "chart" / "values.schema.json"
# Addresses, names and files inside the pods.
DECIDED = frozenset(
    (
        "router.id", "router.listen", "router.workers_listen", "router.keys_file", "router.model",
        "worker.id", "worker.role", "worker.routers", "worker.model", "worker.kv_listen", "worker.unix_dir",
        "cluster.secret_file", "cluster.insecure",
        "tls.cert_file", "tls.key_file", "tls.ca_file", "tls.client_ca_file", "tls.server_name", "tls.worker_name",
        "http.listen", "metrics.listen", "tracing.headers_file",
    )
)  # fmt: skip
_OF_ROUTERS = ("router", "http", "children", "log")
_OF_GATEWAYS = ("router", "http", "log")  # of a router's: how long it drains, how much it takes in at a time
_OF_WORKERS = ("worker", "engine", "transport", "children", "log")
_KINDS = {bool: "boolean", int: "integer", float: "number", str: "string", tuple: "array"}


def definitions() -> dict[str, Any]:
    """The schemas of `config`, and of each component's own."""
    tables = {key.table: _table(key.table) for key in SETTINGS if key.name not in DECIDED}
    return {
        "settings": _object(tables),
        "routerSettings": _object({name: tables[name] for name in _OF_ROUTERS}),
        "gatewaySettings": _object({name: tables[name] for name in _OF_GATEWAYS}),
        "workerSettings": _object({name: tables[name] for name in _OF_WORKERS}),
    }


def with_settings(schema: dict[str, Any]) -> dict[str, Any]:
    """The chart's schema, with these definitions instead of those that it has."""
    return {**schema, "$defs": {**schema["$defs"], **definitions()}}


def _table(table: str) -> dict[str, Any]:
    keys = [key for key in SETTINGS if key.table == table and key.name not in DECIDED]
    return _object({key.key: _value(key) for key in keys})


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _value(key: Setting) -> dict[str, Any]:
    spec = key.spec
    made: dict[str, Any] = {"type": _KINDS[key.kind], "description": spec.doc}
    item: dict[str, Any] = {"enum": list(spec.choices)} if spec.choices else {}
    if key.kind is tuple:
        made["items"] = {"type": "string", **item}
    else:
        made |= item
    bounds = (("minimum", spec.least), ("exclusiveMinimum", spec.above), ("maximum", spec.most))
    made |= {word: bound for word, bound in bounds if bound is not None and math.isfinite(bound)}
    return made


def main() -> int:
    """Write the file."""
    schema = json.loads(FILE.read_text(encoding="utf-8"))
    FILE.write_text(json.dumps(with_settings(schema), indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
