"""How much energy this process uses, where the machine can tell: RAPL through Linux' powercap, GPUs through NVML.

Counters of a whole package or GPU are read at both ends of each engine step. Of a package's joules a process gets its
share of the CPU time that was spent on the host meanwhile; a GPU is taken to be its worker's alone.
Sources: https://docs.kernel.org/power/powercap/powercap.html, proc_pid_stat(5), proc_stat(5).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import structlog

from pdserve.clock import Clock
from pdserve.energy import EnergyMeter
from pdserve.service.nvml import NvmlGpus, Unavailable

log = structlog.get_logger()

_POWERCAP = Path("/sys/class/powercap")
_PROC = Path("/proc")
_MICROJOULES = 1e6
SHARE_EVERY_S = 0.5  # CPU times are counted in hundredths of a second


class RaplZone:
    """One energy counter of powercap, unwrapped.

    The counter wraps around at max_energy_range_uj; it must be read more often than that takes (minutes).
    """

    def __init__(self, folder: Path) -> None:
        """Raises OSError or ValueError if it can't be read: since 2020 kernels show it to root only."""
        self.name = (folder / "name").read_text().strip()
        self._file = folder / "energy_uj"
        self._range_uj = int((folder / "max_energy_range_uj").read_text())
        self._last_uj = int(self._file.read_text())
        self._total_uj = 0

    def read_j(self) -> float:
        """Joules since this object was made. Raises OSError or ValueError."""
        now_uj = int(self._file.read_text())
        grown_uj = now_uj - self._last_uj
        self._total_uj += grown_uj if grown_uj >= 0 else grown_uj + self._range_uj
        self._last_uj = now_uj
        return self._total_uj / _MICROJOULES


def rapl_zones(powercap: Path = _POWERCAP) -> list[RaplZone]:
    """What together makes up the host's CPUs and memory: packages and their DRAM, or else the platform's counter.

    Cores and uncore are parts of a package; intel-rapl-mmio shows packages a second time.
    """
    zones: dict[str, RaplZone] = {}
    for folder in sorted(powercap.glob("intel-rapl:*")):
        try:
            zones[folder.name] = RaplZone(folder)
        except (OSError, ValueError) as error:
            log.debug("energy.zone_unreadable", zone=folder.name, reason=str(error))
    parts = [zone for zone in zones.values() if zone.name.startswith("package-") or zone.name == "dram"]
    if any(zone.name.startswith("package-") for zone in parts):
        return parts
    return [zone for zone in zones.values() if zone.name == "psys"]


class CpuShare:
    """This process's recent share of the CPU time that the host spends."""

    def __init__(self, clock: Clock, proc: Path = _PROC) -> None:
        """Raises OSError or ValueError where there is no such accounting."""
        self._clock = clock
        self._proc = proc
        self._share = 1.0
        self._own, self._all = self._read()
        self._read_s = clock.now_s()

    def read(self) -> float:
        """0 to 1. Raises OSError or ValueError."""
        now_s = self._clock.now_s()
        if now_s - self._read_s >= SHARE_EVERY_S:
            own, everybody = self._read()
            if everybody > self._all:
                self._share = min(1.0, (own - self._own) / (everybody - self._all))
            self._own, self._all, self._read_s = own, everybody, now_s
        return self._share

    def _read(self) -> tuple[int, int]:
        """Ticks of this process, user and system; of all processes."""
        fields = (self._proc / "self/stat").read_text().rpartition(")")[2].split()
        own = int(fields[11]) + int(fields[12])
        line = (self._proc / "stat").read_text().partition("\n")[0].split()
        user, nice, system, _idle, _iowait, irq, softirq = (int(value) for value in line[1:8])
        return own, user + nice + system + irq + softirq


class RaplMeter:
    """Zones, and this process' share of what they count. One thread."""

    def __init__(self, zones: Sequence[RaplZone], share: CpuShare) -> None:
        self._zones = zones
        self._share = share
        self._host_j = 0.0
        self._own_j = 0.0
        self._broken = False

    def read_j(self) -> float | None:
        if self._broken:
            return None
        try:
            host_j = sum(zone.read_j() for zone in self._zones)
            share = self._share.read()
        except (OSError, ValueError) as error:
            self._broken = True
            log.warning("energy.unreadable", reason=str(error))
            return None
        self._own_j += (host_j - self._host_j) * share
        self._host_j = host_j
        return self._own_j


class SumOfMeters:
    """All parts of the machine that a worker computes on; unknown as soon as one of them is."""

    def __init__(self, meters: Sequence[EnergyMeter]) -> None:
        self._meters = meters

    def read_j(self) -> float | None:
        total_j = 0.0
        for meter in self._meters:
            joules = meter.read_j()
            if joules is None:
                return None
            total_j += joules
        return total_j


def find_energy_meter(
    clock: Clock, gpus: Sequence[int] = (), *, powercap: Path = _POWERCAP, proc: Path = _PROC
) -> EnergyMeter | None:
    """The meter for what a worker computes on; None where the machine can't tell.

    gpus  NVML indices of its GPUs. With any, their energy is what counts, and the CPU's is added if it is known.
    """
    meters: list[EnergyMeter] = []
    if gpus:
        try:
            meters.append(NvmlGpus(gpus))
        except Unavailable as why:
            log.info("energy.unknown", reason=str(why))
            return None
    try:
        zones = rapl_zones(powercap)
        if zones:
            meters.append(RaplMeter(zones, CpuShare(clock, proc)))
    except (OSError, ValueError) as error:
        log.info("energy.no_cpu_time", reason=str(error))
    if not meters:
        log.info("energy.unknown", reason="no readable RAPL counter", pid=os.getpid())
        return None
    log.info("energy.metered", by=[type(meter).__name__ for meter in meters], gpus=list(gpus))
    return meters[0] if len(meters) == 1 else SumOfMeters(meters)
