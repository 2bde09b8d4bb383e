"""Several Ray nodes on loopback, and a pdserve cluster on them. Every process of theirs is gone afterwards, by pid."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from pdserve.ids import system_random
from tests.support.ray_autoscaler import Machines, head_arguments
from tests.support.waiting import until

_MARK = "TEST_PDSERVE_MARK"
_STORE_BYTES = 80 << 20
_START_TRIES = 2


class RayNodes:
    """A head and further nodes; see `ray_nodes`."""

    def __init__(self, cluster: Any, mark: str) -> None:
        self._cluster = cluster
        self.mark = mark

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add(self, **resources: float) -> Any:
        """One more node, with 4 CPUs if nothing else is said; the custom resources by name."""
        num_cpus = resources.pop("CPU", 4)
        return self._cluster.add_node(
            num_cpus=num_cpus, resources=resources, object_store_memory=_STORE_BYTES, include_dashboard=False
        )

    def raylet_of(self, actor_pid: int) -> int:
        """The pid of the raylet below which this actor's process runs."""
        return _stat(actor_pid)[1]

    def pids(self) -> dict[int, str]:
        """All processes that live and were started, however far down, by these nodes: pid → command line."""
        return marked(self.mark)


@contextlib.asynccontextmanager
async def ray_nodes(
    *further: dict[str, float], machines: Machines | None = None, **head: float
) -> AsyncIterator[RayNodes]:
    """Nodes with these resources, for the block; AssertionError if a process of theirs is left.

    machines  what an autoscaler may add
    """
    mark = f"{system_random().getrandbits(64):016x}"
    os.environ[_MARK] = mark
    folder = Path(tempfile.mkdtemp(prefix="pdr-", dir="/tmp"))  # sockets in it: 107 characters at most
    try:
        cluster = _started(folder, head, machines)
        try:
            nodes = RayNodes(cluster, mark)
            for resources in further:
                nodes.add(**resources)
            yield nodes
        finally:
            cluster.shutdown()
        await until(
            "no process of Ray and of the cluster is left",
            lambda: _none_left(mark),
            told=lambda: str(marked(mark)),
        )
    finally:
        for pid in marked(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)
        del os.environ[_MARK]


def _started(folder: Path, head: dict[str, float], machines: Machines | None) -> Any:
    from ray.cluster_utils import Cluster

    arguments = {
        "num_cpus": head.pop("CPU", 4),
        "resources": head,
        "object_store_memory": _STORE_BYTES,
        "include_dashboard": False,
        "temp_dir": str(folder),
    }
    for left in reversed(range(_START_TRIES)):
        try:
            with contextlib.ExitStack() as stack:
                if machines is not None:
                    arguments |= stack.enter_context(head_arguments(machines, folder, head))
                return Cluster(initialize_head=True, head_node_args=arguments)
        except Exception:  # on a busy machine a head may not start in Ray's own time
            if not left:
                raise
    raise AssertionError


async def _none_left(mark: str) -> bool:
    return not marked(mark)


def marked(mark: str) -> dict[int, str]:
    """Living processes below one that was started with this mark, but this one."""
    found: set[int] = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError, ValueError):
            pid = int(entry.name)
            state, _ = _stat(pid)
            if state != "Z" and mark.encode() in (entry / "environ").read_bytes():
                found.add(pid)
    return {pid: _command(pid) for pid in found}


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:160]
    except OSError:
        return ""


def _stat(pid: int) -> tuple[str, int]:
    state, parent, *_ = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return state, int(parent)
