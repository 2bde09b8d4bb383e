"""The worker's side of its sessions: dial every router, join, keep the connection, pass messages on.

No grpc here: a `SessionDialer` opens sessions (gRPC or in-memory), a `Resolver` turns a name into addresses. All
waits are on the event loop's clock, so the same code runs under virtual time.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from pdserve.errors import Incompatible, PdserveError, Unauthenticated, WorkerLost
from pdserve.ids import Random
from pdserve.messages import (
    Down,
    DownHeartbeat,
    Heartbeat,
    Hello,
    Load,
    Superseded,
    TokenizerFile,
    Up,
    Welcome,
)
from pdserve.session import Session
from pdserve.wire_version import FIRST, WireVersion, spoken, text
from pdserve.worker.cache_feed import CacheFeed

log = structlog.get_logger()

_FIRST_BACK_OFF_S = 0.05
_MAX_BACK_OFF_S = 1.0
_MISFIT_BACK_OFF_S = 10.0  # only an operator can change that this worker doesn't fit
_RESOLVE_EVERY_S = 3.0
_DIAL_S = 5.0
_UNREACHABLE_S = 5.0  # a router that can't be reached for so long is worth a warning

WorkerSession = Session[Up, Down]


class SessionDialer(Protocol):
    """Opens sessions with routers."""

    async def dial(self, address: str) -> WorkerSession:
        """Raises WorkerLost when nobody answers there, Unauthenticated or Incompatible when the router refuses."""
        ...


class Resolver(Protocol):
    """Turns a router of the configuration, a name or a file, into the addresses it stands for now."""

    async def resolve(self, name: str) -> Sequence[str]:
        """Raises WorkerLost when it can't be told."""
        ...


class SessionListener(Protocol):
    """Who acts on what routers say: the worker. Called on the loop, in order within a session."""

    def on_session_opened(self, session_id: int, router_id: str) -> None: ...
    def on_session_closed(self, session_id: int) -> None: ...
    def on_message(self, session_id: int, message: Down) -> None: ...
    def on_superseded(self) -> None: ...


@dataclass(slots=True)
class _Live:
    session: WorkerSession
    router_id: str
    num_quiet_ticks: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class RouterSessions:
    """All sessions of one worker. Loop only.

    hello            built for each session, since a role change alters it
    tokenizer_files  the model's tokenizer files by name, for routers that ask
    cache            the prefix cache's hits, for each router
    silence_s        a router that says nothing for so long is taken for lost
    """

    def __init__(
        self,
        *,
        routers: Sequence[str],
        dialer: SessionDialer,
        resolver: Resolver,
        hello: Callable[[], Hello],
        tokenizer_files: Mapping[str, bytes],
        cache: CacheFeed,
        listener: SessionListener,
        random: Random,
        heartbeat_s: float,
        silence_s: float,
    ) -> None:
        self._routers = tuple(routers)
        self._dialer = dialer
        self._resolver = resolver
        self._hello = hello
        self._tokenizer_files = tokenizer_files
        self._cache = cache
        self._listener = listener
        self._random = random
        self._max_quiet_ticks = max(2, round(silence_s / heartbeat_s))
        self._live: dict[int, _Live] = {}
        self._next_session_id = 1
        self._addresses: dict[str, dict[str, None]] = {name: {} for name in self._routers}
        self._unresolved: dict[str, str] = {}  # by name: why it stands for nothing now, as it was told
        self._kept: dict[str, None] = {}
        self._misfits: dict[str, str] = {}  # by address: why the router there won't have this worker
        self._unreachable: dict[str, float] = {}  # since when; infinity = it has been told
        self._superseded = False
        self._load: Load | None = None

    @property
    def joined(self) -> bool:
        """Whether at least one router has taken this worker in."""
        return bool(self._live)

    @property
    def routers(self) -> tuple[str, ...]:
        """Ids of the routers it is joined to."""
        return tuple(live.router_id for live in self._live.values())

    async def run(self) -> None:
        """Dial and keep sessions until cancelled, or until superseded; closes all of them on the way out."""
        async with asyncio.TaskGroup() as group:
            for name in self._routers:
                group.create_task(self._follow(name, group))

    def send(self, session_id: int, message: Up) -> None:
        """To one router; dropped if that session has ended."""
        live = self._live.get(session_id)
        if live is not None:
            live.session.send(message)

    def send_all(self, message: Up) -> None:
        """To every router."""
        if isinstance(message, Load):
            self._load = message
        for live in self._live.values():
            live.session.send(message)

    def beat(self, num_steps: int, has_work: bool, in_step_s: float = 0.0) -> None:
        """One heartbeat has passed: tell the routers, and count their silence in heartbeats.

        Counted, not timed: after this process was stopped and continued, what a router sent meanwhile lies unread.
        """
        for live in tuple(self._live.values()):
            live.session.send(Heartbeat(num_steps, has_work, in_step_s))
            if self._load is not None:
                live.session.send(self._load)
            live.num_quiet_ticks += 1
            if live.num_quiet_ticks > self._max_quiet_ticks:
                live.session.close("the router is silent")

    def close(self, session_id: int, reason: str) -> None:
        """End one session; it is dialled again."""
        live = self._live.get(session_id)
        if live is not None:
            live.session.close(reason)

    async def _follow(self, name: str, group: asyncio.TaskGroup) -> None:
        """Resolve one name again and again; keep a session with each address it stands for.

        Where that fails, what it stood for last holds; the operator is told once for each reason.
        """
        while not self._superseded:
            try:
                found = await self._resolver.resolve(name)
            except WorkerLost as error:
                if self._unresolved.get(name) != str(error):
                    self._unresolved[name] = str(error)
                    log.warning("router.unresolved", router=name, error=str(error))
            else:
                if self._unresolved.pop(name, None) is not None:
                    log.info("router.resolved", router=name, addresses=list(found))
                self._addresses[name] = dict.fromkeys(found)
                for address in self._addresses[name]:
                    if address not in self._kept:
                        self._kept[address] = None
                        group.create_task(self._keep(address))
            await asyncio.sleep(_RESOLVE_EVERY_S)

    def _wanted(self, address: str) -> bool:
        return not self._superseded and any(address in found for found in self._addresses.values())

    async def _keep(self, address: str) -> None:
        """Keep a session with one address for as long as a name stands for it."""
        back_off_s = _FIRST_BACK_OFF_S
        loop = asyncio.get_running_loop()
        try:
            while self._wanted(address):
                begun_s = loop.time()
                try:
                    router_id = await self._join_once(address)
                except (Incompatible, Unauthenticated) as error:
                    self._note_misfit(address, error)
                    await asyncio.sleep(_MISFIT_BACK_OFF_S * (0.5 + 0.5 * self._random.random()))
                    continue
                if router_id is not None and loop.time() - begun_s > _MAX_BACK_OFF_S:
                    back_off_s = _FIRST_BACK_OFF_S  # not if its sessions end as soon as they begin
                if self._wanted(address):
                    await asyncio.sleep(back_off_s * (0.5 + 0.5 * self._random.random()))
                    back_off_s = min(_MAX_BACK_OFF_S, 2 * back_off_s)
                if router_id is not None:
                    await self._while_joined_elsewhere(router_id)
        finally:
            self._kept.pop(address, None)
            self._unreachable.pop(address, None)
            self._misfits.pop(address, None)

    def _note_misfit(self, address: str, error: PdserveError) -> None:
        """Tell the operator, once for each reason."""
        if self._misfits.get(address) != str(error):
            self._misfits[address] = str(error)
            log.error("router.refuses_this_worker", router=address, error=str(error))

    def _note_unreachable(self, address: str, reason: str) -> None:
        """Tell the operator, once each time, if it isn't a matter of seconds: the address may be wrong."""
        now_s = asyncio.get_running_loop().time()
        since_s = self._unreachable.setdefault(address, now_s)
        if now_s - since_s < _UNREACHABLE_S:
            log.debug("router.unreachable", router=address, error=reason)
        else:
            self._unreachable[address] = math.inf  # told
            log.warning("router.unreachable", router=address, after_s=round(now_s - since_s, 1), error=reason)

    async def _while_joined_elsewhere(self, router_id: str) -> None:
        """Two addresses may lead to one router, which keeps the later session: don't take turns ending each other."""
        while True:
            other = next((live for live in self._live.values() if live.router_id == router_id), None)
            if other is None:
                return
            await other.ended.wait()

    async def _join_once(self, address: str) -> str | None:
        """One session from dial to end. Returns the router's id if it took this worker in.

        Raises Incompatible if the router says that this worker doesn't fit, Unauthenticated if either isn't known to
        the other.
        """
        try:
            async with asyncio.timeout(_DIAL_S):
                session = await self._dialer.dial(address)
        except (WorkerLost, TimeoutError) as error:
            self._note_unreachable(address, str(error) or "no answer")
            return None
        self._unreachable.pop(address, None)
        try:
            hello = self._hello()
            session.send(hello)
            return await self._serve(session, address, hello.wire or FIRST)
        finally:
            session.close("the worker ends the session")

    async def _serve(self, session: WorkerSession, address: str, announced: WireVersion) -> str | None:
        try:
            async with asyncio.timeout(_DIAL_S):
                welcome = await session.receive()
        except Incompatible:
            raise
        except (PdserveError, TimeoutError) as error:
            log.info("router.not_joined", router=address, error=str(error) or "no welcome")
            return None
        if isinstance(welcome, Superseded):
            self._supersede()
            return None
        if not isinstance(welcome, Welcome):
            log.warning("router.not_joined", router=address, error="first message is no Welcome")
            return None
        wire = spoken(announced, welcome.wire)
        session_id, live = self._next_session_id, _Live(session, welcome.router_id)
        self._next_session_id += 1
        self._live[session_id] = live
        log.info(
            "router.joined", router=welcome.router_id, address=address, session=session_id, wire=text(wire)
        )
        self._listener.on_session_opened(session_id, welcome.router_id)
        try:
            if self._load is not None:
                session.send(self._load)
            if welcome.wants_tokenizer:
                self._send_tokenizer(session)
            if wire >= (1, 2):
                self._cache.open(session_id, session.when_idle)
            await self._read(session_id, live)
        finally:
            self._cache.close(session_id)
            del self._live[session_id]
            live.ended.set()
            self._listener.on_session_closed(session_id)
        return welcome.router_id

    async def _read(self, session_id: int, live: _Live) -> None:
        """Until the session has ended. Raises Incompatible if that is for an operator to change."""
        while True:
            try:
                message = await live.session.receive()
            except PdserveError as error:
                log.info("router.left", router=live.router_id, session=session_id, error=str(error))
                if isinstance(error, Incompatible):
                    raise
                return
            live.num_quiet_ticks = 0
            if isinstance(message, Superseded):
                self._supersede()
                return
            if not isinstance(message, DownHeartbeat):
                self._listener.on_message(session_id, message)

    def _send_tokenizer(self, session: WorkerSession) -> None:
        files = self._tokenizer_files
        for index, (name, content) in enumerate(files.items()):
            session.send(TokenizerFile(name, content, index == len(files) - 1))

    def _supersede(self) -> None:
        """Final: another process of this worker's id is the later one."""
        if not self._superseded:
            self._superseded = True
            log.error("worker.superseded")
            self._listener.on_superseded()
            for session_id in tuple(self._live):
                self.close(session_id, "superseded")
