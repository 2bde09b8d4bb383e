"""The life of a service on a real control plane: made, asked, scaled, upgraded under load, repaired, drained."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from pdserve.wire_version import WIRE_VERSION
from tests.support.kube.client import Object
from tests.support.kube.control_plane import IS_BUILT
from tests.support.kube.world import CORE, DEPLOYMENTS, POOLS, SERVICES, World, running_world

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not IS_BUILT, reason="no control plane: `make k8s-control-plane` builds one"),
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """With a service that serves: one router, one prefill worker, one or two decode workers."""
    folder: Path = tmp_path_factory.mktemp("kube")
    async with running_world(folder) as made:
        await made.start_operator()
        await made.create("one", pools={"decode": {"min": 1, "max": 2}})
        await made.settled("one")
        yield made


def role(pod: Object) -> str:
    return str(pod["metadata"]["labels"]["app.kubernetes.io/component"])


async def test_a_service_answers_and_says_so(world: World) -> None:
    await world.ask("one")
    service = await world.client.get(f"{SERVICES}/one")
    assert service["status"]["state"] == "Ready"
    assert service["status"]["pools"]["decode"] == {"replicas": 1, "ready": 1, "shown": "1/1"}
    assert service["spec"]["upgrade"] == {
        "strategy": "Auto",
        "progressSeconds": 600,
    }  # by the kind's defaults
    assert (await world.condition("one", "Degraded"))["status"] == "False"


async def test_the_scale_subresource_grows_and_shrinks_a_pool(world: World) -> None:
    name = (await world.deployments("one"))["decode"]["metadata"]["name"]

    async def busy_is_marked() -> bool:
        """This Kubernetes doesn't look at it yet; later ones let the pod with the lowest cost go."""
        notes = [pod["metadata"].get("annotations", {}) for pod in await world.pods("one")]
        return any(int(each.get("controller.kubernetes.io/pod-deletion-cost", 0)) > 0 for each in notes)

    async with world.load("one", 6) as answered:
        await world.client.patch(f"{POOLS}/{name}/scale", {"spec": {"replicas": 2}})
        await world.until("two decode workers", lambda: ready(world, "decode", 2))
        pool = await world.client.get(f"{POOLS}/{name}/scale")
        assert pool["status"]["replicas"] == 2 and "component=decode" in pool["status"]["selector"]
        await world.client.patch(f"{POOLS}/{name}/scale", {"spec": {"replicas": 9}})  # above the spec's max
        assert not await busy_is_marked()
        await world.client.patch(f"{POOLS}/{name}/scale", {"spec": {"replicas": 1}})
        await world.until("those with something to do cost something", busy_is_marked)
        await world.until("one decode worker", lambda: only(world, "decode", 1))
    assert answered[0] > 0
    pods = [pod for pod in await world.pods("one") if role(pod) == "decode"]
    assert len(pods) == 1


async def test_a_number_that_the_service_gives_is_not_scaled_by_hand(world: World) -> None:
    name = (await world.deployments("one"))["prefill"]["metadata"]["name"]
    await world.client.patch(f"{POOLS}/{name}/scale", {"spec": {"replicas": 3}})

    async def undone() -> bool:
        events = await world.events("ScaleUndone")
        return any("spec.pools.prefill.replicas" in message for message in events)

    await world.until("the event", undone)
    assert (await world.client.get(f"{POOLS}/{name}"))["spec"]["replicas"] == 1


async def test_edits_by_hand_are_undone(world: World) -> None:
    deployments = await world.deployments("one")
    name = deployments["router"]["metadata"]["name"]
    before = deployments["router"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    await world.client.patch(
        f"{DEPLOYMENTS}/{name}", {"spec": {"template": {"spec": {"terminationGracePeriodSeconds": 4000}}}}
    )
    await world.client.patch(f"{CORE}/services/one", {"spec": {"selector": {"pdserve.dev/set": "none"}}})
    await world.client.ask("DELETE", f"{POOLS}/{deployments['prefill']['metadata']['name']}")

    async def repaired() -> bool:
        now = await world.deployments("one")
        if (
            "prefill" not in now
            or now["prefill"]["metadata"]["uid"] == deployments["prefill"]["metadata"]["uid"]
        ):
            return False
        grace = now["router"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        return bool(grace == before and world.targets("one"))

    await world.until("repaired", repaired)
    await world.settled("one")
    await world.ask("one")


async def test_a_killed_worker_comes_back_and_no_request_fails(world: World) -> None:
    async with world.load("one") as answered:
        await world.until("answers", lambda: more_than(answered, 2))
        (decode,) = world.kubelet.of_role("decode")
        decode.kill()
        await world.until("its next life", lambda: ready(world, "decode", 1))
        seen = answered[0]
        await world.until("more answers", lambda: more_than(answered, seen + 2))
    assert decode.num_restarts == 1


async def test_an_upgrade_replaces_every_pod_in_order_and_no_request_fails(world: World) -> None:
    before = {pod["metadata"]["name"] for pod in await world.pods("one")}
    order: list[str] = []
    (decode,) = world.kubelet.of_role("decode")
    assert f'"wire": "{WIRE_VERSION[0]}.{WIRE_VERSION[1] - 1}"' in decode.log.read_text()

    async def upgraded() -> bool:
        for pod in await world.pods("one"):
            if pod["metadata"]["name"] not in before and role(pod) not in order:
                order.append(role(pod))
        moving = await world.condition("one", "Progressing")
        return len(order) == 3 and moving.get("status") == "False"

    async with world.load("one") as answered:
        await world.until("answers", lambda: more_than(answered, 2))
        await world.change("one", images={"router": "router:2", "worker": "worker:2"})
        await world.until("upgraded", upgraded, limit_s=240)
        seen = answered[0]
        await world.until("more answers", lambda: more_than(answered, seen + 2))
    assert order == ["decode", "prefill", "router"]
    await world.until("the old ones have gone", lambda: all_new(world, before))
    images = {pod["spec"]["containers"][0]["image"] for pod in await world.pods("one")}
    assert images == {"router:2", "worker:2"}
    (decode,) = world.kubelet.of_role("decode")
    assert f'"wire": "{WIRE_VERSION[0]}.{WIRE_VERSION[1]}"' in decode.log.read_text()


async def test_another_block_size_makes_a_second_set_and_no_request_fails(world: World) -> None:
    before = {pod["metadata"]["name"] for pod in await world.pods("one")}
    old_set = (await world.client.get(f"{SERVICES}/one"))["status"]["set"]

    async def switched() -> bool:
        service = await world.client.get(f"{SERVICES}/one")
        moving = await world.condition("one", "Progressing")
        return bool(service["status"]["set"] != old_set and moving.get("status") == "False")

    async with world.load("one") as answered:
        await world.change("one", config={"engine": {"kind": "fake", "num_blocks": 256, "block_size": 32}})
        await world.until("switched", switched, limit_s=240)
        seen = answered[0]
        await world.until("more answers", lambda: more_than(answered, seen + 2))
    assert not before & {pod["metadata"]["name"] for pod in await world.pods("one")}
    left = await world.client.items(f"{CORE}/configmaps", "app.kubernetes.io/instance=one")
    assert len(left) == 1
    assert await world.events("Switched")


async def test_a_mistake_in_the_spec_changes_nothing_and_is_named(world: World) -> None:
    before = {pod["metadata"]["name"] for pod in await world.pods("one")}
    good = (await world.client.get(f"{SERVICES}/one"))["spec"]["config"]
    await world.change("one", config={"engine": {"blok_size": 16}})

    async def told() -> str:
        found = await world.condition("one", "Degraded")
        return str(found["message"]) if found.get("reason") == "InvalidSpec" else ""

    message = await world.until("the mistake is told", told)
    assert "blok_size" in message and "block_size" in message
    assert before == {pod["metadata"]["name"] for pod in await world.pods("one")}
    await world.change("one", config={"engine": {"blok_size": None}})
    await world.change("one", config=good)
    await world.settled("one")


async def test_an_image_that_cant_be_pulled_is_named_and_the_old_pods_serve(world: World) -> None:
    world.kubelet.unpullable.add("worker:none")
    await world.change("one", images={"worker": "worker:none"})

    async def told() -> str:
        found = await world.condition("one", "Degraded")
        return str(found["message"]) if found.get("reason") == "ImagePullBackOff" else ""

    assert "worker:none" in await world.until("the image is told", told)
    assert (await world.condition("one", "Available"))["status"] == "True"
    await world.ask("one")
    await world.change("one", images={"worker": "worker:2"})
    await world.settled("one")


async def test_a_deleted_service_finishes_its_requests(world: World) -> None:
    async with world.load("one", 2) as answered:
        await world.until("answers", lambda: more_than(answered, 1))
        world.stop_asking()
        await world.delete("one")

    async def gone() -> bool:
        return await world.client.get(f"{SERVICES}/one") is None

    await world.until("deleted", gone)
    assert await world.pods("one") == []
    assert world.kubelet.pods == {}

    async def collected() -> bool:
        names = ("services", "configmaps", "secrets")
        left = [
            await world.client.items(f"{CORE}/{each}", "app.kubernetes.io/instance=one") for each in names
        ]
        return not any(left)

    await world.until("what it owned is collected", collected)


async def ready(world: World, name: str, count: int) -> bool:
    deployment = (await world.deployments("one"))[name]
    return bool(deployment["status"].get("readyReplicas", 0) == count)


async def only(world: World, name: str, count: int) -> bool:
    pods = [pod for pod in await world.pods("one") if role(pod) == name]
    return len(pods) == count and await ready(world, name, count)


async def all_new(world: World, before: set[str]) -> bool:
    return not before & {pod["metadata"]["name"] for pod in await world.pods("one")}


async def more_than(answered: list[int], count: int) -> bool:
    return answered[0] > count
