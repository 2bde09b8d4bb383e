"""A router's books of a worker, and bugs in its own handling of one."""

from __future__ import annotations

from tests.unit.router.conversation import A, B, serve
from tests.unit.router.scripted import Cluster, load, virtual


@virtual
async def test_a_booking_for_an_attempt_that_does_not_run_ends_the_session() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        member = cluster.app.fleet.get("p0")
        assert member is not None and member.books_add_up
        member.credit.hold(77, 100)
        p.say(load())
        await p.expect_end(2.0)
        assert cluster.app.fleet.get("p0") is None and d.lost is None
        registry = cluster.app.metrics.registry
        assert registry.get_sample_value("pdserve_books_wrong_total", {"book": "bookings"}) == 1


@virtual
async def test_the_books_add_up_after_a_request() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        client = cluster.generate(max_tokens=2)
        await serve(p, d, A, B)
        await client.end()
        for member in cluster.app.fleet.members:
            assert member.books_add_up and not member.legs
            assert (member.accounting.num_assigned, member.credit.num_held) == (0, 0)
