"""Rows 6, 7, 8, 10 of failures.md: the decode worker, the link, or bytes on it are lost."""

from __future__ import annotations

from structlog.testing import capture_logs

from pdserve.errors import (
    KvCorrupt,
    Stale,
    WorkerLost,
)
from pdserve.messages import (
    Abort,
    Phase,
    StartDecode,
    StartPrefill,
)
from pdserve.sampling import FinishReason
from tests.unit.router.conversation import A, B, C, D, serve, until_prefill, until_running
from tests.unit.router.scripted import Cluster, load, virtual

# --- rows 6, 7, 8: the decode worker, or the link


@virtual
async def test_decode_dies_before_the_hand_off_and_the_same_prefill_worker_is_taken() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        d1 = await cluster.decode("d1")
        await cluster.link(p, d1)
        slower = await cluster.prefill("p1")
        await cluster.link(slower, d, d1)
        client = cluster.generate("h" * 320, max_tokens=1)
        await cluster.settle()
        first, second = (d, d1) if d.got(StartDecode) else (d1, d)
        start = await first.expect(StartDecode)
        worker = p if start.source == p.ref else slower
        first.grant(start)
        worker.progress(await worker.expect(StartPrefill), Phase.PREFILLING, 320)
        await cluster.settle()
        first.die()
        again = await second.expect(StartDecode)
        assert again.source == worker.ref
        assert worker.got(Abort)[0].handle == start.handle
        client.generation.close()


@virtual
async def test_what_a_lost_attempt_had_queued_does_not_speak_against_the_worker_that_keeps_its_blocks() -> (
    None
):
    """Its last report still counts the prompt that it was computing."""
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        d1 = await cluster.decode("d1")
        await cluster.link(p, d1)
        other = await cluster.prefill("p1")
        await cluster.link(other, d, d1)
        client = cluster.generate("h" * 3200, max_tokens=1)
        await cluster.settle()
        first, second = (d, d1) if d.got(StartDecode) else (d1, d)
        start = await first.expect(StartDecode)
        worker = p if start.source == p.ref else other
        first.grant(start)
        prefill = await worker.expect(StartPrefill)
        worker.progress(prefill, Phase.PREFILLING, 320)
        worker.say(load(num_queued_tokens=2880, num_running=1))
        await cluster.settle()
        first.die()
        assert (await second.expect(StartDecode)).source == worker.ref
        client.generation.close()


@virtual
async def test_decode_dies_in_mid_stream_and_the_stream_goes_on_at_the_next_index() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        d1 = await cluster.decode("d1")
        await cluster.link(p, d1)
        client = cluster.generate("hello", max_tokens=4)
        await cluster.settle()
        first, second = (d, d1) if d.got(StartDecode) else (d1, d)
        start = await first.expect(StartDecode)
        first.grant(start)
        p.first(await p.expect(StartPrefill), A)
        first.started(start, A)
        first.tokens(start, 6, B)
        await cluster.settle()
        first.die()
        again = await second.expect(StartDecode)
        assert again.token_ids == (*b"hello", A, B) and again.key == start.key
        assert again.num_prompt_tokens == 5
        await serve(p, second, C, D, start=again)
        await client.end()
        assert client.ids() == [A, B, C, D] and client.text() == "abcd"
        finished = client.finished()
        assert finished.num_attempts == 2 and finished.usage.num_completion_tokens == 4
        assert finished.decode_worker == second.ref.id


@virtual
async def test_a_sequence_whose_last_token_has_come_is_not_replayed() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        client, start = await until_running(cluster, p, d, max_tokens=3)
        d.tokens(start, 7, C)
        await cluster.settle()
        d.die()
        await client.end()
        assert client.error is None and client.ids() == [A, B, C]


@virtual
async def test_a_link_that_breaks_is_a_new_attempt_and_not_more_than_max_attempts() -> None:
    with capture_logs() as logs:
        await _break_the_link_until_it_ends()
    (attempts,) = (entry["attempts"] for entry in logs if entry["event"] == "request.finished")
    assert attempts == 3, "as many as there were"


async def _break_the_link_until_it_ends() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        client = cluster.generate("hello")
        for _ in range(3):
            start = await d.expect(StartDecode)
            d.grant(start)
            await p.expect(StartPrefill)
            d.fail(start, WorkerLost("the link to P ended"))
        await client.end()
        assert isinstance(client.error, WorkerLost) and client.error.fields["attempts"] == 3


@virtual
async def test_another_pair_is_preferred_after_a_failure() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        d1 = await cluster.decode("d1")
        await cluster.link(p, d1)
        client = cluster.generate("hello")
        await cluster.settle()
        first, second = (d, d1) if d.got(StartDecode) else (d1, d)
        start = await first.expect(StartDecode)
        first.fail(start, Stale("another generation"))
        await second.expect(StartDecode)
        client.generation.close()


# --- row 10: corrupt bytes


@virtual
async def test_corrupt_bytes_are_a_new_attempt_counted_with_the_peer_s_name() -> None:
    async with Cluster() as cluster:
        p, d = await cluster.pair()
        client, start, _ = await until_prefill(cluster, p, d, max_tokens=1)
        d.fail(start, KvCorrupt("checksum"))
        again = await d.expect(StartDecode)
        d.grant(again)
        p.first(await p.expect(StartPrefill), A, FinishReason.LENGTH)
        await client.end()
        assert client.finished().num_attempts == 2
        value = cluster.app.metrics.registry.get_sample_value(
            "pdserve_kv_corrupt_total", {"prefill_worker": "p0"}
        )
        assert value == 1
