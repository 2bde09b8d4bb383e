"""A worker's sessions against scripted routers, under virtual time."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Sequence

import pytest
from structlog.testing import capture_logs

from pdserve.block_messages import BlockCounts, BlockEvents
from pdserve.errors import Incompatible, WorkerLost
from pdserve.ids import Epoch, WorkerRef
from pdserve.messages import (
    Abort,
    Down,
    DownHeartbeat,
    Heartbeat,
    Hello,
    Load,
    Role,
    Superseded,
    TokenizerFile,
    Up,
    Welcome,
)
from pdserve.session import Session
from pdserve.wire_version import WIRE_VERSION, WireVersion
from pdserve.worker.cache_feed import CacheFeed
from pdserve.worker.sessions import RouterSessions
from tests.support.memory_session import MemoryWire
from tests.support.virtual_loop import run_virtual

RouterEnd = Session[Down, Up]
Script = Callable[[RouterEnd], Awaitable[None]]
ME = WorkerRef("d1", Epoch(1, 1))
LOAD = Load(
    blocks=BlockCounts(1, 0, 0, 0, 0), num_running=0, num_waiting=0, num_queued_tokens=0, num_queued_short_tokens=0,
    chunk_tokens=512, num_cache_hit_tokens=0, num_cache_query_tokens=0,
    prefill_tokens_per_s=0.0, step_s=0.0, slowest_step_s=0.0, draining=False,
)  # fmt: skip


def hello() -> Hello:
    return Hello(
        worker=ME, role=Role.DECODE, role_generation=0, model="fake", kv_addresses=(), transports=(),
        metrics_address="", kv_layout_json="{}", block_size=16, num_blocks=4, window_tokens=64,
        weights_fingerprint="w", tokenizer_fingerprint="t", numerics="n", deterministic=False, cache_seed=b"",
        eos_token_ids=(), vocab_size=10, host_id="h", wire=WIRE_VERSION,
    )  # fmt: skip


class World:
    """Addresses with a script behind each; dials, resolves and listens for the sessions under test."""

    def __init__(self, scripts: dict[str, Script], names: dict[str, list[str]] | None = None) -> None:
        self.scripts = scripts
        self.names = names if names is not None else {"routers:1": list(scripts)}
        self.events: list[str] = []
        self.dialled: list[tuple[float, str]] = []
        self.feed = CacheFeed()
        self.sessions = RouterSessions(
            routers=tuple(self.names),
            dialer=self,
            resolver=self,
            hello=hello,
            tokenizer_files={"tokenizer.json": b"{}", "config.json": b"[]"},
            cache=self.feed,
            listener=self,
            random=random.Random(1),
            heartbeat_s=0.5,
            silence_s=4.0,
        )

    # SessionDialer

    async def dial(self, address: str) -> Session[Up, Down]:
        loop = asyncio.get_running_loop()
        self.dialled.append((loop.time(), address))
        script = self.scripts.get(address)
        if script is None:
            raise WorkerLost("refused", address=address)
        wire = MemoryWire(loop.call_later, lambda: 0.01, router=address)
        self.tasks.create_task(self.play(script, wire.router_end))
        return wire.worker_end

    async def play(self, script: Script, end: RouterEnd) -> None:
        try:
            await script(end)
        except WorkerLost:
            self.events.append("router: session lost")

    # Resolver

    async def resolve(self, name: str) -> Sequence[str]:
        if not self.names[name]:
            raise WorkerLost("unknown name", name=name)
        return self.names[name]

    # SessionListener

    def on_session_opened(self, session_id: int, router_id: str) -> None:
        self.events.append(f"opened {session_id} {router_id}")

    def on_session_closed(self, session_id: int) -> None:
        self.events.append(f"closed {session_id}")

    def on_message(self, session_id: int, message: Down) -> None:
        self.events.append(f"{session_id}: {type(message).__name__}")

    def on_superseded(self) -> None:
        self.events.append("superseded")

    def run(self, for_s: float, *then: tuple[float, Callable[[], None]]) -> None:
        """Let the sessions live so long; do something at some moments."""

        async def main() -> None:
            loop = asyncio.get_running_loop()
            async with asyncio.TaskGroup() as self.tasks:
                running = self.tasks.create_task(self.sessions.run())
                beating = self.tasks.create_task(self.beat())
                for at_s, act in then:
                    loop.call_later(at_s, act)
                await asyncio.sleep(for_s)
                running.cancel()
                beating.cancel()

        run_virtual(main())

    def close_r1(self) -> None:
        """End the first session, as a broken connection does."""
        self.sessions.close(1, "broken")

    async def beat(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            self.sessions.beat(7, has_work=True)


async def welcome(end: RouterEnd, router_id: str, *, wants_tokenizer: bool = False) -> Hello:
    first = await end.receive()
    assert isinstance(first, Hello)
    end.send(Welcome(router_id, wants_tokenizer))
    return first


def good_router(router_id: str, seen: list[Up] | None = None, *, wants_tokenizer: bool = False) -> Script:
    """Welcomes, answers each message with a heartbeat, and remembers all of them."""

    async def script(end: RouterEnd) -> None:
        await welcome(end, router_id, wants_tokenizer=wants_tokenizer)
        while True:
            message = await end.receive()
            if seen is not None:
                seen.append(message)
            end.send(DownHeartbeat())

    return script


def test_joins_every_router_and_beats() -> None:
    seen: dict[str, list[Up]] = {"r1": [], "r2": []}
    world = World({"a:1": good_router("r1", seen["r1"]), "b:1": good_router("r2", seen["r2"])})
    world.run(2.0)
    assert sorted(world.events[:2]) == ["opened 1 r1", "opened 2 r2"]
    for router in seen.values():
        assert [message for message in router if isinstance(message, Heartbeat)][:3] == [
            Heartbeat(7, True)
        ] * 3


def test_a_router_of_another_major_version_is_an_operators_matter() -> None:
    async def script(end: RouterEnd) -> None:
        await end.receive()
        end.send(Welcome("r2", wire=(2, 0)))

    world = World({"a:1": script})
    with capture_logs() as logs:
        world.run(3.0)
    assert not world.events
    [told] = [line for line in logs if line["event"] == "router.refuses_this_worker"]
    assert "field=wire, ours=1.2, theirs=2.0" in told["error"]


def test_the_newest_load_is_told_at_once_to_all_and_to_who_joins_later_and_with_each_beat() -> None:
    seen: list[Up] = []
    world = World({"a:1": good_router("r1", seen)})
    world.sessions.send_all(LOAD)
    world.run(1.2)
    assert seen[0] == LOAD
    assert seen.count(LOAD) == 3


def test_sends_tokenizer_files_to_a_router_that_asks() -> None:
    seen: list[Up] = []
    world = World({"a:1": good_router("r1", seen, wants_tokenizer=True)})
    world.run(0.4)
    files = [message for message in seen if isinstance(message, TokenizerFile)]
    assert files == [
        TokenizerFile("tokenizer.json", b"{}", last=False),
        TokenizerFile("config.json", b"[]", last=True),
    ]


def test_messages_go_to_the_listener_and_to_one_session() -> None:
    seen: list[Up] = []

    async def router(end: RouterEnd) -> None:
        await welcome(end, "r1")
        end.send(Abort(5))
        while True:
            seen.append(await end.receive())

    world = World({"a:1": router})
    world.run(
        0.4,
        (0.2, lambda: world.sessions.send(1, Heartbeat(99, False))),
        (0.2, lambda: world.sessions.send(2, Heartbeat(98, False))),
    )
    assert world.events[:2] == ["opened 1 r1", "1: Abort"]
    assert Heartbeat(99, False) in seen and Heartbeat(98, False) not in seen


def test_dials_again_with_back_off_of_at_most_a_second() -> None:
    world = World({}, {"routers:1": ["a:1"]})
    world.run(20.0)
    moments = [at_s for at_s, _ in world.dialled]
    gaps = [later - earlier for earlier, later in itertools.pairwise(moments)]
    assert gaps[0] < 0.1 and max(gaps) <= 1.0 and min(gaps[-5:]) >= 0.5


def test_a_router_that_cannot_be_reached_is_reported_once_each_time() -> None:
    async def short(end: RouterEnd) -> None:
        await welcome(end, "r1")
        await asyncio.sleep(0.2)
        end.close("restarting")

    world = World({}, {"routers:1": ["a:1"]})
    with capture_logs() as logs:
        world.run(
            40.0,
            (20.0, lambda: world.scripts.update({"a:1": short})),
            (22.0, lambda: world.scripts.clear()),
        )
    told = [entry for entry in logs if entry["event"] == "router.unreachable"]
    warned = [entry for entry in told if entry["log_level"] == "warning"]
    assert len(told) > 20 and len(warned) == 2
    assert all(entry["router"] == "a:1" and 5.0 <= entry["after_s"] <= 7.0 for entry in warned)
    assert "refused" in warned[0]["error"]


def test_a_router_that_it_does_not_fit_is_asked_rarely_and_reported_once() -> None:
    misfit = Incompatible("worker's vocab_size differs", field="vocab_size", theirs="10", ours="12")

    async def refusing(end: RouterEnd) -> None:
        await end.receive()
        end.refuse(misfit)

    async def refusing_later(end: RouterEnd) -> None:
        await welcome(end, "r2")
        end.refuse(misfit)

    world = World({"a:1": refusing, "b:1": refusing_later, "c:1": good_router("r3")})
    with capture_logs() as logs:
        world.run(60.0)
    for address in ("a:1", "b:1"):
        moments = [at_s for at_s, dialled in world.dialled if dialled == address]
        gaps = [later - earlier for earlier, later in itertools.pairwise(moments)]
        assert min(gaps) >= 5.0 and max(gaps) <= 10.1
    told = [entry for entry in logs if entry["event"] == "router.refuses_this_worker"]
    assert [entry["router"] for entry in told] == ["a:1", "b:1"]
    assert all("theirs=10" in entry["error"] and "ours=12" in entry["error"] for entry in told)
    assert "opened 2 r3" in world.events or "opened 1 r3" in world.events


def test_comes_back_after_a_lost_session_with_a_new_id() -> None:
    async def short(end: RouterEnd) -> None:
        await welcome(end, "r1")
        await asyncio.sleep(0.2)
        end.close("restarting")

    world = World({"a:1": short})
    world.run(1.0)
    assert world.events[:4] == ["opened 1 r1", "closed 1", "opened 2 r1", "closed 2"]


def test_sessions_that_end_as_soon_as_they_begin_are_not_dialled_ever_faster() -> None:
    async def crashing(end: RouterEnd) -> None:
        await welcome(end, "r1")
        end.close("internal error")

    world = World({"a:1": crashing})
    world.run(12.0)
    assert 10 < len(world.dialled) < 30, "they were 70 and more"


def test_superseded_is_final() -> None:
    async def router(end: RouterEnd) -> None:
        await welcome(end, "r1")
        end.send(Superseded())
        await end.receive()

    world = World({"a:1": router, "b:1": good_router("r2")})
    world.run(10.0)
    assert world.events.count("superseded") == 1
    assert sorted(world.events)[:2] == ["closed 1", "closed 2"]
    assert len(world.dialled) == 2, "never dials again"


def test_superseded_instead_of_a_welcome_is_final_too() -> None:
    async def router(end: RouterEnd) -> None:
        await end.receive()
        end.send(Superseded())

    world = World({"a:1": router})
    world.run(10.0)
    assert world.events == ["superseded"] and len(world.dialled) == 1


def test_a_silent_router_is_left_after_its_silence() -> None:
    async def silent(end: RouterEnd) -> None:
        await welcome(end, "r1")
        while True:
            await end.receive()

    world = World({"a:1": silent})
    world.run(6.0)
    assert "opened 2 r1" in world.events, "it was left, and dialled again"


def test_no_welcome_is_no_session() -> None:
    async def mute(end: RouterEnd) -> None:
        await end.receive()
        await asyncio.sleep(100)

    world = World({"a:1": mute})
    world.run(120.0)
    assert world.events == [] and 10 < len(world.dialled) < 30


def test_follows_a_name_to_new_addresses_and_leaves_old_ones_when_they_end() -> None:
    world = World({"a:1": good_router("r1"), "b:1": good_router("r2")}, {"routers:1": ["a:1"]})
    world.run(10.0, (1.0, lambda: world.names.update({"routers:1": ["b:1"]})), (5.0, world.close_r1))
    assert [event for event in world.events if event.startswith(("opened", "closed"))][:3] == [
        "opened 1 r1",
        "opened 2 r2",
        "closed 1",
    ]
    assert [address for _, address in world.dialled] == ["a:1", "b:1"]


def test_a_name_that_is_unknown_for_a_while_keeps_its_addresses_and_is_told_once() -> None:
    world = World({"a:1": good_router("r1")})

    def forget() -> None:
        world.names["routers:1"] = []

    def know_again() -> None:
        world.names["routers:1"] = ["a:1"]

    with capture_logs() as logs:
        world.run(40.0, (1.0, forget), (12.0, world.close_r1), (25.0, know_again), (32.0, forget))
    assert [event for event in world.events if event.startswith("opened")] == ["opened 1 r1", "opened 2 r1"]
    told = [line["event"] for line in logs if line["event"] in ("router.unresolved", "router.resolved")]
    assert told == ["router.unresolved", "router.resolved", "router.unresolved"]


@pytest.mark.parametrize("behind_s", [0.0, 0.02])
def test_two_addresses_of_one_router_do_not_take_turns(behind_s: float) -> None:
    """behind_s: how much later the new session is welcomed than the worker hears of the earlier one's end."""
    current: list[RouterEnd] = []

    async def router(end: RouterEnd) -> None:
        first = await end.receive()
        assert isinstance(first, Hello)
        for earlier in current:
            earlier.close("a new session of this worker has begun")
        current[:] = [end]
        await asyncio.sleep(behind_s)
        end.send(Welcome("r1"))
        while True:
            await end.receive()
            end.send(DownHeartbeat())

    world = World({"a:1": router, "b:1": router})
    world.run(30.0)
    assert len(world.dialled) <= 3, "the address that lost waits for the other one's end"


@pytest.mark.parametrize(("theirs", "num_told"), [((1, 2), 2), ((1, 1), 0), (None, 0)])
def test_block_events_go_to_routers_that_know_them(theirs: WireVersion | None, num_told: int) -> None:
    told: list[BlockEvents] = []

    async def router(end: RouterEnd) -> None:
        await end.receive()
        end.send(Welcome("r1", wire=theirs))
        while True:
            if isinstance(message := await end.receive(), BlockEvents):
                told.append(message)

    world = World({"a:1": router})
    world.feed.change([(True, b"a")])
    world.run(3.0, (1.0, lambda: world.feed.change([(True, b"b")])), (2.0, world.close_r1))
    assert [each.stored for each in told[:2]] == [(b"a",), (b"b",)][:num_told]
    assert len(told) == (num_told + 1 if num_told else 0), "the next session begins with the whole set"
