"""Who asks: a key's tenant sees, aborts and explains its own requests only, and shares no cache with others."""

from __future__ import annotations

import random

import pytest

from pdserve.errors import PermissionDenied, RequestCancelled, Unauthenticated, UnknownRequest
from pdserve.messages import StartDecode
from pdserve.service.api_keys import ApiKey, digest_of, draw_key
from pdserve.status import ScalingNote
from router.callers import Caller, Callers
from router.metrics import MAX_TENANTS
from tests.support.virtual_clock import VirtualClock
from tests.unit.router.scripted import Cluster, config, virtual

A, B, ADMIN = (draw_key(random.Random(seed)) for seed in range(3))
KEYS = {
    A[0]: ApiKey(tenant="acme", sha256=digest_of(A[1])),
    B[0]: ApiKey(tenant="bigco", sha256=digest_of(B[1]), max_priority=5),
    ADMIN[0]: ApiKey(tenant="ops", sha256=digest_of(ADMIN[1]), admin=True),
}


def bearer(key: tuple[str, str]) -> list[tuple[str, str]]:
    return [("user-agent", "x"), ("authorization", f"Bearer {key[1]}")]


def ignore(tenant: str, limit: str) -> None:
    """Of tests about something else."""


def callers_of(cluster: Cluster) -> tuple[Caller, Caller, Caller]:
    cluster.app.callers.replace(KEYS)
    a, b, admin = (cluster.app.callers.admit(bearer(key)) for key in (A, B, ADMIN))
    return a, b, admin


def test_who_is_known_and_who_is_not() -> None:
    clock = VirtualClock()
    callers = Callers(KEYS, clock, ignore)
    assert callers.admit(bearer(A)).tenant == "acme"
    other = draw_key(random.Random(9))
    for metadata in (
        None,
        [],
        bearer(other),
        [("authorization", A[1])],
        [("authorization", f"Basic {A[1]}")],
    ):
        with pytest.raises(Unauthenticated, match=r"^no valid API key$"):
            callers.admit(metadata)
    callers.replace({B[0]: KEYS[B[0]]})
    with pytest.raises(Unauthenticated):
        callers.admit(bearer(A))
    assert callers.admit(bearer(B)).tenant == "bigco"


def test_without_keys_everybody_may_ask_and_no_key_makes_an_operator() -> None:
    callers = Callers(None, VirtualClock(), ignore)
    assert callers.admit([]) is callers.everybody and callers.everybody.sees_all
    assert not callers.admit_operator([])
    with pytest.raises(Unauthenticated):
        callers.admit_operator(bearer(ADMIN))


def test_only_an_admins_key_makes_an_operator() -> None:
    callers = Callers(KEYS, VirtualClock(), ignore)
    assert callers.admit_operator(bearer(ADMIN)) and not callers.admit_operator([])
    with pytest.raises(PermissionDenied):
        callers.admit_operator(bearer(A))
    with pytest.raises(Unauthenticated):
        callers.admit_operator(bearer(draw_key(random.Random(9))))


def test_what_a_key_has_used_up_stays_so_when_the_file_changes() -> None:
    callers = Callers(KEYS, VirtualClock(), ignore)
    before = callers.admit(bearer(A))
    callers.replace(KEYS)
    assert callers.admit(bearer(A)).limits is before.limits


@virtual
async def test_a_tenant_aborts_and_sees_its_own_requests_only() -> None:
    async with Cluster() as cluster:
        await cluster.pair()
        a, b, admin = callers_of(cluster)
        of_a, of_b = (
            cluster.generate(caller=a, request_id="r"),
            cluster.generate(caller=b, request_id="r"),
        )  # both may choose this name
        cluster.generate(caller=b, request_id="only-b")
        await cluster.settle()
        with pytest.raises(UnknownRequest) as none:
            cluster.app.abort("only-b", a)
        with pytest.raises(UnknownRequest) as no_such:
            cluster.app.abort("no-such", a)
        assert str(none.value).replace("only-b", "no-such") == str(no_such.value)

        note = ScalingNote(num_prefill=1, num_decode=1, why="at ease")
        cluster.app.operators.scaling.note(note)
        seen = cluster.app.status(explain=True, caller=a)
        assert [each.request_id for each in seen.placements] == ["r"]
        assert (
            not seen.workers
            and not seen.pairs
            and seen.scaling is None
            and seen.figures.num_prompt_tokens == 0
        )
        assert (seen.queue.num_running, seen.queue.num_waiting) == (1, 0)
        all_seen = cluster.app.status(explain=True, caller=admin)
        assert sorted(each.request_id for each in all_seen.placements) == ["only-b", "r", "r"]
        assert len(all_seen.workers) == 2 and all_seen.queue.num_running == 3

        cluster.app.abort("r", a)
        await cluster.settle()
        assert isinstance(of_a.error, RequestCancelled) and of_b.error is None
        cluster.app.abort("only-b", admin)
        cluster.app.abort("r", admin)
        await cluster.settle()
        assert isinstance(of_b.error, RequestCancelled)


@virtual
async def test_tenants_share_no_cache_entries() -> None:
    assert await salts_used(shares=False) == ["acme/", "acme/s", "bigco/s"]


@virtual
async def test_tenants_share_them_if_they_are_told_to() -> None:
    assert await salts_used(shares=True) == ["", "s", "s"]


async def salts_used(*, shares: bool) -> list[str]:
    """By three requests, of one and the other tenant."""
    async with Cluster(config({"tenants_share_cache": shares})) as cluster:
        _, decode = await cluster.pair()
        a, b, _ = callers_of(cluster)
        for caller, salt in ((a, ""), (a, "s"), (b, "s")):
            cluster.generate(caller=caller, cache_salt=salt)
        await cluster.settle()
        return [start.cache_salt for start in decode.got(StartDecode)]


@virtual
async def test_a_priority_above_the_keys_own_is_refused() -> None:
    async with Cluster() as cluster:
        await cluster.pair()
        a, b, _ = callers_of(cluster)
        cluster.generate(caller=b, priority=5)
        for caller, priority in ((a, 1), (b, 6)):
            with pytest.raises(PermissionDenied, match=f"limit={caller.max_priority}"):
                cluster.generate(caller=caller, priority=priority)


@virtual
async def test_figures_of_tenants_are_bounded() -> None:
    async with Cluster() as cluster:
        tenants = cluster.app.metrics.tenants
        for number in range(3 * MAX_TENANTS):
            tenants.ended(f"t{number}", "OK", 5, 2)
            tenants.limited(f"t{number}", "max_concurrent")
        tenants.ended("", "OK", 5, 2)
        shown = {
            sample.labels["tenant"]
            for family in cluster.app.metrics.registry.collect()
            for sample in family.samples
            if "tenant" in sample.labels
        }
        assert len(shown) == MAX_TENANTS + 1 and "others" in shown
        value = cluster.app.metrics.registry.get_sample_value
        assert (
            value("pdserve_tenant_tokens_total", {"tenant": "others", "kind": "prompt"}) == 10 * MAX_TENANTS
        )
