"""Transfer owners in processes of their own, over NCCL's double, which strike themselves in a call of it."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast

from kv_transfer import messages
from kv_transfer.transports.nccl import NcclNetwork
from kv_transfer.transports.nccl_device import NcclDevice
from kv_transfer.transports.nccl_port import Nccl
from kv_transfer.transports.port import Network
from kv_transfer.transports.stream import StreamNetwork
from pdserve.clock import SystemClock
from pdserve.ids import WorkerRef
from pdserve.node.nccl_double import NcclDouble
from pdserve.service.config import TimeoutsConfig
from tests.support.link_process import LinkEnd, ref

_Strike = Callable[[str], None]


class _Striking:
    """An Nccl that tells of each call before it is made."""

    def __init__(self, inner: Nccl, strike: _Strike) -> None:
        self._inner = inner
        self._strike = strike

    def __getattr__(self, call: str) -> Any:
        self._strike(call)
        return getattr(self._inner, call)


class NcclLinkEnd(LinkEnd):
    """A LinkEnd whose pieces go over NCCL's double. strike: told of each call."""

    def __init__(
        self,
        me: WorkerRef,
        folder: Path,
        timeouts: TimeoutsConfig,
        strike: _Strike = lambda call: None,
    ) -> None:
        self._strike = strike
        super().__init__(me, folder, timeouts, ("nccl", "stream"))

    def _network(self, stream: StreamNetwork, timeouts: TimeoutsConfig) -> Network:
        self.nccl = NcclDouble(self.memory)
        striking = cast(Nccl, _Striking(self.nccl, self._strike))
        self.device = NcclDevice(striking, clock=SystemClock(), timeouts=timeouts, max_comms=4)
        return NcclNetwork(stream, self.device)

    @property
    def is_moving(self) -> bool:
        """Whether a group is on its device."""
        return any(not group.over.is_set() for group in self.nccl._on_device)


def start(
    role: str, folder: Path, number: int, timeouts: TimeoutsConfig, call: str, sign: int
) -> tuple[BaseProcess, Connection]:
    """A worker "p" or "d" of this number. The first time that it is about to make this call, it says so and signals
    itself; after that it only goes on. p: fills its pool by its number.

    It takes (worker, addresses) or nothing, then lease ids, and says (lease id, whether all went well).
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(theirs, role, folder, number, timeouts, call, sign))
    process.start()
    theirs.close()
    return process, ours


def _run(
    pipe: Connection, role: str, folder: Path, number: int, timeouts: TimeoutsConfig, call: str, sign: int
) -> None:
    left = [call]

    def strike(called: str) -> None:
        if called in left:
            left.clear()
            pipe.send(called)
            os.kill(os.getpid(), sign)

    end = NcclLinkEnd(ref(role, number), folder, timeouts, strike)
    if role == "p":
        end.fill(number)
    pipe.send(end.owner.addresses)
    peer, addresses = pipe.recv()
    if role == "p":
        end.owner.handle(messages.OrderLink(1, peer, addresses))
    while True:
        end.turn()
        if pipe.poll():
            lease_id = pipe.recv()
            if role == "p":
                end.offer_all(lease_id, peer)
            else:
                end.expect_all(lease_id, peer)
        for said in list(end.seen):
            end.seen.remove(said)
            match said:
                case messages.HandedOff():
                    pipe.send((said.lease_id, end.holds_all_of(peer.epoch.nonce)))
                case messages.LeaseClosed():
                    pipe.send((said.lease_id, said.error is None))
                case messages.Retired():
                    pipe.send((said.lease_id, False))
