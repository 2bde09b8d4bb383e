"""Joules from recorded sysfs and proc trees, and from a driver library that a test plays."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

from pdserve.energy import EnergyMeter
from pdserve.service.energy import CpuShare, RaplMeter, SumOfMeters, find_energy_meter, rapl_zones
from pdserve.service.nvml import NvmlGpus, Unavailable
from tests.support.virtual_clock import VirtualClock

RANGE_UJ = 262_143_328_850


class Machine:
    """A tree as a two-socket server shows it (recorded: names, layout, ranges), and CPU times beside it."""

    def __init__(self, root: Path) -> None:
        self.powercap = root / "powercap"
        self.proc = root / "proc"
        (self.proc / "self").mkdir(parents=True)
        self.powercap.mkdir()
        self.cpu(own=(0, 0), busy=0)

    def zone(self, folder: str, name: str, energy_uj: int, range_uj: int = RANGE_UJ) -> None:
        path = self.powercap / folder
        path.mkdir(exist_ok=True)
        (path / "name").write_text(f"{name}\n")
        (path / "max_energy_range_uj").write_text(f"{range_uj}\n")
        self.set(folder, energy_uj)

    def set(self, folder: str, energy_uj: int) -> None:
        (self.powercap / folder / "energy_uj").write_text(f"{energy_uj}\n")

    def server(self) -> None:
        for socket in (0, 1):
            self.zone(f"intel-rapl:{socket}", f"package-{socket}", 1_000_000)
            self.zone(f"intel-rapl:{socket}:0", "core", 900_000)
            self.zone(f"intel-rapl:{socket}:1", "dram", 500_000, 65_712_999_613)
        (self.powercap / "intel-rapl").mkdir()  # the control type itself
        self.zone("intel-rapl-mmio:0", "package-0", 1_000_000)

    def cpu(self, own: tuple[int, int], busy: int) -> None:
        """Ticks: user and system of this process; of all. Its name has the letters that fool naive readers."""
        (self.proc / "self/stat").write_text(
            f"4711 (py) 1 (x) S 1 2 3 0 -1 0 5 0 0 0 {own[0]} {own[1]} 0 0 20 0 9"
        )
        (self.proc / "stat").write_text(f"cpu  {busy} 0 0 99999 77 0 0 0 0 0\ncpu0 1 2 3 4 5 6 7 8 9 10\n")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def meter_of(machine: Machine, clock: VirtualClock, gpus: tuple[int, ...] = ()) -> EnergyMeter | None:
    return find_energy_meter(clock, gpus, powercap=machine.powercap, proc=machine.proc)


def test_packages_and_dram_count_once_each(machine: Machine) -> None:
    machine.server()
    assert [zone.name for zone in rapl_zones(machine.powercap)] == ["package-0", "dram", "package-1", "dram"]


def test_the_platform_counts_where_no_package_is_told(machine: Machine) -> None:
    machine.zone("intel-rapl:0", "psys", 5)
    machine.zone("intel-rapl:0:0", "core", 5)
    assert [zone.name for zone in rapl_zones(machine.powercap)] == ["psys"]
    machine.zone("intel-rapl:1", "package-0", 5)
    assert [zone.name for zone in rapl_zones(machine.powercap)] == ["package-0"]


def test_a_process_alone_on_its_host_gets_all(machine: Machine) -> None:
    machine.server()
    clock = VirtualClock()
    meter = meter_of(machine, clock)
    assert meter is not None
    assert meter.read_j() == 0.0
    machine.set("intel-rapl:0", 3_500_000)
    machine.set("intel-rapl:1:1", 1_500_000)
    machine.set("intel-rapl:0:0", 99_000_000)  # in the package already
    assert meter.read_j() == pytest.approx(2.5 + 1.0)
    assert meter.read_j() == pytest.approx(3.5)


def test_counters_that_begin_anew(machine: Machine) -> None:
    machine.zone("intel-rapl:0", "package-0", RANGE_UJ - 1_000_000)
    meter = meter_of(machine, VirtualClock())
    assert meter is not None
    machine.set("intel-rapl:0", 2_000_000)
    assert meter.read_j() == pytest.approx(3.0)
    machine.set("intel-rapl:0", 2_500_000)
    assert meter.read_j() == pytest.approx(3.5)


def test_joules_are_shared_by_cpu_time(machine: Machine) -> None:
    machine.zone("intel-rapl:0", "package-0", 0)
    clock = VirtualClock()
    meter = meter_of(machine, clock)
    assert meter is not None
    machine.set("intel-rapl:0", 10_000_000)
    assert meter.read_j() == pytest.approx(10.0)  # too early to know of others
    clock.advance(0.6)
    machine.cpu(own=(20, 5), busy=100)
    machine.set("intel-rapl:0", 18_000_000)
    assert meter.read_j() == pytest.approx(12.0)
    clock.advance(0.1)
    machine.cpu(own=(90, 35), busy=200)
    machine.set("intel-rapl:0", 22_000_000)
    assert meter.read_j() == pytest.approx(13.0)  # the share is a while old
    clock.advance(0.6)
    machine.set("intel-rapl:0", 24_000_000)
    assert meter.read_j() == pytest.approx(15.0)


def test_cpu_times_that_stand_still(machine: Machine) -> None:
    clock = VirtualClock()
    share = CpuShare(clock, machine.proc)
    clock.advance(10)
    assert share.read() == 1.0


def test_where_the_machine_cant_tell_there_is_no_meter(machine: Machine, tmp_path: Path) -> None:
    clock = VirtualClock()
    assert meter_of(machine, clock) is None
    assert find_energy_meter(clock, powercap=tmp_path / "nowhere", proc=machine.proc) is None
    machine.zone("intel-rapl:0", "package-0", 0)
    assert find_energy_meter(clock, powercap=machine.powercap, proc=tmp_path / "nowhere") is None
    (machine.powercap / "intel-rapl:0/energy_uj").unlink()  # as good as unreadable
    assert meter_of(machine, clock) is None
    machine.set("intel-rapl:0", 0)
    (machine.powercap / "intel-rapl:0/max_energy_range_uj").write_text("?")
    assert meter_of(machine, clock) is None


def test_a_counter_that_goes_away_is_unknown_for_good(machine: Machine) -> None:
    machine.zone("intel-rapl:0", "package-0", 0)
    meter = meter_of(machine, VirtualClock())
    assert meter is not None
    (machine.powercap / "intel-rapl:0/energy_uj").unlink()
    assert meter.read_j() is None
    machine.set("intel-rapl:0", 5)
    assert meter.read_j() is None


class Driver:
    """libnvidia-ml.so.1 as far as it is used, with the GPUs' millijoules."""

    def __init__(self, *energy_mj: int, init: int = 0) -> None:
        self.energy_mj = list(energy_mj)
        self.answer = 0
        self._init = init

    def load(self, name: str) -> Driver:
        assert name == "libnvidia-ml.so.1"
        return self

    def nvmlInit_v2(self) -> int:  # noqa: N802
        return self._init

    def nvmlDeviceGetHandleByIndex_v2(self, index: ctypes.c_uint, device: Any) -> int:  # noqa: N802
        if index.value >= len(self.energy_mj):
            return 2
        device._obj.value = 0x7000 + index.value
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, device: ctypes.c_void_p, energy: Any) -> int:  # noqa: N802
        assert device.value is not None
        energy._obj.value = self.energy_mj[device.value - 0x7000]
        return self.answer


def test_gpus() -> None:
    driver = Driver(5_000, 70_000, 1_500)
    gpus = NvmlGpus((0, 2), driver.load)
    assert gpus.read_j() == 6.5
    driver.energy_mj = [6_000, 0, 2_000]
    assert gpus.read_j() == 8.0
    driver.answer = 15
    assert gpus.read_j() is None


def test_gpus_that_cant_be_asked() -> None:
    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    for indices, load in (((0,), missing), ((0,), Driver(1, init=9).load), ((1,), Driver(1).load)):
        with pytest.raises(Unavailable):
            NvmlGpus(indices, load)
    too_old = Driver(1)
    too_old.answer = 3
    with pytest.raises(Unavailable, match="nvmlDeviceGetTotalEnergyConsumption answers 3"):
        NvmlGpus((0,), too_old.load)


def test_a_sum_is_unknown_if_a_part_is(machine: Machine) -> None:
    machine.zone("intel-rapl:0", "package-0", 0)
    driver = Driver(5_000)
    cpu = RaplMeter(rapl_zones(machine.powercap), CpuShare(VirtualClock(), machine.proc))
    both = SumOfMeters([NvmlGpus((0,), driver.load), cpu])
    machine.set("intel-rapl:0", 2_000_000)
    assert both.read_j() == 7.0
    driver.answer = 15
    assert both.read_j() is None


def test_a_worker_on_gpus_that_tell_nothing_has_no_meter(machine: Machine) -> None:
    """The CPU's part alone would be a wrong number, not a small one."""
    machine.server()
    assert meter_of(machine, VirtualClock(), gpus=(999,)) is None
