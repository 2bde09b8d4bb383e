"""Transfer owners in processes of their own, over memfd: what is needed to kill and stop either end of a link.

device_process.py has those over the doubles of NCCL and CUDA IPC.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TypeVar

from kv_transfer import messages
from kv_transfer.link_facts import LinkFacts
from kv_transfer.owner import TransferOwner
from kv_transfer.transports.cuda_ipc import IpcDevice
from kv_transfer.transports.port import Network
from kv_transfer.transports.stream import StreamNetwork
from pdserve.clock import SystemClock
from pdserve.engine.layout import KvLayout
from pdserve.ids import Epoch, WorkerRef
from pdserve.kv_memory import ByteSpan, KvMemory
from pdserve.memfd import MemfdMemory
from pdserve.service.config import TimeoutsConfig, TransportConfig

LAYOUT = KvLayout(
    num_blocks=64, kv_heads=1, layers=16, block_size=16, head_dim=64, dtype="bfloat16", item_bytes=2
)
KINDS = ("memfd", "stream")
LIMIT_S = 60.0
_CLOCK = SystemClock()

E = TypeVar("E")


class LinkEnd:
    """One worker's transfer owner, driven by whoever calls `until`. seen: all that engine and loop were told."""

    def __init__(
        self,
        me: WorkerRef,
        folder: Path,
        timeouts: TimeoutsConfig | None = None,
        kinds: tuple[str, ...] = KINDS,
    ) -> None:
        self.me = me
        self.memory = MemfdMemory(LAYOUT.pool_bytes)
        seen = self._seen(timeouts or TimeoutsConfig())
        self.stream = StreamNetwork(
            memory=seen,
            kv_listen="127.0.0.1:0",
            unix_dir=str(folder),
            prefer_unix=True,
            strict=True,
            clock=_CLOCK,
            random=random.Random(str(me)),
            ipc=self._ipc(timeouts or TimeoutsConfig()),
        )
        self.seen: list[object] = []
        self.owner = TransferOwner(
            me=me,
            facts=LinkFacts(
                layout_json=LAYOUT.wire_json(),
                weights_fingerprint="w",
                tokenizer_fingerprint="t",
                numerics="n",
                transports=kinds,
            ),
            pool=seen,
            layout=LAYOUT,
            network=self._network(self.stream, timeouts or TimeoutsConfig()),
            timeouts=timeouts or TimeoutsConfig(),
            config=TransportConfig(kinds=kinds, strict=True, piece_bytes=LAYOUT.block_bytes),
            clock=_CLOCK,
            random=random.Random(str(me)),
            to_engine=self.seen.append,
            to_loop=self.seen.append,
            secret=None,
        )

    def _seen(self, timeouts: TimeoutsConfig) -> KvMemory:
        """The pool as its links see it."""
        return self.memory

    def _ipc(self, timeouts: TimeoutsConfig) -> IpcDevice | None:
        return None

    def _network(self, stream: StreamNetwork, timeouts: TimeoutsConfig) -> Network:
        return stream

    def block(self, block_id: int) -> memoryview:
        return self.memory.view(ByteSpan(block_id * LAYOUT.block_bytes, LAYOUT.block_bytes))

    def fill(self, seed: int) -> None:
        """Every block its own bytes."""
        for block_id in range(LAYOUT.num_blocks):
            self.block(block_id)[:] = content(seed, block_id)

    def turn(self) -> None:
        """One step, and a wait for what may come, at most a moment."""
        wait_s = self.owner.step()
        self.stream.waiter().wait(0.02 if wait_s is None else min(wait_s, 0.02))

    def until(self, is_so: Callable[[], bool]) -> None:
        limit_s = _CLOCK.now_s() + LIMIT_S
        while not is_so():
            assert _CLOCK.now_s() < limit_s, self.seen[-5:]
            self.turn()

    def said(self, kind: type[E]) -> list[E]:
        return [said for said in self.seen if isinstance(said, kind)]

    def offer_all(self, lease_id: int, decode: WorkerRef) -> None:
        """P: a lease over the whole pool, committed."""
        block_ids = tuple(range(LAYOUT.num_blocks))
        self.owner.handle(messages.OpenLease(lease_id, decode, len(block_ids), 0))
        self.owner.handle(messages.Offer(lease_id, len(block_ids), block_ids))
        self.owner.handle(messages.CommitLease(lease_id, 7, None))

    def expect_all(self, lease_id: int, prefill: WorkerRef) -> None:
        """D: the grant for it, over the whole pool in reverse order."""
        block_ids = tuple(reversed(range(LAYOUT.num_blocks)))
        self.owner.handle(messages.ExpectLease(lease_id, prefill, 0, block_ids))

    def holds_all_of(self, seed: int) -> bool:
        """D: whether the pool has what P of this seed had, in reverse order."""
        last = LAYOUT.num_blocks - 1
        return all(
            self.block(last - block_id) == content(seed, block_id) for block_id in range(LAYOUT.num_blocks)
        )


def content(seed: int, block_id: int) -> bytes:
    return random.Random(seed * 1000 + block_id).randbytes(LAYOUT.block_bytes)


def ref(name: str, number: int) -> WorkerRef:
    return WorkerRef(name, Epoch(number, number))


def start_prefill(
    folder: Path, number: int, decode: LinkEnd, timeouts: TimeoutsConfig | None = None
) -> tuple[BaseProcess, Connection]:
    """A process that has filled its pool by `number`, and offers all of it for each lease id that is sent to it.

    It says the transport of its link, then how each lease ended: "" = confirmed.
    """
    return _start(_prefill, folder, number, decode.me, decode.owner.addresses, timeouts)


def start_decode(folder: Path, number: int, stops_at: int) -> tuple[BaseProcess, Connection]:
    """A process that says its addresses, then expects each lease whose (id, source) is sent to it.

    Once so many blocks are read it says "reading" and stops itself (SIGSTOP); in the end, whether it has all of the
    source's number, or how the lease ended.
    """
    return _start(_decode, folder, number, stops_at)


def _start(target: Callable[..., None], *arguments: object) -> tuple[BaseProcess, Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *arguments))
    process.start()
    theirs.close()
    return process, ours


def _prefill(
    pipe: Connection,
    folder: Path,
    number: int,
    decode: WorkerRef,
    addresses: tuple[str, ...],
    timeouts: TimeoutsConfig | None,
) -> None:
    end = LinkEnd(ref("p", number), folder, timeouts)
    end.fill(number)
    end.owner.handle(messages.OrderLink(1, decode, addresses))
    end.until(lambda: bool(end.said(messages.LinkState)))
    state = end.said(messages.LinkState)[0]
    pipe.send(state.transport or state.reason)
    while True:
        end.turn()
        if pipe.poll():
            end.offer_all(pipe.recv(), decode)
        for closed in end.said(messages.LeaseClosed):
            end.seen.remove(closed)
            pipe.send("" if closed.error is None else str(closed.error))


def _decode(pipe: Connection, folder: Path, number: int, stops_at: int) -> None:
    end = LinkEnd(ref("d", number), folder)
    pipe.send(end.owner.addresses)
    source = 0
    while True:
        end.turn()
        if pipe.poll():
            lease_id, prefill = pipe.recv()
            source = prefill.epoch.nonce
            end.expect_all(lease_id, prefill)
        for said in list(end.seen):
            end.seen.remove(said)
            match said:
                case messages.PullProgress() if stops_at and said.num_received >= stops_at:
                    stops_at = 0
                    pipe.send("reading")
                    os.kill(os.getpid(), signal.SIGSTOP)
                case messages.HandedOff():
                    pipe.send(end.holds_all_of(source))
                case messages.Retired():
                    pipe.send(type(said.error).__name__)
