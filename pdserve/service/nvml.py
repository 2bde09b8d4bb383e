"""Energy counters of NVIDIA GPUs through their driver's library, where there is one. No package is needed for it.

Source: NVML API reference, nvmlDeviceGetTotalEnergyConsumption.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

_LIBRARY = "libnvidia-ml.so.1"
_SUCCESS = 0
_MILLIJOULES = 1e3


class Unavailable(Exception):
    """This machine can't tell what its GPUs use; says why."""


class NvmlGpus:
    """Total energy of some GPUs since they were made ready by the driver. Volta and later. One thread."""

    def __init__(self, indices: Sequence[int], load: Callable[[str], Any] = ctypes.CDLL) -> None:
        """load  gives the library by its name, or raises OSError. Raises Unavailable."""
        try:
            self._library = load(_LIBRARY)
        except OSError as error:
            raise Unavailable(f"{_LIBRARY}: {error}") from error
        self._call("nvmlInit_v2")
        self._devices = [self._device(index) for index in indices]
        self._energy_mj = [ctypes.c_ulonglong() for _ in indices]
        self._read()

    def read_j(self) -> float | None:
        """Joules; None if a GPU doesn't answer, or no longer does."""
        try:
            return self._read()
        except Unavailable:
            return None

    def _read(self) -> float:
        for device, energy_mj in zip(self._devices, self._energy_mj, strict=True):
            self._call("nvmlDeviceGetTotalEnergyConsumption", device, ctypes.byref(energy_mj))
        return sum(energy_mj.value for energy_mj in self._energy_mj) / _MILLIJOULES

    def _device(self, index: int) -> ctypes.c_void_p:
        device = ctypes.c_void_p()
        self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(device))
        return device

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code != _SUCCESS:
            raise Unavailable(f"{name} answers {code}")
