"""Ray's own autoscaler, whose machines are further Ray nodes on loopback."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.local.ports import PortReservations

_HEAD_TYPE = "ray.head.default"
_HEAD_ID = f"{0:05}".rjust(56, "f")  # by which Ray's provider of such nodes knows the head
_ENVIRON = {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
_LISTS = (
    "cluster_synced_files", "rsync_exclude", "rsync_filter", "initialization_commands", "setup_commands",
    "head_setup_commands", "worker_setup_commands", "head_start_ray_commands", "worker_start_ray_commands",
)  # fmt: skip


@dataclass(frozen=True)
class Machines:
    """What it may start: so many, each with these resources, and ends when they have been idle for six seconds."""

    resources: Mapping[str, float]
    most: int


@contextlib.contextmanager
def head_arguments(machines: Machines, folder: Path, head: Mapping[str, float]) -> Iterator[dict[str, Any]]:
    """More arguments of the head; it must be started within the block, since it takes others by its environment."""
    with PortReservations() as ports:
        port = ports.reserve("127.0.0.1", 0)
    config = {
        "cluster_name": "test",
        "max_workers": machines.most,
        "provider": {
            "type": "fake_multinode",
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
            "gcs_address": f"127.0.0.1:{port}",
        },
        "available_node_types": {
            _HEAD_TYPE: {"resources": dict(head), "node_config": {}, "max_workers": 0},
            "machine": {
                "resources": dict(machines.resources),
                "node_config": {},
                "min_workers": 0,
                "max_workers": machines.most,
            },
        },
        "head_node_type": _HEAD_TYPE,
        "upscaling_speed": 20.0,
        "idle_timeout_minutes": 0.1,
        **{key: {} for key in ("auth", "docker", "file_mounts")},
        **{key: [] for key in _LISTS},
        "file_mounts_sync_continuously": False,
    }
    file = folder / "autoscaler.yaml"
    file.write_text(json.dumps(config))
    own = {**_ENVIRON, "RAY_OVERRIDE_NODE_ID_FOR_TESTING": _HEAD_ID}
    os.environ.update(own)
    try:
        yield {"autoscaling_config": str(file), "gcs_server_port": port}
    finally:
        for name in own:
            del os.environ[name]
