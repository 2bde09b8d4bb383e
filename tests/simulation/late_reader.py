"""A decode worker that goes on reading after its prefill worker has given up and reused the blocks.

    python -m tests.simulation.late_reader      plays it and prints what the client got: {"got", "want", "read_late"}

One-sided links: d0 reads p0's pool itself. In the middle of it d0's transfer thread stops, nothing of p0 reaches d0
any more, p0's router session is reset and its link times out: it gives the lease up, and other prompts take the
blocks. Then d0 reads the rest, in time for the router, which waits for its verdict. Only CONFIRM is missing.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

from decode_worker.attempt import DecodeState
from pdserve.engine import fake_rule
from pdserve.messages import Role
from pdserve.request import GenerateRequest, Tokens
from pdserve.sampling import SamplingParams
from pdserve.service.config import Config, TimeoutsConfig, TransportConfig
from tests.simulation.cluster import Delays, SimCluster, SimWorker
from tests.simulation.observer import Unobserved
from tests.simulation.phases import attempts_of
from tests.support.memory_channel import WireKind
from tests.support.virtual_clock import VirtualClock
from tests.support.virtual_loop import run_virtual

BLOCK_SIZE = 16
NUM_BLOCKS = 20  # of a prompt
POOL_BLOCKS = 24  # of the prefill worker: a second prompt needs the blocks of the first
NUM_TOKENS = 12
PAUSE_S = 5.0
LOOK_S = 0.0005
LIMIT_S = 60.0


class _Witness(Unobserved):
    """Sees that the simulation's own check notices a hand-off without CONFIRM, and lets it happen."""

    def violate(self, what: str, about: str = "") -> None:
        pass


def play() -> dict[str, object]:
    """Play it; what the client got, what it should have got, and blocks read after p0 had let go of them."""
    clock = VirtualClock()
    return run_virtual(_play(clock), clock, limit_s=LIMIT_S)


async def _play(clock: VirtualClock) -> dict[str, object]:
    config = Config(
        timeouts=TimeoutsConfig(hold_s=0.1, request_s=30.0),
        transport=TransportConfig(piece_bytes=4096),  # so that d0 reads in several turns
    )
    delays = Delays(session_s=0.001, link_s=0.001, owner_s=0.004, kind=WireKind.ONE_SIDED)
    cluster = SimCluster(config, clock, "late reader", delays=delays, observer=_Witness())
    async with cluster:
        prefill = cluster.add_worker("p0", Role.PREFILL, num_blocks=POOL_BLOCKS)
        decode = cluster.add_worker("d0", Role.DECODE)
        await _until(lambda: _serves(cluster))
        asked = asyncio.get_running_loop().create_task(_ask(cluster, salt=0))
        await _until(lambda: 2 <= _num_pulled(decode) < NUM_BLOCKS // 2)
        decode.pause_transfer()
        before = _num_pulled(decode)
        await asyncio.sleep(1.5)  # a PING arrives: the link will not look silent to d0
        cluster.network.cut("p0", "d0")
        cluster.fabric.reset(worker_id="p0")
        cluster.add_worker("d1", Role.DECODE)
        others = asyncio.get_running_loop().create_task(_ask_others(cluster, prefill))
        await asyncio.sleep(PAUSE_S - 1.5)
        decode.resume_transfer()
        got = await asked
        await others
    return {"got": got, "want": _expected(0), "read_late": NUM_BLOCKS - before}


async def _ask_others(cluster: SimCluster, prefill: SimWorker) -> None:
    """As soon as p0 has let go, fill its pool with other prompts."""
    await _until(lambda: not any(attempt.seq.ids[0] == _prompt(0)[0] for attempt in attempts_of(prefill)))
    for salt in (1, 2):
        text = await _ask(cluster, salt)
        assert text == _expected(salt), "a request that nothing is wrong with"


async def _ask(cluster: SimCluster, salt: int) -> str:
    app = cluster.routers["r0"].app
    assert app is not None, "the router runs"
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
    ids: list[int] = []
    async for event in app.generate(GenerateRequest(input=_prompt(salt), sampling=sampling)):
        if isinstance(event, Tokens):
            ids += event.token_ids
    return bytes(ids).decode()


def _prompt(salt: int) -> tuple[int, ...]:
    return tuple(
        32 + (7 * salt + 11 * place + place * place) % 90 for place in range(NUM_BLOCKS * BLOCK_SIZE - 1)
    )


def _expected(salt: int) -> str:
    return bytes(fake_rule.expected_tokens(_prompt(salt), NUM_TOKENS, greedy=True)).decode()


def _serves(cluster: SimCluster) -> bool:
    app = cluster.routers["r0"].app
    return app is not None and app.serving


def _num_pulled(decode: SimWorker) -> int:
    attempts = [attempt for attempt in attempts_of(decode) if attempt.state is DecodeState.GRANTED]
    return getattr(attempts[0], "pull_progress", 0) if attempts else 0


async def _until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S / 2):
        while not is_so():
            await asyncio.sleep(LOOK_S)


if __name__ == "__main__":
    print(json.dumps(play()))
