"""P's end of the leases of one link: offers blocks, serves pulls, confirms.

    OpenLease        Offer*            CommitLease                  ACK
    ---------> OPEN -------> OPEN ------------> COMMITTED ---------------> CONFIRM, LeaseClosed(None)
                 |  READY     |  PULL -> DATA*   |    COMMIT
                 +------------+------------------+
                   WithdrawLease, FAIL, STALE, lease_s, own error: WITHDRAW (not for FAIL), LeaseClosed(error)

A lease is ended before anybody is told, so an ACK that comes later names no live lease and is never confirmed: that
is what makes it safe to reuse the blocks. Where the channel can't detach, an ended lease is RELEASING, and closed only
when nobody reads its blocks any longer: D has said RELEASED (where it reads itself), or the sends under way are over.

Where D can't divert what comes (posted receives), every piece asked for must come, in the order asked: a piece of a
lease that is over is skipped, which sends as many bytes without meaning.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

import structlog

from kv_transfer import messages
from kv_transfer.frames import (
    MAX_READY_IDS,
    Ack,
    Commit,
    Confirm,
    Data,
    Fail,
    Frame,
    Kind,
    Pull,
    PulledPiece,
    Ready,
    Released,
    StaleLease,
    Withdraw,
)
from kv_transfer.lease import SendLease, SendState
from kv_transfer.lease_table import LeaseTable
from kv_transfer.metrics import TransferMetrics, count
from kv_transfer.patience import Patience
from kv_transfer.stuck_lease import log_if_stuck
from pdserve import errors
from pdserve.clock import Clock
from pdserve.errors import InvalidRequest, InvariantViolated, PdserveError, WorkerLost
from pdserve.ids import WorkerRef
from pdserve.kv_memory import ByteSpan, KvMemory
from pdserve.owner import Post
from pdserve.service.config import TimeoutsConfig

_MAX_QUEUED_PULLS = 8192
"""Pieces that D may have asked for and not got, on a link; an honest one is held far below by its window."""
_MAX_EARLY_FAILS = 1024
_MAX_UNDER_WAY = 1024
"""Pieces that D may have asked for and not received, as far as P knows."""

log = structlog.get_logger()


class SendPort(Protocol):
    """What the sender needs of its link."""

    @property
    def peer(self) -> WorkerRef: ...
    @property
    def checksum(self) -> str | None: ...
    @property
    def reads_itself(self) -> bool: ...
    @property
    def can_detach(self) -> bool: ...
    @property
    def is_posted(self) -> bool: ...
    @property
    def can_send_piece(self) -> bool: ...
    @property
    def num_unsent_pieces(self) -> int: ...
    def send(self, frame: Frame) -> None: ...
    def send_piece(self, frame: Data, span: ByteSpan) -> None: ...
    def skip_piece(self, frame: Data, num_bytes: int) -> None: ...
    def detach_piece(self) -> None: ...


class Sender:
    """Transfer owner only. Sans-IO: frames go to `port`, closing events to `to_engine`."""

    def __init__(
        self,
        *,
        port: SendPort,
        pool: KvMemory,
        block_bytes: int,
        timeouts: TimeoutsConfig,
        clock: Clock,
        to_engine: Post,
        metrics: TransferMetrics,
    ) -> None:
        self.leases: LeaseTable[SendLease] = LeaseTable()
        self._port = port
        self._pool = pool
        self._block_bytes = block_bytes
        self._timeouts = timeouts
        self._clock = clock
        self._to_engine = to_engine
        self._metrics = metrics
        self.patience = Patience(timeouts.lease_s)
        self._rotation: deque[SendLease] = deque()
        self._num_queued_pulls = 0
        # Whose pieces the link has and hasn't sent yet, in their order.
        self._under_way: deque[SendLease] = deque()
        self._is_link_lost = False
        self._early_fails: dict[int, PdserveError] = {}

    # --- from the engine

    def open(self, message: messages.OpenLease) -> None:
        """A prefill for this lease begins."""
        if message.lease_id in self.leases:
            lease = self.leases.live(message.lease_id)
            self._give_up(lease, InvariantViolated("a lease opened twice", lease_id=message.lease_id))
            return
        now_s = self._clock.now_s()
        lease = SendLease(
            lease_id=message.lease_id,
            num_blocks=message.num_blocks,
            num_skip=message.num_skip,
            upto=message.num_skip,
            progress_s=now_s,
            name=message.name,
        )
        self.leases.open(lease)
        self._metrics.opened_leases += 1
        failed = self._early_fails.pop(message.lease_id, None)
        if failed is not None:
            self._close(lease, failed)

    def offer(self, message: messages.Offer) -> None:
        """More blocks are complete; of a lease that was closed meanwhile it means nothing."""
        lease = self._open_lease(message.lease_id)
        if lease is None:
            return
        num_new = message.upto - lease.upto
        if num_new < 0 or len(message.block_ids) != num_new or message.upto > lease.num_blocks:
            error = InvariantViolated(
                "an offer that doesn't continue the last one",
                lease_id=lease.lease_id,
                upto=message.upto,
                num_block_ids=len(message.block_ids),
                last_upto=lease.upto,
                num_blocks=lease.num_blocks,
            )
            self._give_up(lease, error)
            return
        if num_new == 0:
            return
        if not self._awaits_peer(lease):
            lease.progress_s = self._clock.now_s()
        lease.block_ids += message.block_ids
        if not self._port.reads_itself:
            lease.upto = message.upto
            self._port.send(Ready(lease.lease_id, lease.upto))
            return
        for start in range(0, num_new, MAX_READY_IDS):
            block_ids = message.block_ids[start : start + MAX_READY_IDS]
            lease.upto += len(block_ids)
            self._port.send(Ready(lease.lease_id, lease.upto, block_ids))

    def commit(self, message: messages.CommitLease) -> None:
        """All blocks are offered and the first token is sampled."""
        lease = self._open_lease(message.lease_id)
        if lease is None:
            return
        if lease.upto != lease.num_blocks:
            error = InvariantViolated(
                "a commit before all blocks were offered",
                lease_id=lease.lease_id,
                upto=lease.upto,
                num_blocks=lease.num_blocks,
            )
            self._give_up(lease, error)
            return
        lease.enter(SendState.COMMITTED, self._clock.now_s())
        num_sent_blocks = lease.num_blocks - lease.num_skip
        self._port.send(Commit.of(lease.lease_id, num_sent_blocks, message.first_token, message.logprobs))

    def withdraw(self, message: messages.WithdrawLease) -> None:
        """The engine gives the lease up; nothing happens if it is closed already."""
        lease = self.leases.get(message.lease_id)
        if lease is not None and lease.state is not SendState.RELEASING:
            self._give_up(lease, message.error)

    # --- from D

    def on_frame(self, frame: Frame) -> None:
        """Raises InvalidRequest for a frame that D doesn't send."""
        match frame:
            case Pull():
                self._on_pull(frame)
            case Ack():
                self._on_ack(frame)
            case Fail():
                self._on_fail(frame)
            case Released():
                lease = self.leases.get(frame.lease_id)
                if lease is not None and lease.state is SendState.RELEASING:
                    self._end(lease, lease.error)
            case StaleLease():
                self._on_stale(frame)
            case _:
                raise InvalidRequest(
                    "a frame that a decode worker doesn't send", field="kind", got=frame.kind.name
                )

    def _on_pull(self, pull: Pull) -> None:
        lease = self.leases.get(pull.lease_id)
        if lease is None or lease.state is SendState.RELEASING:
            self._answer_stale(pull.lease_id, Kind.PULL)
            if self._port.is_posted:
                self._queue(_ghost(pull.lease_id), pull)
            return
        for piece in pull.pieces:
            if not self._is_offered(lease, piece):
                error = InvariantViolated(
                    "a pull outside of what was offered",
                    lease_id=lease.lease_id,
                    block=piece.block,
                    offset=piece.offset,
                    num_bytes=piece.num_bytes,
                    upto=lease.upto,
                )
                if self._port.is_posted:
                    raise error
                self._give_up(lease, error)
                return
        self._queue(lease, pull)
        lease.pulled_bytes += sum(piece.num_bytes for piece in pull.pieces)
        lease.progress_s = self._clock.now_s()
        self.patience.move(lease.progress_s)

    def _queue(self, lease: SendLease, pull: Pull) -> None:
        """Leases in rotation; or, where D can't divert, each piece in its turn."""
        self._num_queued_pulls += len(pull.pieces)
        if self._num_queued_pulls > _MAX_QUEUED_PULLS:
            raise InvalidRequest(
                "more pulled than any window allows", field="pieces", got=self._num_queued_pulls
            )
        if self._port.is_posted:
            self._rotation.extend([lease] * len(pull.pieces))
        elif not lease.pulls and pull.pieces:
            self._rotation.append(lease)
        lease.pulls.extend(pull.pieces)

    def _is_offered(self, lease: SendLease, piece: PulledPiece) -> bool:
        if not lease.num_skip <= piece.block < lease.upto:
            return False
        return piece.offset + piece.num_bytes <= self._block_bytes

    def _on_ack(self, ack: Ack) -> None:
        lease = self.leases.get(ack.lease_id)
        if lease is None or lease.state is SendState.RELEASING:
            self._answer_stale(ack.lease_id, Kind.ACK)
        elif lease.state is SendState.OPEN:
            self._give_up(lease, InvariantViolated("an ACK before COMMIT", lease_id=ack.lease_id))
        else:
            self._port.send(Confirm(lease.lease_id))
            self.patience.pass_piece(self._clock.now_s())
            self._end(lease, None)

    def _on_fail(self, fail: Fail) -> None:
        error = errors.from_failure(fail.failure)
        lease = self.leases.get(fail.lease_id)
        if lease is not None:
            if lease.state is not SendState.RELEASING:
                self._close(lease, error)
        elif not self.leases.has_ended(fail.lease_id):
            self._early_fails[fail.lease_id] = error
            if len(self._early_fails) > _MAX_EARLY_FAILS:
                del self._early_fails[next(iter(self._early_fails))]

    def _on_stale(self, stale: StaleLease) -> None:
        """D doesn't know the lease. (Stale DATA or CONFIRM are duplicates of what it has had, and no harm.)"""
        count(self._metrics.stale, (self._port.peer.id, stale.of_name))
        lease = self.leases.get(stale.lease_id)
        if lease is None or stale.of not in (Kind.READY, Kind.COMMIT, Kind.WITHDRAW):
            return
        if lease.state is SendState.RELEASING:
            self._end(lease, lease.error)
        else:
            self._end(lease, errors.Stale("the decode worker doesn't know the lease", answered=stale.of_name))

    # --- turns and time

    @property
    def has_work(self) -> bool:
        """Whether a turn could do something now."""
        return bool(self._rotation) and self._port.can_send_piece

    def turn(self) -> None:
        """Hand at most one piece to the link; leases in rotation."""
        self._note_sent()
        if not self._rotation or not self._port.can_send_piece:
            return
        lease = self._rotation.popleft()
        piece = lease.pulls.popleft()
        self._num_queued_pulls -= 1
        if lease.pulls and not self._port.is_posted:
            self._rotation.append(lease)
        self._under_way.append(lease)
        if lease.state is SendState.RELEASING or lease.lease_id not in self.leases:
            self._port.skip_piece(Data(lease.lease_id, piece.tag, 0), piece.num_bytes)
            return
        start = lease.block_ids[piece.block - lease.num_skip] * self._block_bytes + piece.offset
        span = ByteSpan(start, piece.num_bytes)
        kind = self._port.checksum
        checksum = 0 if kind is None else self._pool.checksum(kind, span) or 0
        self._port.send_piece(Data(lease.lease_id, piece.tag, checksum), span)
        lease.sent_bytes += piece.num_bytes
        lease.progress_s = self._clock.now_s()
        self.patience.pass_piece(lease.progress_s)
        self._metrics.sent_bytes += piece.num_bytes
        self._metrics.sent_pieces += 1

    def _note_sent(self) -> None:
        """Pieces that have gone; a lease that waited for the last of them is closed."""
        while len(self._under_way) > self._port.num_unsent_pieces:
            lease = self._under_way.popleft()
            if self.leases.get(lease.lease_id) is lease and lease.state is SendState.RELEASING:
                self._end(lease, lease.error)

    def on_time(self, now_s: float) -> float | None:
        """End leases whose answer stays away; returns the moment of the next look that is due."""
        due_s: float | None = None
        for lease in self.leases:
            self.patience.watch(lease, len(self.leases) + _MAX_UNDER_WAY)
            stuck_s = log_if_stuck(lease, side="prefill", peer=self._port.peer, now_s=now_s)
            due_s = stuck_s if due_s is None else min(due_s, stuck_s)
            if not self._awaits_peer(lease):
                continue
            lease_due_s = self.patience.due_s(lease)
            if now_s < lease_due_s:
                due_s = min(due_s, lease_due_s)
            elif lease.state is SendState.RELEASING:
                self._end(lease, lease.error)
            else:
                what = "ACK" if lease.state is SendState.COMMITTED else "PULL"
                waited = WorkerLost(
                    "the decode worker's answer stays away",
                    awaited=what,
                    lease_id=lease.lease_id,
                    waited_s=round(now_s - lease.progress_s, 3),
                )
                self._give_up(lease, waited)
        return due_s

    def on_link_end(self, error: PdserveError) -> None:
        """Nothing that hasn't begun is read; every lease is closed, or when the sends under way are over."""
        self._is_link_lost = True
        self._note_sent()
        for lease in self.leases:
            self._end(lease, lease.error if lease.state is SendState.RELEASING else error)

    def _awaits_peer(self, lease: SendLease) -> bool:
        if lease.state is SendState.RELEASING:
            return self._port.reads_itself
        if lease.state is SendState.COMMITTED:
            return True
        if lease.pulls:
            return True
        offered_bytes = len(lease.block_ids) * self._block_bytes
        return not self._port.reads_itself and lease.pulled_bytes < offered_bytes

    # --- ends

    def _open_lease(self, lease_id: int) -> SendLease | None:
        """The lease, if the engine may still say something about it."""
        lease = self.leases.get(lease_id)
        return lease if lease is not None and lease.state is SendState.OPEN else None

    def _give_up(self, lease: SendLease, error: PdserveError) -> None:
        """P ends the lease: D is told."""
        self._port.send(Withdraw.of(lease.lease_id, errors.to_failure(error)))
        self._close(lease, error)

    def _close(self, lease: SendLease, error: PdserveError) -> None:
        """From here on the lease is never confirmed; over at once, or when D, which reads itself, has let go."""
        if self._port.reads_itself and not self._port.can_detach and lease.block_ids:
            self._release(lease, error)
        else:
            self._end(lease, error)

    def _release(self, lease: SendLease, error: PdserveError | None) -> None:
        """Wait until nobody reads its blocks any longer."""
        lease.error = error
        if lease.state is not SendState.RELEASING:
            lease.enter(SendState.RELEASING, self._clock.now_s())

    def _end(self, lease: SendLease, error: PdserveError | None) -> None:
        """Only sends under way, if any, still read its blocks; what is left to send of it is not."""
        if lease.pulls and not self._port.is_posted:
            self._num_queued_pulls -= len(lease.pulls)
            lease.pulls.clear()
            self._rotation.remove(lease)
        if lease in self._under_way:
            if not self._port.can_detach:
                self._release(lease, error)
                return
            self._port.detach_piece()
        self.leases.end(lease.lease_id)
        if error is None:
            self._metrics.confirmed_leases += 1
        else:
            failed = self._metrics.lease_ended(error)
            (log.info if failed else log.debug)(
                "lease.failed" if failed else "lease.aborted",
                side="prefill",
                lease_id=lease.lease_id,
                **lease.name.logged,
                peer=self._port.peer.id,
                state=lease.state.value,
                error=type(error).__name__,
                reason=str(error),
            )
        self._to_engine(messages.LeaseClosed(lease.lease_id, error, lease.sent_bytes, self._is_link_lost))

    def _answer_stale(self, lease_id: int, of: Kind) -> None:
        count(self._metrics.stale, (self._port.peer.id, of.name))
        self._port.send(StaleLease(lease_id, of))


def _ghost(lease_id: int) -> SendLease:
    """A lease that is over, or never was, in the queue of pieces that must come nevertheless."""
    return SendLease(lease_id=lease_id, num_blocks=0, num_skip=0, progress_s=0.0, state=SendState.RELEASING)
