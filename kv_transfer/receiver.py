"""D's end of the leases of one link: pulls what is offered into the granted blocks, acknowledges, waits for CONFIRM.

    ExpectLease         READY           all written, COMMIT          CONFIRM
    -----------> GRANTED -----> PULLING ---------------------> ACKED ---------> HandedOff
                   |              | PULL, DATA           ACK     |
                   +--------------+------------------------------+
                     EndLease, WITHDRAW, STALE, lease_s, own error, end of the link: Retired(error)

A lease ends here in one turn: what is still to come of its piece in flight is diverted, then it says Retired. What
can't be diverted keeps the blocks in quarantine until it is over: LeaseReleased.
How the bytes come is in intake.py.
"""

from __future__ import annotations

from typing import Protocol

import structlog

from kv_transfer import messages
from kv_transfer.early_frames import EarlyFrames
from kv_transfer.frames import (
    Ack,
    Commit,
    Confirm,
    Data,
    Fail,
    Frame,
    Kind,
    Ready,
    Released,
    StaleLease,
    Withdraw,
)
from kv_transfer.intake import Intake, IntakePort
from kv_transfer.lease import ReceiveLease, ReceiveState
from kv_transfer.lease_table import LeaseTable
from kv_transfer.metrics import TransferMetrics, count
from kv_transfer.patience import Patience
from kv_transfer.stuck_lease import log_if_stuck
from pdserve import errors
from pdserve.clock import Clock
from pdserve.errors import InvalidRequest, InvariantViolated, PdserveError, WorkerLost
from pdserve.kv_memory import ByteSpan
from pdserve.owner import Post
from pdserve.service.config import TimeoutsConfig

log = structlog.get_logger()


class ReceivePort(IntakePort, Protocol):
    """What the receiver needs of its link."""

    @property
    def transport(self) -> str: ...
    @property
    def peer_num_blocks(self) -> int: ...
    @property
    def can_detach(self) -> bool: ...
    def end(self, error: PdserveError) -> None: ...


class Receiver:
    """Transfer owner only. Sans-IO: frames go to `port`, closing events to `to_engine`."""

    def __init__(
        self,
        *,
        port: ReceivePort,
        intake: Intake,
        patience: Patience,
        num_blocks: int,
        timeouts: TimeoutsConfig,
        clock: Clock,
        to_engine: Post,
        metrics: TransferMetrics,
    ) -> None:
        self.leases: LeaseTable[ReceiveLease] = LeaseTable()
        self._port = port
        self._intake = intake
        self._num_blocks = num_blocks
        self._timeouts = timeouts
        self._clock = clock
        self._to_engine = to_engine
        self._metrics = metrics
        self.patience = patience
        self._told_moves = 0
        self._early = EarlyFrames(hold_s=timeouts.keepalive_s)

    # --- from the engine

    def expect(self, message: messages.ExpectLease) -> None:
        """A grant was given; frames about it that came before the engine's word are taken up now."""
        num_expected = len(message.block_ids)
        lease = ReceiveLease(
            lease_id=message.lease_id,
            source=message.source,
            num_expected=num_expected,
            num_skip=message.num_skip,
            block_ids=message.block_ids,
            upto=message.num_skip,
            progress_s=self._clock.now_s(),
            pieces=bytearray(num_expected * self._intake.pieces.pieces_per_block),
            name=message.name,
        )
        self.leases.open(lease)
        self._metrics.opened_leases += 1
        if any(not 0 <= block_id < self._num_blocks for block_id in message.block_ids):
            self._fail(lease, InvariantViolated("a block outside of the pool", lease_id=lease.lease_id))
            return
        for frame in self._early.take(message.lease_id):
            self.on_frame(frame)

    def end(self, message: messages.EndLease) -> None:
        """The engine ends the lease; nothing happens if it is over already."""
        lease = self.leases.get(message.lease_id)
        if lease is not None:
            self._fail(lease, message.error)

    # --- from P

    def on_frame(self, frame: Frame) -> None:
        """Raises InvalidRequest for a frame that P doesn't send."""
        match frame:
            case Data():
                self._on_data(frame)
            case Ready() | Commit() | Withdraw():
                lease = self.leases.get(frame.lease_id)
                if lease is not None:
                    self._on_news(lease, frame)
                elif not self.leases.has_ended(frame.lease_id):
                    self._early.keep(frame, self._clock.now_s())
                elif not isinstance(frame, Withdraw):
                    self._answer_stale(frame.lease_id, frame.kind)
            case Confirm():
                lease = self.leases.get(frame.lease_id)
                if lease is None:
                    self._answer_stale(frame.lease_id, frame.kind)
                else:
                    self._on_confirm(lease)
            case StaleLease():
                self._on_stale(frame)
            case _:
                raise InvalidRequest(
                    "a frame that a prefill worker doesn't send", field="kind", got=frame.kind.name
                )

    def _on_news(self, lease: ReceiveLease, frame: Ready | Commit | Withdraw) -> None:
        match frame:
            case Ready():
                self._on_ready(lease, frame)
            case Commit():
                self._on_commit(lease, frame)
            case Withdraw():
                self._retire(lease, errors.from_failure(frame.failure))

    def place(self, data: Data, num_bytes: int) -> ByteSpan | None:
        """Where this piece goes; None if nobody waits for it. Raises InvalidRequest on a size not asked for."""
        return self._intake.place(data, num_bytes)

    def on_done(self, tag: int) -> None:
        """A read is done, or a posted receive is over."""
        lease = self._intake.on_done(tag)
        if lease is not None:
            self._ack_if_filled(lease)

    def _on_ready(self, lease: ReceiveLease, ready: Ready) -> None:
        if ready.upto <= lease.upto:
            return
        if ready.upto > lease.num_skip + lease.num_expected:
            error = InvariantViolated(
                "more blocks offered than granted",
                lease_id=lease.lease_id,
                upto=ready.upto,
                want=lease.num_skip + lease.num_expected,
            )
            self._fail(lease, error)
            return
        if self._port.reads_itself:
            if ready.upto - len(ready.block_ids) != lease.upto:
                self._fail(
                    lease, InvariantViolated("an offer with a gap", lease_id=lease.lease_id, upto=ready.upto)
                )
                return
            if max(ready.block_ids) >= self._port.peer_num_blocks:
                raise InvalidRequest(
                    "an offered block outside of the peer's pool", field="block_ids", got=max(ready.block_ids)
                )
            lease.remote_ids += ready.block_ids
        lease.upto = ready.upto
        now_s = self._clock.now_s()
        if lease.num_asked == lease.num_written:
            lease.progress_s = now_s
        if lease.state is ReceiveState.GRANTED:
            lease.enter(ReceiveState.PULLING, now_s)
        self._intake.want(lease)

    def _on_data(self, data: Data) -> None:
        if self._intake.is_orphan(data.tag):
            self._intake.on_done(data.tag)
            return
        arrival = self._intake.on_data(data)
        if arrival is None:
            self._answer_stale(data.lease_id, Kind.DATA)
        elif isinstance(arrival, PdserveError):
            self._fail(self.leases.live(data.lease_id), arrival)
        else:
            self._ack_if_filled(arrival)

    def _on_commit(self, lease: ReceiveLease, commit: Commit) -> None:
        if lease.commit is not None:
            return
        if commit.num_blocks != lease.num_expected:
            error = InvariantViolated(
                "commit of another size",
                lease_id=lease.lease_id,
                want=lease.num_expected,
                got=commit.num_blocks,
            )
            self._fail(lease, error)
            return
        lease.commit = commit
        lease.commit_s = lease.progress_s = self._clock.now_s()
        self._ack_if_filled(lease)

    def _ack_if_filled(self, lease: ReceiveLease) -> None:
        """Called after every piece and after COMMIT; the sequence runs only after CONFIRM."""
        if lease.commit is None or not lease.is_filled or lease.state is ReceiveState.ACKED:
            return
        lease.enter(ReceiveState.ACKED, self._clock.now_s())
        self._port.send(Ack(lease.lease_id))

    def _on_confirm(self, lease: ReceiveLease) -> None:
        if lease.state is not ReceiveState.ACKED:
            self._fail(lease, InvariantViolated("CONFIRM before ACK", lease_id=lease.lease_id))
            return
        assert lease.commit is not None and lease.commit_s is not None
        now_s = self._clock.now_s()
        last_s = lease.commit_s if lease.last_data_s is None else lease.last_data_s
        first_s = last_s if lease.first_pull_s is None else lease.first_pull_s
        transfer_s = last_s - first_s
        self.leases.end(lease.lease_id)
        self._metrics.handed_off_leases += 1
        self._metrics.received_s += transfer_s
        self._to_engine(
            messages.HandedOff(
                lease_id=lease.lease_id,
                first_token=lease.commit.first_token,
                logprobs=lease.commit.logprobs,
                received_bytes=lease.received_bytes,
                transport=self._port.transport,
                transfer_s=transfer_s,
                transfer_exposed_s=max(0.0, last_s - lease.commit_s),
                commit_s=now_s - max(last_s, lease.commit_s),
                confirmed_s=now_s,
                begun_s=lease.first_pull_s,
            )
        )

    def _on_stale(self, stale: StaleLease) -> None:
        """P doesn't know the lease: it will get nothing more, or never be confirmed."""
        count(self._metrics.stale, (self._port.peer.id, stale.of_name))
        lease = self.leases.get(stale.lease_id)
        if lease is not None and stale.of in (Kind.PULL, Kind.ACK):
            self._retire(
                lease, errors.Stale("the prefill worker doesn't hold the lease", answered=stale.of_name)
            )

    # --- turns and time

    @property
    def has_work(self) -> bool:
        """Whether a turn could do something now."""
        return self._intake.has_work

    def turn(self) -> None:
        """Ask for, or read, what the window allows, and report what grew."""
        for read in self._intake.turn():
            self._ack_if_filled(read)
        for lease in self._intake.take_grown():
            if lease.lease_id in self.leases and lease.num_full_blocks > lease.num_reported_blocks:
                lease.num_reported_blocks = lease.num_full_blocks
                self._tell_progress(lease)
        for lease_id in self._intake.take_released():
            self._to_engine(messages.LeaseReleased(lease_id))
            self._let_go(lease_id)

    def on_time(self, now_s: float) -> float | None:
        """End leases whose answer stays away; returns the moment of the next look that is due."""
        for lease_id, kind in self._early.expired(now_s):
            self._answer_stale(lease_id, kind)
        due_s = self._early.next_due_s()
        has_moved, self._told_moves = self.patience.moves > self._told_moves, self.patience.moves
        for lease in self.leases:
            self.patience.watch(lease, len(self.leases) + self._intake.num_asked)
            stuck_s = log_if_stuck(lease, side="decode", peer=self._port.peer, now_s=now_s)
            due_s = stuck_s if due_s is None else min(due_s, stuck_s)
            awaited = self._awaited(lease)
            if has_moved and (awaited is None or not self.patience.is_passed_over(lease)):
                lease.num_waits += 1
                self._tell_progress(lease)
            if awaited is None:
                continue
            lease_due_s = self.patience.due_s(lease)
            if now_s < lease_due_s:
                due_s = min(due_s, lease_due_s)
                continue
            error = WorkerLost(
                "the prefill worker's answer stays away",
                awaited=awaited,
                lease_id=lease.lease_id,
                waited_s=round(now_s - lease.progress_s, 3),
            )
            if awaited == "DATA" and self._port.is_posted:
                self._port.end(error)  # a posted receive can only be taken back with its connection
                return None
            self._fail(lease, error)
        return due_s

    def _tell_progress(self, lease: ReceiveLease) -> None:
        self._to_engine(messages.PullProgress(lease.lease_id, lease.num_full_blocks, lease.num_waits))

    def _awaited(self, lease: ReceiveLease) -> str | None:
        """What P owes this lease now; None: nothing that the link could measure."""
        if lease.state is ReceiveState.ACKED:
            return "CONFIRM"
        if lease.num_asked > lease.num_written:
            return "DATA"
        if lease.commit is not None and lease.upto < lease.num_skip + lease.num_expected:
            return "READY"
        return None

    def on_link_end(self, error: PdserveError) -> None:
        """Every lease fails."""
        for lease in self.leases:
            self._retire(lease, error)

    # --- ends

    def _fail(self, lease: ReceiveLease, error: PdserveError) -> None:
        """D ends the lease: P is told."""
        self._port.send(Fail.of(lease.lease_id, errors.to_failure(error)))
        self._retire(lease, error)

    def _retire(self, lease: ReceiveLease, error: PdserveError) -> None:
        quarantine = self._intake.end(lease)
        self.leases.end(lease.lease_id)
        failed = self._metrics.lease_ended(error)
        (log.info if failed else log.debug)(
            "lease.failed" if failed else "lease.aborted",
            side="decode",
            lease_id=lease.lease_id,
            **lease.name.logged,
            peer=self._port.peer.id,
            state=lease.state.value,
            error=type(error).__name__,
            reason=str(error),
        )
        if not quarantine:
            self._let_go(lease.lease_id)
        self._to_engine(messages.Retired(lease.lease_id, error, quarantine))

    def _let_go(self, lease_id: int) -> None:
        """Tell P, if it waits for that, that its blocks will not be read again."""
        if self._port.reads_itself and not self._port.can_detach:
            self._port.send(Released(lease_id))

    def _answer_stale(self, lease_id: int, of: Kind) -> None:
        count(self._metrics.stale, (self._port.peer.id, of.name))
        self._port.send(StaleLease(lease_id, of))
