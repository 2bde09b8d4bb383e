"""What a worker with nccl or cuda_ipc in transport.kinds is told before it starts."""

from __future__ import annotations

import pytest

from pdserve.errors import Incompatible, InvariantViolated, WorkerLost
from pdserve.kv_memory import ByteSpan, HostMemory
from pdserve.memfd import MemfdMemory
from pdserve.node.link_devices import open_devices, staging_by
from pdserve.node.staging_double import StagingDouble
from pdserve.service.config import Config, TransportConfig
from tests.support.virtual_clock import VirtualClock


def _config(*kinds: str, link_tls: bool = False) -> Config:
    return Config(transport=TransportConfig(kinds=kinds, link_tls=link_tls))


@pytest.mark.parametrize(
    ("kind", "link_tls", "said"),
    [
        ("nccl", True, "it doesn't encrypt"),
        ("nccl", False, "has nccl, but the KV pool isn't on a CUDA device"),
        ("cuda_ipc", False, "has cuda_ipc, but the KV pool isn't on a CUDA device"),
    ],
)
def test_why_a_transport_cant_be_used(kind: str, link_tls: bool, said: str) -> None:
    with pytest.raises(Incompatible, match=said):
        open_devices(_config(kind, "stream", link_tls=link_tls), HostMemory(4096), 4096, VirtualClock())


def test_the_double_takes_memory_that_others_may_map(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_CUDA_IPC", "double")
    with pytest.raises(Incompatible, match="can't be exported"):
        open_devices(_config("cuda_ipc"), HostMemory(4096), 4096, VirtualClock())
    devices = open_devices(_config("cuda_ipc"), MemfdMemory(4096), 4096, VirtualClock())
    assert devices.ipc is not None and devices.nccl is None
    assert devices.counts() == (0, 0, 0, 0, 0, 0)


def test_staging_is_there_where_the_host_cant_see_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """And pieces of a stream then have checksums, as on a CPU; a CPU's own pool goes without."""
    pool = HostMemory(4096 * 16)
    plain = open_devices(_config("stream"), pool, 4096, VirtualClock())
    assert plain.staging is None and plain.seen(pool) is pool
    monkeypatch.setenv("PDSERVE_STAGING", "double")
    devices = open_devices(_config("stream"), pool, 4096, VirtualClock())
    assert devices.seen(pool).checksums == pool.checksums
    with pytest.raises(InvariantViolated, match="can't see"):
        devices.seen(pool).view(ByteSpan(0, 1))
    assert open_devices(_config("memfd"), pool, 4096, VirtualClock()).staging is None
    small = Config(transport=TransportConfig(kinds=("stream",), staging_bytes=1 << 16))
    with pytest.raises(Incompatible, match="must hold a piece for each"):
        open_devices(small, pool, 1 << 16, VirtualClock())


class FullHost(StagingDouble):
    """A container whose limit has no room for pinned memory."""

    def pin(self, num_bytes: int) -> memoryview:
        raise WorkerLost("cuMemHostAlloc failed", said="out of memory")


def test_memory_that_cant_be_pinned_is_a_setting_to_change() -> None:
    pool = HostMemory(4096 * 16)
    with pytest.raises(Incompatible, match=r"staging_bytes can't be pinned.*134217728.*out of memory"):
        staging_by(FullHost(pool), _config("stream"), pool, 4096, VirtualClock())
