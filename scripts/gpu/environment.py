"""What is there: GPUs, driver, torch, NCCL."""

from __future__ import annotations

import platform
from typing import Any

import torch

from kv_transfer.transports.libnccl import describe_loaded, load_nccl
from pdserve.errors import Incompatible
from scripts.gpu.place import GpuPlace


def look(place: GpuPlace) -> dict[str, Any]:
    """Raises if there is no GPU, or no NCCL, and this isn't a dry run."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "devices": [_device(number) for number in range(torch.cuda.device_count())],
        "nccl_of_torch": describe_loaded(),
    }
    try:
        found["nccl"] = str(load_nccl())
    except Incompatible as error:
        found["nccl"] = str(error)
        if not place.is_dry:
            raise
    if not (found["devices"] or place.is_dry):
        raise SystemExit("torch finds no GPU")
    if place.prefill != place.decode and not place.is_dry:
        found["peer_access"] = torch.cuda.can_device_access_peer(place.decode, place.prefill)
    return found


def _device(number: int) -> dict[str, Any]:
    has = torch.cuda.get_device_properties(number)
    return {
        "name": has.name,
        "capability": f"{has.major}.{has.minor}",
        "memory_gb": round(has.total_memory / 1e9, 1),
        "processors": has.multi_processor_count,
    }
