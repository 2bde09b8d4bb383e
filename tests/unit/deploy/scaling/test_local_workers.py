"""Which child processes are started and drained: names, seats, order."""

from __future__ import annotations

from deploy.local.plan import ProcessSpec
from deploy.local.workers import LocalWorkers
from deploy.scaling.targets import Counts
from pdserve.messages import Role


def make(role: str, name: str, seat: int) -> ProcessSpec:
    return ProcessSpec(role=role, id=name, command=(str(seat),), metrics="", environ={})


class Processes:
    """A supervisor whose workers drain until they are let go."""

    def __init__(self, *specs: ProcessSpec) -> None:
        self.specs = {spec.id: spec for spec in specs}
        self.draining: list[str] = []

    @property
    def worker_ids(self) -> tuple[str, ...]:
        return tuple(self.specs)

    def add(self, spec: ProcessSpec) -> None:
        assert spec.id not in self.specs
        self.specs[spec.id] = spec

    def remove(self, worker_id: str) -> None:
        self.draining.append(worker_id)

    def replace(self, spec: ProcessSpec) -> None:
        self.specs[spec.id] = spec

    def gone(self) -> None:
        for worker_id in self.draining:
            del self.specs[worker_id]
        self.draining.clear()

    @property
    def seats(self) -> dict[str, str]:
        return {spec.id: spec.command[0] for spec in self.specs.values()}


class Orders:
    def __init__(self) -> None:
        self.given: list[tuple[str, Role]] = []

    async def __call__(self, worker_id: str, role: Role) -> None:
        self.given.append((worker_id, role))


def start() -> tuple[Processes, Orders, LocalWorkers]:
    first = [make("prefill", "prefill-0", 0), make("decode", "decode-0", 1)]
    processes, orders = Processes(*first), Orders()
    return processes, orders, LocalWorkers(processes, first, make, orders)


async def test_grown_workers_get_names_and_seats_of_their_own() -> None:
    processes, _, workers = start()
    await workers.scale(Counts(prefill=2, decode=3), {})
    assert workers.counts == Counts(prefill=2, decode=3)
    assert processes.seats == {
        "prefill-0": "0", "decode-0": "1", "prefill-1": "2", "decode-1": "3", "decode-2": "4"
    }  # fmt: skip


async def test_the_least_loaded_drain_after_those_that_are_not_ready() -> None:
    processes, _, workers = start()
    await workers.scale(Counts(prefill=1, decode=5), {})
    await workers.scale(Counts(prefill=1, decode=2), {Role.DECODE: ("decode-1", "decode-0", "decode-2")})
    assert processes.draining == ["decode-4", "decode-3", "decode-1"]


async def test_neither_name_nor_seat_is_free_before_its_worker_has_ended() -> None:
    processes, _, workers = start()
    await workers.scale(Counts(prefill=1, decode=2), {})
    await workers.scale(Counts(prefill=1, decode=1), {Role.DECODE: ("decode-1", "decode-0")})
    await workers.scale(Counts(prefill=1, decode=2), {})
    assert processes.seats["decode-2"] == "3"
    processes.gone()
    await workers.scale(Counts(prefill=1, decode=3), {})
    assert processes.seats["decode-1"] == "2"


async def test_a_changed_role_is_kept_over_a_restart_and_counted_at_once() -> None:
    processes, orders, workers = start()
    await workers.scale(Counts(prefill=1, decode=2), {})
    await workers.set_role("decode-1", Role.PREFILL)
    assert orders.given == [("decode-1", Role.PREFILL)]
    assert workers.counts == Counts(prefill=2, decode=1)
    assert (processes.specs["decode-1"].role, processes.seats["decode-1"]) == ("prefill", "2")
    await workers.scale(Counts(prefill=2, decode=2), {})
    assert "decode-2" in processes.specs
