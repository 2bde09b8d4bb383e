"""The device of a worker whose links go over NCCL."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import structlog

from kv_transfer.transports.cuda_driver import CudaDriver
from kv_transfer.transports.libnccl import LibNccl, load_nccl
from kv_transfer.transports.nccl_device import NcclDevice
from kv_transfer.transports.nccl_port import Nccl
from pdserve.clock import Clock
from pdserve.errors import Incompatible
from pdserve.kv_memory import DeviceMemory, KvMemory
from pdserve.node.nccl_double import NcclDouble
from pdserve.service.config import Config

_DOUBLE = "PDSERVE_NCCL"

log = structlog.get_logger()


def open_device(config: Config, memory: KvMemory, clock: Clock) -> NcclDevice:
    """For all links of this process. Raises Incompatible: why NCCL can't be used here."""
    if config.transport.link_tls:
        raise Incompatible(
            "transport.link_tls can't be kept with nccl in transport.kinds: it doesn't encrypt"
        )
    return NcclDevice(
        _open_nccl(memory), clock=clock, timeouts=config.timeouts, max_comms=config.worker.max_links
    )


def _open_nccl(memory: KvMemory) -> Nccl:
    if os.environ.get(_DOUBLE) == "double":
        log.warning("nccl.double", reason=f"{_DOUBLE}=double: KV moves through memory of this host")
        return NcclDouble(memory)
    if not isinstance(memory, DeviceMemory):
        raise Incompatible(
            "transport.kinds has nccl, but the KV pool isn't on a CUDA device", device=memory.device
        )
    library = load_nccl()
    log.info("nccl.loaded", version=".".join(map(str, library.version)), path=library.path)
    cuda = CudaDriver.open(int(memory.device.partition(":")[2] or 0))
    return LibNccl(library, cuda, address=memory.device_address, run_beside=_run_beside)


def _run_beside(call: Callable[[], None]) -> None:
    threading.Thread(target=call, name="nccl-abort", daemon=True).start()
