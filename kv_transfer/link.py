"""One link: the connection of one pair, from its handshake to its end, seen from one of its two ends.

    HELLO ------> PROOF ---(SETTLING)--> UP ------> DOWN
      +-------------+----------+-----------------------^   refused, malformed, silent, closed, replaced, unwanted

While UP, frames go to the side's own logic: Sender at P, Receiver at D. The link adds what both need: generation,
keepalive, and one place where any error ends the link, with a BYE that names it.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import Protocol

import structlog

from kv_transfer.frames import Bye, Data, Frame, HandshakeFrame, LinkHello, Ping, Pong, Proof, StaleLease
from kv_transfer.framing import encode
from kv_transfer.handshake import Handshake, Side
from kv_transfer.link_facts import STREAM
from kv_transfer.metrics import TransferMetrics, count
from kv_transfer.receiver import Receiver
from kv_transfer.sender import Sender
from kv_transfer.settling import Settling, settlings
from kv_transfer.transports.port import Channel, RemoteRead
from pdserve import errors, wire_version
from pdserve.clock import Clock
from pdserve.errors import Incompatible, InvalidRequest, LinkLost, Overloaded, PdserveError, WorkerLost
from pdserve.ids import Epoch, WorkerRef
from pdserve.kv_memory import ByteSpan
from pdserve.service.config import TimeoutsConfig

log = structlog.get_logger()


class LinkPhase(Enum):
    """Where a link is in its life."""

    HELLO = "hello"
    PROOF = "proof"
    SETTLING = "settling"
    UP = "up"
    DOWN = "down"


class LinkKeeper(Protocol):
    """Who owns the links: builds a side when one comes up, and hears of its end."""

    def admit(self, link: Link) -> None:
        """D: the peer has proven itself; raises Stale or Overloaded to refuse, ends an older link of the pair."""

    def make_side(self, link: Link) -> Sender | Receiver:
        """The logic of this end, for a link that is now up."""

    def went_up(self, link: Link) -> None: ...
    def went_down(self, link: Link, error: PdserveError) -> None: ...


class Link:
    """Transfer owner only. The sink of its channel and the port of its side.

    generation  P counts them within its epoch; D learns it from HELLO, until then 0
    strict      down rather than over another transport than the preferred one
    """

    def __init__(
        self,
        *,
        channel: Channel,
        handshake: Handshake,
        dialled: WorkerRef | None,
        generation: int,
        keeper: LinkKeeper,
        clock: Clock,
        timeouts: TimeoutsConfig,
        metrics: TransferMetrics,
        block_bytes: int,
        strict: bool,
    ) -> None:
        self.phase = LinkPhase.HELLO
        self.generation = generation
        self.side: Sender | Receiver | None = None
        self.is_proven = False  # the other side has shown that it knows the secret, if there is one
        self._channel = channel
        self._handshake = handshake
        self._dialled = dialled
        self._keeper = keeper
        self._clock = clock
        self._timeouts = timeouts
        self._metrics = metrics
        self._block_bytes = block_bytes
        self._strict = strict
        self._settling: Settling | None = None
        self._settlings: Iterator[Settling] = iter(())
        self.began_s = now_s = clock.now_s()
        self._heard_s = now_s  # before the link is up: when the handshake began
        self._heard_bytes = 0
        self._is_amid_piece = False
        self._sent_s = now_s
        if dialled is not None:
            self._send(handshake.hello(dialled, generation))

    # --- who and what

    @property
    def peer(self) -> WorkerRef:
        """The other worker; known from the start at P, from HELLO on at D."""
        if self._dialled is not None:
            return self._dialled
        assert self._handshake.theirs is not None
        return self._handshake.theirs.sender

    @property
    def peer_name(self) -> str:
        """For logs, also before HELLO; at D a claim until the proof."""
        if self._dialled is None and self._handshake.theirs is None:
            return "unknown"
        return self.peer.id

    @property
    def peer_num_blocks(self) -> int:
        assert self._handshake.theirs is not None
        return self._handshake.theirs.num_blocks

    @property
    def rank(self) -> tuple[Epoch, int, int]:
        """Of two links of one pair the one of the higher rank is the later; known once HELLO has come."""
        assert self._handshake.theirs is not None
        return self.peer.epoch, self._handshake.theirs.facts.role_generation, self.generation

    @property
    def transport(self) -> str:
        return self._channel.transport

    @property
    def checksum(self) -> str | None:
        return self._handshake.checksum

    @property
    def reads_itself(self) -> bool:
        return self._channel.reads_itself

    @property
    def can_detach(self) -> bool:
        return self._channel.can_detach

    @property
    def is_posted(self) -> bool:
        return self._channel.is_posted

    @property
    def pull_room(self) -> int:
        return self._channel.pull_room

    @property
    def num_unsent_pieces(self) -> int:
        return self._channel.num_unsent_pieces

    @property
    def my_side(self) -> Side:
        return self._handshake.side

    @property
    def is_stranger(self) -> bool:
        """Somebody who came by itself and hasn't proven anything yet."""
        return not self._is_known and self.phase is not LinkPhase.DOWN

    @property
    def _is_known(self) -> bool:
        return self._dialled is not None or self.is_proven

    @property
    def is_up(self) -> bool:
        return self.phase is LinkPhase.UP

    @property
    def num_leases(self) -> int:
        return 0 if self.side is None else len(self.side.leases)

    # --- the port of the side

    @property
    def can_send_piece(self) -> bool:
        return self._channel.can_send_piece

    def send(self, frame: Frame) -> None:
        """Queue a frame; a link that is down swallows it."""
        if self.phase is not LinkPhase.DOWN:
            self._send(frame)

    def send_piece(self, frame: Data, span: ByteSpan) -> None:
        self._channel.send_piece(encode(frame, self.generation, span.num_bytes), span)
        self._sent_s = self._clock.now_s()

    def skip_piece(self, frame: Data, num_bytes: int) -> None:
        self._channel.skip_piece(encode(frame, self.generation, num_bytes), num_bytes)
        self._sent_s = self._clock.now_s()

    def detach_piece(self) -> None:
        self._channel.detach_piece()

    def post_receive(self, tag: int, into: ByteSpan) -> None:
        self._channel.post_receive(tag, into)

    def divert(self, tag: int) -> bool:
        return self._channel.divert(tag)

    def read_remote(self, tag: int, reads: list[RemoteRead]) -> bool:
        return self._channel.read_remote(tag, reads)

    def _send(self, frame: Frame) -> None:
        self._channel.send(encode(frame, self.generation))
        self._sent_s = self._clock.now_s()

    # --- the sink of the channel

    def place(self, data: Data, generation: int, num_bytes: int) -> ByteSpan | None:
        self._is_amid_piece = True
        if not isinstance(self.side, Receiver):
            raise InvalidRequest("a piece that nobody may send here", field="kind", got="DATA")
        if generation != self.generation:
            data = Data(0, 0, 0)
        return self.side.place(data, num_bytes)

    def on_done(self, tag: int) -> None:
        assert isinstance(self.side, Receiver)
        self.side.on_done(tag)

    def on_unknown(self, what: str) -> None:
        count(self._metrics.unknown, what)

    def on_frame(self, frame: Frame, generation: int) -> None:
        self._is_amid_piece = False
        match frame:
            case Bye():
                self._end(self._refused(errors.from_failure(frame.failure)))
            case Ping():
                self.send(Pong())
                if isinstance(self.side, Sender):
                    self.side.patience.hear(frame.moves, self._clock.now_s())
            case Pong():
                pass
            case _ if isinstance(frame, HandshakeFrame):
                self._on_handshake(frame)
            case _ if self.side is None:
                raise InvalidRequest("a frame before the handshake's end", field="kind", got=frame.kind.name)
            case _ if generation != self.generation:
                count(self._metrics.stale, (self.peer_name, frame.kind.name))
                if not isinstance(frame, StaleLease):
                    self.send(StaleLease(frame.lease_id, frame.kind))
            case _:
                self.side.on_frame(frame)

    def _on_handshake(self, frame: HandshakeFrame) -> None:
        match frame, self.phase:
            case LinkHello(), LinkPhase.HELLO:
                self._on_hello(frame)
            case Proof(), LinkPhase.PROOF:
                self._on_proof(frame)
            case LinkHello(), _ if frame == self._handshake.theirs:
                pass  # once more
            case (Proof(), LinkPhase.SETTLING) | (_, LinkPhase.UP) if not isinstance(frame, LinkHello):
                pass
            case _ if self._settling is not None and not isinstance(frame, LinkHello):
                self._settling.on_frame(frame)
                self._settle()
            case _:
                raise InvalidRequest("out of the handshake's order", field="kind", got=frame.kind.name)

    def _on_hello(self, hello: LinkHello) -> None:
        handshake = self._handshake
        if handshake.side is Side.DECODE:
            self.generation = hello.generation
        handshake.accept_hello(hello, expected=self._dialled)
        self.phase = LinkPhase.PROOF
        if handshake.side is Side.DECODE:
            self._send(handshake.hello(hello.sender, self.generation))
        elif hello.generation != self.generation:
            raise errors.Stale("HELLO of another generation", wanted=self.generation, got=hello.generation)
        else:
            self._send(handshake.proof())

    def _on_proof(self, proof: Proof) -> None:
        self._handshake.accept_proof(proof)
        self.is_proven = True
        if self._handshake.side is Side.DECODE:
            self._compare_and_admit()
        else:
            self._handshake.compare_facts()
        num_bytes = self.peer_num_blocks * self._block_bytes
        self._settlings = settlings(self._channel, self._handshake, self.generation, num_bytes, self._send)
        self._go_on()

    def _go_on(self, because: str = "") -> None:
        """Try the next way for the pieces. because: why the last one can't be gone."""
        self._settling = next(self._settlings, None)
        offered = self._handshake.transports
        if self._settling is not None:
            self.phase = LinkPhase.SETTLING
            if self._settling.has_own_time:
                self._heard_s = self._clock.now_s() + self._timeouts.link_s
            self._settling.begin()
            self._settle()
        elif STREAM in offered:
            self._go_up()
        else:
            said = f"no transport that both offer works here: {because}".rstrip(": ")
            raise WorkerLost(said, offered=",".join(offered), over=self.transport)

    def _compare_and_admit(self) -> None:
        """D: its own proof goes out when the link is up; or before a misfit is told, so that P can believe it."""
        try:
            self._handshake.compare_facts()
        except Incompatible:
            self._send(self._handshake.proof())
            raise
        self._keeper.admit(self)
        self._send(self._handshake.proof())

    def _refused(self, error: PdserveError) -> PdserveError:
        """What the other's BYE means: for good it is only from one that is proven."""
        if self.is_proven or isinstance(error, Overloaded):
            return error
        said = "the other worker ended the handshake: its log says why; is its cluster.secret_file another?"
        return WorkerLost(said, said=str(error))

    def _settle(self) -> None:
        """If it is known by now: pieces move in the preferred way from here on; or, for some reason, they can't."""
        settling = self._settling
        if settling is None or (reason := settling.outcome()) is None:
            return
        if reason and self._strict:
            raise WorkerLost("the preferred transport failed", transport=settling.kind, reason=reason)
        settling.settle(reason)
        self._heard_s = self._clock.now_s()
        if reason:
            count(self._metrics.fell_back, self.peer.id)
            log.warning("link.fell_back", peer=self.peer.id, failed=settling.kind, because=reason)
            self._go_on(reason)
        else:
            self._go_up()

    def _go_up(self) -> None:
        self._settling = None
        self.side = self._keeper.make_side(self)
        self.phase = LinkPhase.UP
        self._metrics.links_opened += 1
        log.info(
            "link.up",
            side=self._handshake.side.value,
            peer=self.peer.id,
            peer_epoch=str(self.peer.epoch),
            generation=self.generation,
            transport=self.transport,
            address=self._channel.peer,
            wire=wire_version.text(self._handshake.wire),
            checksum=self.checksum,
        )
        if differ := self._handshake.different_numerics:
            log.warning("link.not_deterministic", peer=self.peer.id, **differ)
        self._keeper.went_up(self)

    # --- turns, time and the end

    def turn(self) -> bool:
        """Take in and send, at most one piece each way. True if there is more to do at once."""
        try:
            more = self._channel.receive(self)
            if self.phase is LinkPhase.SETTLING:
                self._settle()
            if self.side is not None:
                self.side.turn()
        except PdserveError as error:
            self._metrics.link_ended(error, self.peer_name if self._is_known else "unknown")
            self.end(error)
            return False
        if self.phase is LinkPhase.DOWN:
            return False
        if not more and self._channel.closed_reason is not None:
            self._end(WorkerLost("the link broke", peer=self.peer_name, reason=self._channel.closed_reason))
            return False
        self._channel.flush()
        return more or (self.side is not None and self.side.has_work)

    @property
    def is_finished(self) -> bool:
        """Down, and nothing of it touches memory any longer: it needs no further turns."""
        return self.phase is LinkPhase.DOWN and self._channel.is_idle and not self.num_leases

    def finish(self) -> None:
        """A turn of a link that is down: what it couldn't take back releases its blocks when it is over."""
        self._channel.receive(self)
        if self.side is not None:
            self.side.turn()

    def on_time(self, now_s: float) -> float:
        """Keepalive and time-outs; returns the moment of the next look that is due."""
        if self._channel.received_bytes != self._heard_bytes:
            self._heard_bytes = self._channel.received_bytes
            if self.side is not None:
                self._heard_s = now_s
                if self._is_amid_piece:
                    self.side.patience.move(now_s)
        silent_s = self._heard_s + self._timeouts.link_s
        if now_s >= silent_s:
            heard_ago_s = round(now_s - self._heard_s, 3)
            self.end(WorkerLost("the link is silent", peer=self.peer_name, silent_s=heard_ago_s))
            return silent_s
        due_s = silent_s
        if self.side is not None:
            if now_s >= self._sent_s + self._timeouts.keepalive_s:
                self._send(Ping.of(self.side.patience.moves, self._handshake.wire))
            due_s = min(due_s, self._sent_s + self._timeouts.keepalive_s)
            side_due_s = self.side.on_time(now_s)
            if side_due_s is not None:
                due_s = min(due_s, side_due_s)
            self._channel.flush()
        return due_s

    def end(self, error: PdserveError) -> None:
        """This side ends the link, and says why, though not to a stranger. Idempotent."""
        if self.phase is not LinkPhase.DOWN:
            told = error if self.is_proven else WorkerLost("not known here")
            self._send(Bye.of(errors.to_failure(told)))
            self._end(error)

    def _lost(self, error: PdserveError) -> WorkerLost:
        """What the end of the link is to its leases."""
        if self.my_side is Side.PREFILL:
            return WorkerLost("the link ended", peer=self.peer_name, reason=str(error))
        return LinkLost("the link ended", peer=self.peer_name, reason=str(error), generation=self.generation)

    def _end(self, error: PdserveError) -> None:
        if self.phase is LinkPhase.DOWN:
            return
        was_up = self.phase is LinkPhase.UP
        self.phase = LinkPhase.DOWN
        self._channel.close(str(error))
        if self.side is not None:
            self.side.on_link_end(self._lost(error))
        if was_up:
            self._metrics.links_lost += 1
        (log.info if self._is_known else log.debug)(
            "link.down", side=self._handshake.side.value, peer=self.peer_name, address=self._channel.peer,
            generation=self.generation, was_up=was_up, error=type(error).__name__, reason=str(error),
        )  # fmt: skip
        self._keeper.went_down(self, error)
