"""One worker's transfer owner in a process of its own, over a pool on the device: what links.py commands by a pipe.

in    (worker, addresses)         once, at P: the pair
      ("offer", lease id, n)      P: a lease over the first n blocks, committed
      ("expect", lease id, n)     D: the grant for it
out   ("addresses", …)            once
      ("up", transport or reason) P, at each change
      ("begun", lease id)         D: the first block has come
      ("end", lease id, {…})      how a lease ended; at D of a hand-off: seconds, bytes, whether each byte is right
      ("freed", seconds)          since the end of a link until nothing of it is left on the device
"""

from __future__ import annotations

import os
import random
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from kv_transfer import messages
from kv_transfer.link_facts import STREAM, LinkFacts
from kv_transfer.owner import TransferOwner
from kv_transfer.transports.stream import StreamNetwork
from pdserve.clock import SystemClock
from pdserve.engine.device.devices import CudaDevice
from pdserve.engine.layout import KvLayout
from pdserve.ids import Epoch, WorkerRef
from pdserve.kv_memory import ByteSpan, KvMemory
from pdserve.memfd import MemfdMemory
from pdserve.node.link_devices import LinkDevices, open_devices
from pdserve.service.config import Config, TransportConfig

_CLOCK = SystemClock()
_WAIT_S = 0.005


def ref(role: str, number: int) -> WorkerRef:
    """The number-th process of a role."""
    return WorkerRef(role, Epoch(number, number))


def run_end(
    pipe: Connection,
    role: str,
    number: int,
    kind: str,
    layout: KvLayout,
    gpu: int | None,
    environ: dict[str, str],
    folder: Path,
) -> None:
    """Until the pipe breaks, or an error ends the process. gpu: None = doubles; environ: of this process, besides."""
    os.environ.update(environ)
    _End(pipe, role, number, kind, layout, gpu, folder).serve()


class _End:
    def __init__(
        self,
        pipe: Connection,
        role: str,
        number: int,
        kind: str,
        layout: KvLayout,
        gpu: int | None,
        folder: Path,
    ) -> None:
        self._pipe = pipe
        self._role = role
        self._layout = layout
        self._peer: WorkerRef | None = None
        self._num_asked: dict[int, int] = {}
        self._last_begun = 0
        self._lost_s: float | None = None
        self._num_lost = 0
        self._memory, self._bytes = _memory(layout, gpu)
        if role == "p":
            self._bytes.view(layout.num_blocks, -1).copy_(_content(layout, self._bytes.device))
        config = Config(transport=TransportConfig(kinds=(kind,), strict=True))
        self._devices: LinkDevices = open_devices(config, self._memory, layout.block_bytes, _CLOCK)
        seen = self._devices.seen(self._memory)
        self._stream = StreamNetwork(
            memory=seen, kv_listen="127.0.0.1:0", unix_dir=str(folder), prefer_unix=True, strict=True,
            clock=_CLOCK, random=random.Random(f"{role}{number}"), ipc=self._devices.ipc,
        )  # fmt: skip
        self._seen: list[object] = []
        self._owner = TransferOwner(
            me=ref(role, number),
            facts=LinkFacts(
                layout_json=layout.wire_json(), weights_fingerprint="w", tokenizer_fingerprint="t", numerics="n",
                checksums=seen.checksums if kind == STREAM else (), transports=(kind,),
            ),
            pool=seen, layout=layout,
            network=self._devices.over(self._stream),
            timeouts=config.timeouts, config=config.transport, clock=_CLOCK, random=random.Random(f"{role}{number}"),
            to_engine=self._seen.append, to_loop=self._seen.append, secret=None,
        )  # fmt: skip
        pipe.send(("addresses", self._owner.addresses))

    def serve(self) -> None:
        while True:
            while self._pipe.poll():
                self._on_command(self._pipe.recv())
            wait_s = self._owner.step()
            said, self._seen[:] = list(self._seen), []
            for each in said:
                self._tell(each)
            self._watch_links()
            if not said:
                self._stream.waiter().wait(_WAIT_S if wait_s is None else min(wait_s, _WAIT_S))

    def _on_command(self, command: tuple[object, ...]) -> None:
        match command:
            case ("pair", WorkerRef() as peer, tuple() as addresses):
                self._peer = peer
                self._owner.handle(messages.CancelAllLinks(1))
                self._owner.handle(messages.OrderLink(1, peer, addresses))
            case ("offer", int(lease_id), int(num_blocks)):
                assert self._peer is not None
                blocks = tuple(range(num_blocks))
                self._owner.handle(messages.OpenLease(lease_id, self._peer, num_blocks, 0))
                self._owner.handle(messages.Offer(lease_id, num_blocks, blocks))
                self._owner.handle(messages.CommitLease(lease_id, 7, None))
            case ("expect", int(lease_id), int(num_blocks), WorkerRef() as peer):
                self._bytes.zero_()
                self._num_asked[lease_id] = num_blocks
                self._owner.handle(
                    messages.ExpectLease(lease_id, peer, 0, tuple(reversed(range(num_blocks))))
                )
            case _:
                raise AssertionError(command)

    def _tell(self, said: object) -> None:
        match said:
            case messages.LinkState():
                self._pipe.send(("up", said.transport if said.up else "", said.reason))
            case messages.PullProgress() if said.lease_id != self._last_begun:
                self._last_begun = said.lease_id
                self._pipe.send(("begun", said.lease_id))
            case messages.HandedOff():
                found = {"s": said.transfer_s, "bytes": said.received_bytes, "transport": said.transport}
                self._pipe.send(("end", said.lease_id, found | {"right": self._is_right(said.lease_id)}))
            case messages.Retired() | messages.LeaseClosed():
                error = "" if said.error is None else str(said.error)
                self._pipe.send(("end", said.lease_id, {"error": error}))

    def _is_right(self, lease_id: int) -> bool:
        num_blocks = self._num_asked[lease_id]
        got = self._bytes.view(self._layout.num_blocks, -1)[:num_blocks].flip(0)
        return bool(torch.equal(got, _content(self._layout, got.device)[:num_blocks]))

    def _watch_links(self) -> None:
        """How long the device keeps what a link that has ended had there."""
        lost, counts = self._owner.metrics.links_lost, self._devices.counts()
        if lost > self._num_lost:
            self._num_lost, self._lost_s = lost, _CLOCK.now_s()
        if self._lost_s is not None and not (
            counts.num_communicators or counts.num_mapped_pools or counts.num_staging_copies
        ):
            self._pipe.send(("freed", _CLOCK.now_s() - self._lost_s))
            self._lost_s = None


def _memory(layout: KvLayout, gpu: int | None) -> tuple[KvMemory, torch.Tensor]:
    """For the links, and the same bytes for torch."""
    if gpu is None:
        memory = MemfdMemory(layout.pool_bytes)
        return memory, torch.frombuffer(memory.view(ByteSpan(0, layout.pool_bytes)), dtype=torch.uint8)
    values, seen = CudaDevice(gpu).pool(layout.pool_bytes, 0)
    return seen, values


def _content(layout: KvLayout, device: torch.device) -> torch.Tensor:
    """[num_blocks, block_bytes]: every block its own bytes, and every 256 of them others."""
    blocks = torch.arange(layout.num_blocks, device=device).view(-1, 1) * 37
    places = torch.arange(layout.block_bytes, device=device).view(1, -1)
    return ((blocks + places + places // 256 * 11) % 251).to(torch.uint8)
