"""The router's tokenizer: read once, and before anybody is served, since reading it holds the interpreter."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from pdserve.messages import (
    Role,
    StartDecode,
    StartPrefill,
    TokenizerFile,
    Welcome,
)
from pdserve.sampling import FinishReason
from pdserve.tokenizer import Tokenizer
from tests.unit.router.scripted import Cluster, ScriptedWorker, hello, virtual

T = TypeVar("T")


class HeldWork:
    """Does nothing before it is let go; counts what it did."""

    def __init__(self) -> None:
        self.let_go = asyncio.Event()
        self.num_begun = 0

    async def run(self, call: Callable[[], T], /) -> T:
        self.num_begun += 1
        await self.let_go.wait()
        return call()


def send_tokenizer(worker: ScriptedWorker, tokenizer: Tokenizer) -> None:
    last = len(tokenizer.files) - 1
    for index, (name, content) in enumerate(tokenizer.files.items()):
        worker.say(TokenizerFile(name, content, index == last))


@virtual
async def test_nobody_is_served_before_the_tokenizer_and_its_vocabulary_are_read_once() -> None:
    work = HeldWork()
    async with Cluster(tokenizer=False, work=work) as cluster:
        p, d = await cluster.pair()
        for worker in (p, d):
            assert worker.got(Welcome)[0].wants_tokenizer
            send_tokenizer(worker, Tokenizer.fake())
        await cluster.advance(10)
        assert work.num_begun == 1 and cluster.app.text.is_loading
        assert not cluster.app.fleet.topology.missing
        assert (cluster.serving, cluster.app.ready) == ([], False)
        client = cluster.generate("hello", max_tokens=1)
        await cluster.settle()
        assert not d.got(StartDecode)
        work.let_go.set()
        await cluster.settle()
        assert work.num_begun == 2  # the tokenizer, and its vocabulary
        assert (cluster.serving, cluster.app.ready) == ([True], True)
        d.grant(await d.expect(StartDecode))
        p.first(await p.expect(StartPrefill), 65, FinishReason.LENGTH)
        await client.end()
        assert client.ids() == [65]


@virtual
async def test_a_router_with_a_model_of_its_own_opens_when_its_vocabulary_is_read() -> None:
    work = HeldWork()
    opened: list[bool] = []

    async def open_and_close() -> None:
        async with Cluster(work=work) as cluster:
            opened.append(cluster.app.ready)

    running = asyncio.create_task(open_and_close())
    await asyncio.sleep(1.0)
    assert work.num_begun == 1 and not opened
    work.let_go.set()
    await running
    assert opened == [True]


@virtual
async def test_the_tokenizer_of_a_model_that_has_gone_serves_nobody() -> None:
    other = Tokenizer.fake(300)
    async with Cluster(tokenizer=False) as cluster:
        first = await cluster.join(hello("b0", Role.BOTH))
        send_tokenizer(first, Tokenizer.fake())
        await cluster.settle()
        first.die()
        await cluster.settle()
        second = await cluster.join(
            hello("b1", Role.BOTH, tokenizer_fingerprint=other.fingerprint, vocab_size=300, model="other")
        )
        assert second.got(Welcome)[0].wants_tokenizer and not cluster.app.ready
        client = cluster.generate("hello", max_tokens=1)
        await cluster.settle()
        assert not second.got(StartDecode)
        send_tokenizer(second, other)
        await second.expect(StartDecode)
        assert cluster.serving == [True, False, True]
        client.generation.close()
