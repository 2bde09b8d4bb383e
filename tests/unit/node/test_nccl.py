"""What a worker with nccl in transport.kinds is told before it starts."""

from __future__ import annotations

import pytest

from pdserve.errors import Incompatible
from pdserve.kv_memory import HostMemory
from pdserve.node.nccl import open_device
from pdserve.service.config import Config, TransportConfig
from tests.support.virtual_clock import VirtualClock


@pytest.mark.parametrize(
    ("link_tls", "said"), [(True, "it doesn't encrypt"), (False, "the KV pool isn't on a CUDA device")]
)
def test_why_nccl_cant_be_used(link_tls: bool, said: str) -> None:
    config = Config(transport=TransportConfig(kinds=("nccl", "stream"), link_tls=link_tls))
    with pytest.raises(Incompatible, match=said):
        open_device(config, HostMemory(4096), VirtualClock())
