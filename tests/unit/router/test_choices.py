"""Several choices of one request: released behind the first, to the same pair, ended together."""

from __future__ import annotations

from pdserve.errors import RowFailed
from pdserve.messages import Abort, StartDecode, StartPrefill
from pdserve.sampling import FinishReason
from tests.unit.router.conversation import A, B, C
from tests.unit.router.scripted import Cluster, virtual


@virtual
async def test_later_choices_wait_for_the_first_and_go_to_its_pair() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        d1 = await cluster.decode("d1")
        await cluster.link(p, d1)
        client = cluster.generate("hello", n=3, max_tokens=2)
        await cluster.settle()
        first, other = (d, d1) if d.got(StartDecode) else (d1, d)
        assert len(first.got(StartDecode)) == 1 and not other.got(StartDecode)
        start = await first.expect(StartDecode)
        first.grant(start)
        p.first(await p.expect(StartPrefill), A)
        first.started(start, A)
        await cluster.settle()
        starts = first.got(StartDecode)
        assert [each.key.choice for each in starts] == [0, 1, 2] and not other.got(StartDecode)
        assert {each.key.seed for each in starts} == {start.key.seed}
        for each in starts[1:]:
            first.grant(each)
            p.first(await p.expect(StartPrefill), B)
            first.started(each, B)
        for each in starts:
            first.tokens(each, 6, C)
            first.finished(each, 7)
        await client.end()
        assert [client.ids(choice) for choice in range(3)] == [[A, C], [B, C], [B, C]]
        assert [client.finished(choice).usage.num_completion_tokens for choice in range(3)] == [2, 2, 2]


@virtual
async def test_a_first_choice_that_ends_at_once_releases_the_others() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        client = cluster.generate("hello", n=2, max_tokens=1)
        for token in (A, B):
            start = await d.expect(StartDecode)
            d.grant(start)
            p.first(await p.expect(StartPrefill), token, FinishReason.LENGTH)
        await client.end()
        assert client.ids(0) == [A] and client.ids(1) == [B]


@virtual
async def test_one_choice_that_fails_for_good_ends_the_request_and_aborts_the_others() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        client = cluster.generate("hello", n=2)
        first = await d.expect(StartDecode)
        d.grant(first)
        p.first(await p.expect(StartPrefill), A)
        d.started(first, A)
        second = await d.expect(StartDecode)
        d.fail(second, RowFailed("NaN logits"))
        await client.end()
        assert isinstance(client.error, RowFailed)
        assert (await d.expect(Abort)).handle == first.handle
