"""Clients that ask for anything a request may ask for, and the right answers by the fake engine's rule."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import TypeVar

from pdserve.completion import Completion, ResumableGeneration, collect
from pdserve.engine import fake_rule
from pdserve.errors import Draining, RequestCancelled
from pdserve.messages import Role
from pdserve.request import Event, GenerateRequest
from pdserve.sampling import SampleKey, TokenLogprobs, end_token_ids
from pdserve.service.config import Config
from pdserve.structure import StructureKind
from tests.simulation.cluster import MakeRunner, SimCluster
from tests.support.list_matcher import ListMatcher
from tests.support.virtual_clock import VirtualClock
from tests.support.virtual_loop import run_virtual

T = TypeVar("T")
ONE_PAIR = (("p0", Role.PREFILL), ("d0", Role.DECODE))
TWO_PAIRS = (*ONE_PAIR, ("p1", Role.PREFILL), ("d1", Role.DECODE))
AGGREGATED = (("b0", Role.BOTH),)
JOIN_S = 2.0
QUIET_S = 8.0  # held blocks are free by then
LIMIT_S = 600.0


def served(
    workers: tuple[tuple[str, Role], ...],
    talk: Callable[[SimCluster], Awaitable[T]],
    *,
    config: Config | None = None,
    router_ids: tuple[str, ...] = ("r0",),
    num_blocks: int = 64,
    window_tokens: int = 4096,
    make_runner: MakeRunner | None = None,
) -> T:
    """What `talk` returns of a cluster that is up, which is left without a block in use."""
    clock = VirtualClock()

    async def play() -> T:
        async with SimCluster(
            config or Config(),
            clock,
            "fields",
            router_ids=router_ids,
            num_blocks=num_blocks,
            window_tokens=window_tokens,
            make_runner=make_runner,
        ) as cluster:
            for worker_id, role in workers:
                cluster.add_worker(worker_id, role)
            await asyncio.sleep(JOIN_S)
            answer = await talk(cluster)
            await asyncio.sleep(QUIET_S)
            for worker in cluster.workers.values():
                counts = worker.counts()
                assert counts is not None, f"{worker.id} is not running"
                assert not (counts.granted or counts.owned or counts.quarantined), counts
            return answer

    return run_virtual(play(), clock, limit_s=LIMIT_S)


async def ask(
    cluster: SimCluster, request: GenerateRequest, on_event: Callable[[Event], None] = lambda event: None
) -> Completion:
    """The whole answer, as `pdserve.client` collects it: over one router after another if need be."""
    async with aclosing(_events(cluster, request, on_event)) as events:
        return await collect(events)


async def _events(
    cluster: SimCluster, request: GenerateRequest, on_event: Callable[[Event], None]
) -> AsyncGenerator[Event, None]:
    generation = ResumableGeneration(request)
    for num_moves in itertools.count():
        app = next(router.app for router in cluster.routers.values() if router.app is not None)
        asked = replace(generation.next_request(), request_id="")
        try:
            async for event in app.generate(asked):
                for fresh in generation.take(event):
                    on_event(fresh)
                    yield fresh
            generation.check_whole()
            return
        except (Draining, RequestCancelled):
            assert num_moves < 10, "every router is gone"
            await asyncio.sleep(0.1)


def key_of(request: GenerateRequest, max_tokens: int, choice: int = 0) -> SampleKey:
    """The key of one choice of a request whose seed is given; its words are bytes to the fake tokenizer."""
    assert request.seed is not None
    words = [
        tuple(text.encode())
        for word in request.sampling.bad_words
        for text in (word.strip(), f" {word.strip()}")
    ]
    return SampleKey(
        params=request.sampling,
        seed=request.seed,
        choice=choice,
        eos_token_ids=(fake_rule.EOS_ID,),
        max_tokens=max_tokens,
        bad_word_ids=tuple(words),
    )


def expected(
    request: GenerateRequest, prompt_ids: tuple[int, ...], choice: int = 0
) -> tuple[tuple[int, ...], tuple[TokenLogprobs, ...]]:
    """Tokens and their logprobs. Of structures it knows choices, by brute force."""
    assert request.sampling.max_tokens is not None
    key = key_of(request, request.sampling.max_tokens, choice)
    matcher: ListMatcher | None = None
    if request.sampling.structure is not None:
        assert request.sampling.structure.kind is StructureKind.CHOICES
        texts = [text.encode() for text in request.sampling.structure.texts]
        matcher = ListMatcher(texts, [bytes([byte]) for byte in range(256)], end_token_ids(key))
    pairs = list(fake_rule.answering_with_logprobs(prompt_ids, key, matcher=matcher))
    return tuple(token for token, _ in pairs), tuple(each for _, each in pairs if each is not None)
