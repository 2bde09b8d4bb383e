"""The scaling core on Kubernetes objects: pools follow the load by their scale, within the spec, with a reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from deploy.k8s.operator.api import ApiError
from deploy.k8s.operator.manifests import ServiceOwner
from deploy.k8s.operator.scaling import PoolScaler
from deploy.k8s.operator.spec import ServiceSpec
from deploy.k8s.operator.victims import costs
from pdserve.block_messages import BlockCounts
from pdserve.status import ClusterStatus, QueueStatus, WorkerStatus
from tests.support.virtual_clock import VirtualClock
from tests.unit.deploy.operator.services import OWNER, spec

NUM_BLOCKS = 100


def worker(name: str, role: str, *, used: int = 0, running: int = 0) -> WorkerStatus:
    return WorkerStatus(
        id=name,
        role=role,
        epoch="1",
        role_generation=1,
        state="up",
        blocks=BlockCounts(free=NUM_BLOCKS - used, cached=0, granted=0, owned=used, quarantined=0),
        num_running=running,
        num_waiting=0,
        num_queued_tokens=0,
        num_cache_hit_tokens=0,
        num_cache_query_tokens=0,
        metrics_address="",
        numerics="",
        num_steps=1,
    )


class FakeScales:
    """Takes the scales that are written. refuse: the server says no."""

    def __init__(self) -> None:
        self.written: list[tuple[str, int]] = []
        self.refuse = False

    async def scale(self, manifest: dict[str, Any], replicas: int) -> None:
        if self.refuse:
            raise ApiError(500, "no")
        self.written.append((manifest["metadata"]["name"], replicas))


class World:
    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.scales = FakeScales()
        self.used = 0
        self.silent = False
        self.pools: dict[str, dict[str, Any]] = {
            role: {"metadata": {"name": role}, "spec": {"replicas": 1}} for role in ("prefill", "decode")
        }
        self.scaler = PoolScaler(self.scales, self._ask, self.clock)
        self.spec = spec(
            pools={"decode": {"min": 1, "max": 3}}, targets={"ttftSeconds": 0.5, "itlSeconds": 0.08}
        )

    async def _ask(
        self, owner: ServiceOwner, spec: ServiceSpec, pods: Sequence[Any]
    ) -> list[ClusterStatus | None]:
        if self.silent:
            return [None]
        count = self.pools["decode"]["spec"]["replicas"]
        decode = [worker(f"d{n}", "decode", used=self.used, running=self.used // 9) for n in range(count)]
        status = ClusterStatus(
            router_id="r",
            draining=False,
            workers=(worker("p0", "prefill"), *decode),
            pairs=(),
            queue=QueueStatus(num_waiting=0, num_waiting_tokens=0, num_running=0, limit=10),
        )
        return [status]

    async def look(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        """Passes, a second apart."""
        end_s = self.clock.now_s() + seconds
        while self.clock.now_s() < end_s and not until():
            await self.scaler.look(OWNER, self.spec, [], self.pools)
            self.clock.advance(1.0)


@pytest.fixture
def world() -> World:
    return World()


async def test_a_full_pool_grows_within_its_range_and_shrinks_when_it_is_idle(world: World) -> None:
    world.used = 95
    await world.look(300)
    assert world.pools["decode"]["spec"]["replicas"] == 3
    assert "decode" in world.scaler.why
    world.used = 0
    await world.look(1500)
    assert world.pools["decode"]["spec"]["replicas"] == 1
    assert {name for name, _ in world.scales.written} == {"decode"}  # the prefill pool has a fixed number


async def test_nothing_is_decided_while_no_router_answers(world: World) -> None:
    world.used, world.silent = 95, True
    await world.look(300)
    assert world.scales.written == []
    assert world.scaler.why == "no router answers, so nothing is decided"


async def test_what_the_server_refuses_is_told_and_wanted_again(world: World) -> None:
    world.used, world.scales.refuse = 95, True
    await world.look(60)
    assert world.pools["decode"]["spec"]["replicas"] == 1
    world.scales.refuse = False
    await world.look(300, lambda: bool(world.scales.written))
    assert world.pools["decode"]["spec"]["replicas"] > 1


def test_another_target_is_no_other_configuration_of_pods() -> None:
    first = spec(targets={"ttftSeconds": 0.5, "itlSeconds": 0.08})
    assert first.settings == spec(targets={"ttftSeconds": 1.5, "itlSeconds": 0.08}).settings
    assert first.config.scaling.ttft_target_s == 0.5
    assert not first.config.scaling.change_roles


def test_pods_with_the_least_to_do_go_first() -> None:
    pods = [
        {"metadata": {"name": name, "annotations": {"controller.kubernetes.io/pod-deletion-cost": cost}}}
        for name, cost in (("busy", "0"), ("idle", "4"), ("same", "2"), ("unknown", "0"))
    ]
    workers = (
        worker("busy", "decode", running=3),
        worker("idle", "decode"),
        worker("same", "decode", running=2),
    )
    status = ClusterStatus(
        router_id="r",
        draining=False,
        workers=workers,
        pairs=(),
        queue=QueueStatus(num_waiting=0, num_waiting_tokens=0, num_running=0, limit=10),
    )
    assert costs(pods, [None, status]) == {"busy": "3", "idle": "0"}
