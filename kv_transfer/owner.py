"""The transfer owner: all links of one worker, as an Owner that a driver runs (pdserve/owner.py).

It takes in messages of the engine and of the loop (`handle`), and gives every link its turn (`step`). The worker may
be P on some links and D on others. State of leases lies in the Sender or Receiver of each link, nowhere else.
"""

from __future__ import annotations

from collections import Counter, deque

import structlog

from kv_transfer import messages
from kv_transfer.frames import MAX_PIECE_BYTES
from kv_transfer.handshake import Handshake, Side
from kv_transfer.intake import Intake
from kv_transfer.lease import ReceiveState, SendState
from kv_transfer.link import Link, LinkPhase
from kv_transfer.link_facts import LinkFacts
from kv_transfer.metrics import TransferMetrics
from kv_transfer.patience import Patience
from kv_transfer.pieces import BlockPieces
from kv_transfer.receiver import Receiver
from kv_transfer.sender import Sender
from kv_transfer.transports.port import Channel, Network
from kv_transfer.wanted_links import WantedLink, WantedLinks
from pdserve.books import BooksWrong
from pdserve.clock import Clock
from pdserve.engine.layout import KvLayout
from pdserve.errors import (
    InvariantViolated,
    LinkLost,
    Overloaded,
    PdserveError,
    RequestCancelled,
    Stale,
    WorkerLost,
)
from pdserve.ids import Random, WorkerRef
from pdserve.kv_memory import KvMemory
from pdserve.owner import Post
from pdserve.service.config import TimeoutsConfig, TransportConfig

_MAX_STRANGERS = 64
"""Accepted connections in their handshake at once, of each kind of socket; the oldest makes room for one more."""

_MAX_ENDED = 256
"""Ended links that are remembered."""

log = structlog.get_logger()


class TransferOwner:
    """All methods are called by its driver only; `metrics` may be read by any thread."""

    def __init__(
        self,
        *,
        me: WorkerRef,
        facts: LinkFacts,
        pool: KvMemory,
        layout: KvLayout,
        network: Network,
        timeouts: TimeoutsConfig,
        config: TransportConfig,
        clock: Clock,
        random: Random,
        to_engine: Post,
        to_loop: Post,
        secret: bytes | None,
        max_links: int = 16,
    ) -> None:
        if pool.num_bytes != layout.pool_bytes:
            raise InvariantViolated("not the pool of this layout", want=layout.pool_bytes, got=pool.num_bytes)
        self.addresses = network.addresses
        self.metrics = TransferMetrics()
        self._me = me
        self._facts = facts
        self._pool = pool
        self._layout = layout
        self._pieces = BlockPieces(layout.block_bytes, min(config.piece_bytes, MAX_PIECE_BYTES))
        self._window_bytes = config.pull_window_bytes
        self._strict = config.strict
        self._network = network
        self._timeouts = timeouts
        self._clock = clock
        self._random = random
        self._to_engine = to_engine
        self._to_loop = to_loop
        self._secret = secret
        self._max_links = max_links
        self._wanted = WantedLinks(max_links=max_links, random=random)
        self._links: deque[Link] = deque()
        self._to_prefill: dict[str, Link] = {}
        self._ended: dict[WorkerRef, int] = {}  # generation of the last link to each, the latest end last
        self._generation = 0
        self._look_s = clock.now_s()
        self._books_are_wrong = False
        self._granted_bytes = 0  # of the pool, up to the last block that was ever granted

    # --- messages

    def handle(self, message: object) -> None:
        """Take in one message of the engine or the loop (kv_transfer/messages.py)."""
        match message:
            case messages.OrderLink():
                self._on_order(message)
            case messages.CancelLink():
                self._wanted.cancel(message.session_id, message.decode_worker, self._clock.now_s())
            case messages.CancelAllLinks():
                self._wanted.cancel_all(message.session_id, self._clock.now_s())
            case messages.OpenLease():
                self._on_open(message)
            case messages.Offer() | messages.CommitLease() | messages.WithdrawLease():
                self._to_sender(message)
            case messages.ExpectLease():
                self._on_expect(message)
            case messages.EndLease():
                self._on_end(message)
            case _:
                raise InvariantViolated("not a message of the transfer owner", got=type(message).__name__)
        self._look_by(self._wanted.next_due_s())

    def _on_order(self, message: messages.OrderLink) -> None:
        spare = self._wanted.spare()
        if spare is not None and self._wanted.get(message.decode_worker) is None:
            self._close_unwanted(spare)
        try:
            wanted = self._wanted.order(
                message.session_id, message.decode_worker, message.addresses, self._clock.now_s()
            )
        except Overloaded as error:
            state = messages.LinkState(message.decode_worker, False, "", error.message, 0, message.session_id)
            self._to_loop(state)
            return
        if wanted.link is not None and wanted.link.is_up:
            self._tell_up(wanted.link, message.session_id)
        elif wanted.reason:
            self._to_loop(
                messages.LinkState(message.decode_worker, False, "", wanted.reason, 0, message.session_id)
            )

    def _on_open(self, message: messages.OpenLease) -> None:
        wanted = self._wanted.get(message.decode_worker)
        if wanted is not None and wanted.link is not None and isinstance(wanted.link.side, Sender):
            wanted.link.side.open(message)
            return
        error = WorkerLost("no link to the decode worker", decode_worker=message.decode_worker.id)
        self._to_engine(messages.LeaseClosed(message.lease_id, error, 0, True))

    def _to_sender(self, message: messages.Offer | messages.CommitLease | messages.WithdrawLease) -> None:
        """A message about a lease that is closed already finds no sender, and means nothing."""
        for wanted in self._wanted:
            if wanted.link is None or not isinstance(wanted.link.side, Sender):
                continue
            if message.lease_id not in wanted.link.side.leases:
                continue
            match message:
                case messages.Offer():
                    wanted.link.side.offer(message)
                case messages.CommitLease():
                    wanted.link.side.commit(message)
                case messages.WithdrawLease():
                    wanted.link.side.withdraw(message)
            return

    def _on_expect(self, message: messages.ExpectLease) -> None:
        end = (max(message.block_ids, default=-1) + 1) * self._layout.block_bytes
        self._granted_bytes = max(self._granted_bytes, min(end, self._pool.num_bytes))
        link = self._to_prefill.get(message.source.id)
        if link is not None and link.peer == message.source and isinstance(link.side, Receiver):
            link.side.expect(message)
            return
        ended = self._ended.get(message.source, 0)
        error = LinkLost("no link to the prefill worker", prefill_worker=message.source.id, generation=ended)
        self._to_engine(messages.Retired(message.lease_id, error))

    def _on_end(self, message: messages.EndLease) -> None:
        for link in self._to_prefill.values():
            if isinstance(link.side, Receiver):
                link.side.end(message)

    # --- turns

    def step(self) -> float | None:
        """Give each link a turn, in rotation, then look at the time."""
        self._network.poll()
        self._accept()
        self._dial()
        more = False
        for link in list(self._links):
            if link.phase is not LinkPhase.DOWN:
                more = link.turn() or more
            elif not link.is_finished:
                link.finish()
        self._links.rotate(-1)
        for link in [link for link in self._links if link.is_finished]:
            self._links.remove(link)
        now_s = self._clock.now_s()
        if now_s >= self._look_s:
            self._look(now_s)
        self.metrics.open_leases = sum(link.num_leases for link in self._links)
        if not (self.metrics.leases_add_up or self._books_are_wrong):
            self._books_are_wrong = True
            self._to_loop(BooksWrong("transfer", {"counts": str(self.metrics)}))
        self.metrics.links_up = sum(link.is_up for link in self._links)
        if more or self._pool.populate(self._granted_bytes):  # before READY, unless links have better to do
            return 0.0
        due_s = self._next_due_s()
        return None if due_s is None else max(0.0, due_s - self._clock.now_s())

    def close(self, reason: str = "the worker stops") -> None:
        """End all links and stop listening; idempotent. The driver no longer calls `step`."""
        for link in list(self._links):
            link.end(WorkerLost(reason, worker=self._me.id))
        self._network.close()

    def _accept(self) -> None:
        for channel in self._network.accept():
            self._make_room(channel.transport)
            self._add(Side.DECODE, None, 0, channel)

    def _make_room(self, transport: str) -> None:
        """Who knows the secret is done within moments; who doesn't must not keep others out by staying."""
        strangers = [link for link in self._links if link.is_stranger and link.transport == transport]
        if len(strangers) >= _MAX_STRANGERS:
            self.metrics.pushed_out += 1
            min(strangers, key=lambda link: link.began_s).end(Overloaded("too many handshakes at once"))

    def _dial(self) -> None:
        for wanted in self._wanted.due(self._clock.now_s()):
            if not wanted.sessions:
                self._close_unwanted(wanted)
                continue
            self._generation += 1
            channel = self._network.dial(wanted.addresses)
            wanted.link = self._add(Side.PREFILL, wanted.decode_worker, self._generation, channel)

    def _add(self, side: Side, dialled: WorkerRef | None, generation: int, channel: Channel) -> Link:
        link = Link(
            channel=channel,
            handshake=Handshake(
                side=side,
                me=self._me,
                facts=self._facts,
                num_blocks=self._layout.num_blocks,
                secret=self._secret,
                random=self._random,
            ),
            dialled=dialled,
            generation=generation,
            keeper=self,
            clock=self._clock,
            timeouts=self._timeouts,
            metrics=self.metrics,
            block_bytes=self._layout.block_bytes,
            strict=self._strict,
        )
        self._links.append(link)
        self._look_by(self._clock.now_s() + self._timeouts.keepalive_s)
        return link

    def _close_unwanted(self, wanted: WantedLink) -> None:
        self._wanted.forget(wanted)
        if wanted.link is not None:
            wanted.link.end(RequestCancelled("nobody wants the link"))

    # --- time: every wait that begins between two looks is at least keepalive_s long, so a look each keepalive_s,
    # and at the earliest moment that the last look found, misses none

    def _look(self, now_s: float) -> None:
        states = Counter(
            lease.state for link in self._links if link.side is not None for lease in link.side.leases
        )
        self.metrics.lease_states = tuple(
            (state.value, states[state]) for state in (*SendState, *ReceiveState)
        )
        due_s = now_s + self._timeouts.keepalive_s
        for link in list(self._links):
            if link.phase is not LinkPhase.DOWN:
                due_s = min(due_s, link.on_time(now_s))
        self._look_s = due_s

    def _look_by(self, due_s: float | None) -> None:
        if due_s is not None:
            self._look_s = min(self._look_s, due_s)

    def _next_due_s(self) -> float | None:
        dues = [self._network.next_due_s(), self._wanted.next_due_s()]
        if self._links:
            dues.append(self._look_s)
        return min((due_s for due_s in dues if due_s is not None), default=None)

    # --- the links' keeper

    def admit(self, link: Link) -> None:
        """D: of two links of one pair the later (P epoch, role generation, generation) stays: in each role P counts its
        links from 1. Raises Stale or Overloaded."""
        older = self._to_prefill.get(link.peer.id)
        if older is None:
            if len(self._to_prefill) >= self._max_links:
                raise Overloaded("full", max_links=self._max_links)
        elif older.rank >= link.rank:
            raise Stale("a later link of the pair is up", generation=older.generation)
        else:
            older.end(Stale("a later link of the pair is up", generation=link.generation))
        self._to_prefill[link.peer.id] = link

    def make_side(self, link: Link) -> Sender | Receiver:
        """P's or D's logic for a link that is now up."""
        if link.my_side is Side.PREFILL:
            return Sender(
                port=link,
                pool=self._pool,
                block_bytes=self._layout.block_bytes,
                timeouts=self._timeouts,
                clock=self._clock,
                to_engine=self._to_engine,
                metrics=self.metrics,
            )
        patience = Patience(self._timeouts.lease_s)
        intake = Intake(
            port=link,
            patience=patience,
            pool=self._pool,
            pieces=self._pieces,
            window_bytes=self._window_bytes,
            clock=self._clock,
            metrics=self.metrics,
        )
        return Receiver(
            port=link,
            intake=intake,
            patience=patience,
            num_blocks=self._layout.num_blocks,
            timeouts=self._timeouts,
            clock=self._clock,
            to_engine=self._to_engine,
            metrics=self.metrics,
        )

    def went_up(self, link: Link) -> None:
        """P tells its loop."""
        wanted = self._wanted.get(link.peer)
        if wanted is not None and wanted.link is link:
            self._wanted.went_up(wanted)
            self._tell_up(link, None)

    def went_down(self, link: Link, error: PdserveError) -> None:
        """P tells its loop, and dials again if the link is wanted."""
        if self._to_prefill.get(link.peer_name) is link:
            del self._to_prefill[link.peer_name]
            self._remember_end(link)
        for wanted in self._wanted:
            if wanted.link is link:
                told = wanted.reason
                self._wanted.went_down(wanted, error, self._clock.now_s())
                if wanted.sessions and wanted.reason != told:
                    state = messages.LinkState(
                        wanted.decode_worker, False, "", wanted.reason, link.generation
                    )
                    self._to_loop(state)

    def _remember_end(self, link: Link) -> None:
        """D: a router that doesn't know yet is told which link it was, so that it can tell it from the next one."""
        self._ended.pop(link.peer, None)
        self._ended[link.peer] = link.generation
        if len(self._ended) > _MAX_ENDED:
            del self._ended[next(iter(self._ended))]

    def _tell_up(self, link: Link, session_id: int | None) -> None:
        self._to_loop(messages.LinkState(link.peer, True, link.transport, "", link.generation, session_id))
