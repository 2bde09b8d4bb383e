"""What a worker with nccl or cuda_ipc in transport.kinds is told before it starts."""

from __future__ import annotations

import pytest

from pdserve.errors import Incompatible
from pdserve.kv_memory import HostMemory
from pdserve.memfd import MemfdMemory
from pdserve.node.link_devices import open_devices
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
        open_devices(_config(kind, "stream", link_tls=link_tls), HostMemory(4096), VirtualClock())


def test_the_double_takes_memory_that_others_may_map(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_CUDA_IPC", "double")
    with pytest.raises(Incompatible, match="can't be exported"):
        open_devices(_config("cuda_ipc"), HostMemory(4096), VirtualClock())
    devices = open_devices(_config("cuda_ipc"), MemfdMemory(4096), VirtualClock())
    assert devices.ipc is not None and devices.nccl is None
    assert devices.counts() == (0, 0, 0, 0)
