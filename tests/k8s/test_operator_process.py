"""The operator as a process on a real control plane: who leads, what it may do, what it does when the API is away."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio

from deploy.k8s.operator.api import Api, ApiError
from tests.support.kube.client import KubeClient, Refused
from tests.support.kube.control_plane import IS_BUILT
from tests.support.kube.world import (
    CORE,
    DEPLOYMENTS,
    NAMESPACE,
    POOLS,
    SERVICES,
    Operator,
    World,
    running_world,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not IS_BUILT, reason="no control plane: `make k8s-control-plane` builds one"),
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    folder: Path = tmp_path_factory.mktemp("kube")
    async with running_world(folder) as made:
        await made.start_operator()
        await made.create("two", pools={"decode": {"min": 1, "max": 2}})
        await made.settled("two")
        yield made


async def routers(world: World, count: int) -> bool:
    deployments = await world.deployments("two")
    return bool(deployments["router"]["spec"]["replicas"] == count)


async def test_it_may_do_what_its_roles_say_and_no_more(world: World) -> None:
    async with KubeClient(world.plane.connection(world.token)) as operator:
        await operator.ask("GET", SERVICES)
        pod = (await world.pods("two"))[0]["metadata"]["name"]
        for method, path in (
            ("DELETE", f"{CORE}/pods/{pod}"),
            ("DELETE", f"{SERVICES}/two"),
            ("GET", f"{CORE}/secrets"),
            ("GET", "/api/v1/namespaces/default/pods"),
            ("GET", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"),
        ):
            with pytest.raises(Refused) as refused:
                await operator.ask(method, path)
            assert refused.value.status == 403, path
    assert not any(operator.says('"error": "403') for operator in world.operators)


async def test_the_kind_refuses_fills_in_and_prunes(world: World) -> None:
    for path, spec in (
        ("routers", {"replicas": 0}),
        ("pools", {"decode": {"min": 0, "max": 2}}),
        ("upgrade", {"strategy": "Hope"}),
        ("model", ""),
    ):
        with pytest.raises(Refused) as refused:
            await world.client.patch(f"{SERVICES}/two", {"spec": {path: spec}})
        assert refused.value.status == 422, path
    changed = await world.change("two", decoed=3)
    assert "decoed" not in changed["spec"]
    status = await world.client.patch(f"{SERVICES}/two", {"status": {"state": "Hacked"}})
    assert status["status"]["state"] != "Hacked"  # status is a subresource of its own
    (pool, *_) = await world.client.items(POOLS, "app.kubernetes.io/component=decode")
    with pytest.raises(Refused) as refused:
        await world.client.patch(f"{POOLS}/{pool['metadata']['name']}/scale", {"spec": {"replicas": 0}})
    assert refused.value.status == 422


async def test_fields_belong_to_the_operator_and_others_keep_theirs(world: World) -> None:
    name = (await world.deployments("two"))["router"]["metadata"]["name"]
    note = {"metadata": {"annotations": {"someone/note": "mine"}}, "spec": {"revisionHistoryLimit": 9}}
    await world.client.patch(f"{DEPLOYMENTS}/{name}", note)

    async def undone() -> bool:
        found = await world.client.get(f"{DEPLOYMENTS}/{name}")
        assert found["metadata"]["annotations"]["someone/note"] == "mine"
        return bool(found["spec"]["revisionHistoryLimit"] == 2)

    await world.until("its own field is back", undone)
    managers = (await world.client.get(f"{DEPLOYMENTS}/{name}"))["metadata"]["managedFields"]
    assert ("pdserve-operator", "Apply") in {(each["manager"], each["operation"]) for each in managers}


async def test_who_read_too_early_is_told_so(world: World) -> None:
    connection = world.plane.connection(world.token)
    async with Api(lambda: connection) as api:
        place = ("coordination.k8s.io/v1", "Lease", NAMESPACE)
        manifest = {
            "apiVersion": place[0],
            "kind": "Lease",
            "metadata": {"name": "t", "namespace": NAMESPACE},
        }
        first = await api.create(manifest | {"spec": {"holderIdentity": "a"}})
        await api.replace(first)  # nothing differs: the version stays
        second = await api.get(*place, "t")
        assert second is not None
        await api.replace(second | {"spec": {"holderIdentity": "b"}})
        with pytest.raises(ApiError) as stale:
            await api.replace(first | {"spec": {"holderIdentity": "c"}})
        assert stale.value.status == 409
        with pytest.raises(ApiError) as exists:
            await api.create(manifest)
        assert exists.value.status == 409


async def test_a_leader_without_an_api_ends_and_its_next_life_goes_on_and_requests_never_noticed(
    world: World,
) -> None:
    async with world.load("two", 2) as answered:
        await world.plane.stop("kube-apiserver")
        assert await world.operators[-1].ended() == 1  # before its Lease does
        seen = answered[0]

        async def more() -> bool:
            return answered[0] > seen + 2

        await world.until("answers without an API", more)
        await world.plane.start("kube-apiserver")
        await world.plane.wait_ready()
        await world.start_operator()
        await world.change("two", routers={"replicas": 2})
        await world.until("it goes on", lambda: routers(world, 2))
    await world.settled("two")


async def test_another_operator_takes_over_from_one_that_is_lost(world: World) -> None:
    first, second = world.operators[-1], await world.start_operator()
    await world.until("the second waits", partial(says, second, "leader.waiting"))
    await first.kill()
    await world.change("two", routers={"replicas": 1})
    await world.until("the second acts", lambda: routers(world, 1))
    assert await says(second, "leader.acquired")
    await world.settled("two")


async def test_one_that_is_asked_to_end_hands_over_at_once(world: World) -> None:
    second, third = world.operators[-1], await world.start_operator()
    await world.until("the third waits", partial(says, third, "leader.waiting"))
    assert await second.stop() == 0
    await world.until("the third leads", partial(says, third, "leader.acquired"))
    await world.change("two", routers={"replicas": 2})
    await world.until("the third acts", lambda: routers(world, 2))


async def says(operator: Operator, event: str) -> bool:
    return operator.says(f'"event": "{event}"')


async def test_a_pool_with_targets_follows_the_load_and_says_why(world: World) -> None:
    small = {"engine": {"kind": "fake", "num_blocks": 32}, "timeouts": {"heartbeat_s": 0.2}}
    scaling = {"scaling": {"interval_s": 0.5, "grow_after_s": 1.0, "cool_down_down_s": 5.0}}
    await world.create(
        "three",
        pools={"decode": {"min": 1, "max": 2}},
        targets={"ttftSeconds": 0.5, "itlSeconds": 0.08},
        config={**small, **scaling},
    )
    await world.settled("three")

    async def decode(count: int) -> bool:
        deployment = (await world.deployments("three"))["decode"]
        return bool(deployment["status"].get("readyReplicas", 0) == deployment["spec"]["replicas"] == count)

    async with world.load("three", 8):
        await world.until("a second decode worker", partial(decode, 2))
    assert "decode" in (await world.client.get(f"{SERVICES}/three"))["status"]["scaling"]
    await world.until("one is enough again", partial(decode, 1))
