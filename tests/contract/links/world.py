"""A small world for the link contract: transfer owners on one transport, driven by the test, under virtual time."""

from __future__ import annotations

import heapq
import random
import select
import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kv_transfer import messages
from kv_transfer.link_facts import LinkFacts
from kv_transfer.owner import TransferOwner
from kv_transfer.transports.cuda_ipc import IpcDevice
from kv_transfer.transports.nccl import NcclNetwork
from kv_transfer.transports.nccl_device import NcclDevice
from kv_transfer.transports.port import Network
from kv_transfer.transports.staged import StagedNetwork
from kv_transfer.transports.staging import Staging
from kv_transfer.transports.stream import StreamNetwork
from kv_transfer.transports.stream_tls import LinkTls
from pdserve.engine.layout import KvLayout
from pdserve.ids import Epoch, WorkerRef
from pdserve.kv_memory import ByteSpan, HostMemory
from pdserve.memfd import MemfdMemory
from pdserve.service.config import TimeoutsConfig, TransportConfig
from pdserve.service.tls_config import TlsConfig
from tests.contract.links.node import Node as Node
from tests.support.certificates import link_certificates
from tests.support.faulty_link import Fault, FaultyNetwork
from tests.support.loop_copies import LoopCopies
from tests.support.loop_cuda_ipc import IpcFabric, LoopCudaIpc
from tests.support.loop_nccl import LoopNccl, NcclFabric
from tests.support.memories import DeviceMemory, StagedMemory
from tests.support.memory_channel import WireKind
from tests.support.memory_network import MemoryNetwork
from tests.support.virtual_clock import VirtualClock

TRANSPORTS = (
    "stream-unix",
    "stream-tcp",
    "stream-tls",
    "memfd",
    "memory",
    "memory-one-sided",
    "posted",
    "nccl",
    "cuda_ipc",
    "staged",
)
DIVERTING = ("stream-unix", "stream-tcp", "stream-tls", "memory", "staged")
"""Those on which a piece may be lost, repeated or late without anybody being confused."""
_AGREED = ("memfd", "nccl", "cuda_ipc")
"""What is agreed upon over a stream."""
LAYOUT = KvLayout(
    num_blocks=64, kv_heads=2, layers=3, block_size=4, head_dim=64, dtype="float32", item_bytes=4
)
_QUIET_S = 0.002
_NUM_SPARE_SLOTS = 4

FaultMaker = Callable[[str, bool], Fault | None]
"""(node's name, whether it dialled) -> the plan for a new channel of that node."""


def facts(**changes: object) -> LinkFacts:
    """What equal workers say."""
    plain = LinkFacts(
        layout_json=LAYOUT.wire_json(), weights_fingerprint="w", tokenizer_fingerprint="t", numerics="n"
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


class World:
    """All nodes, their clock, and the loop that drives them."""

    def __init__(self, transport: str, *, seed: int = 1, faults: FaultMaker | None = None) -> None:
        self.transport = transport
        self.random = random.Random(seed)
        self.clock = VirtualClock()
        self.nodes: list[Node] = []
        self._faults = faults
        self._unix_dir = tempfile.TemporaryDirectory(prefix="pdl")
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._num_scheduled = 0
        self.wires = MemoryNetwork(
            clock=self.clock,
            schedule=self._schedule,
            delay=lambda: self.random.random() * 1e-4,
            kind=WireKind(transport) if self._is_in_memory else WireKind.TWO_SIDED,
        )
        self.fabric = NcclFabric(
            schedule=self._schedule, delay=lambda: self.random.random() * 1e-4, random=self.random
        )
        self.ipc = IpcFabric(schedule=self._schedule, delay=lambda: self.random.random() * 1e-4)
        self.copies: dict[str, LoopCopies] = {}
        self.staging: dict[str, Staging] = {}

    @property
    def shown_as(self) -> str:
        """What its links say that they run over."""
        return "stream-unix" if self.transport == "staged" else self.transport

    @property
    def reads_itself(self) -> bool:
        return self.transport in ("memory-one-sided", "memfd", "cuda_ipc")

    @property
    def _is_in_memory(self) -> bool:
        return self.transport not in ("nccl", "cuda_ipc", "staged") and self.transport in [
            kind.value for kind in WireKind
        ]

    def node(
        self,
        name: str,
        *,
        start_ns: int = 1,
        epoch: Epoch | None = None,
        layout: KvLayout = LAYOUT,
        link_facts: LinkFacts | None = None,
        secret: bytes | None = None,
        max_links: int = 16,
        timeouts: TimeoutsConfig | None = None,
        piece_bytes: int = 5000,
        pull_window_bytes: int = 16_384,
        prefer_unix: bool | None = None,
        strict: bool = False,
        memory: HostMemory | None = None,
        tls: TlsConfig | None = None,
        is_staged: bool | None = None,
    ) -> Node:
        """A new worker in this world.

        epoch   of a process that was here before, in another role now
        memory  for its pool, instead of what the transport wants
        tls     of its links over TCP, instead of what the transport wants
        is_staged  whether its host can't see its pool, instead of what the transport wants
        """
        ref = WorkerRef(name, epoch or Epoch(start_ns, self.random.getrandbits(64)))
        if link_facts is None:
            preferred = (self.transport, "stream") if self.transport in _AGREED else None
            link_facts = facts(transports=preferred)
        make: type[HostMemory] = MemfdMemory if self.transport == "memfd" else HostMemory
        staging: Staging | None = None
        if self.transport == "posted":
            device = DeviceMemory(layout.pool_bytes, link_facts.checksums or (link_facts.checksum,))
            staged = StagedMemory(device)
        elif is_staged or (is_staged is None and self.transport == "staged"):
            staging = self._stage(name, layout, max_links, timeouts or TimeoutsConfig())
            staged = StagedMemory(self.copies[name].memory, staging.memory)
        else:
            staged = StagedMemory(memory or make(layout.pool_bytes))
        staged.at(ByteSpan(0, layout.pool_bytes))[:] = self.random.randbytes(layout.pool_bytes)
        has_nccl = "nccl" in (link_facts.transports or ())
        network = self._network(
            name, staged, prefer_unix, tls, timeouts or TimeoutsConfig(), max_links, has_nccl
        )
        if staging is not None:
            network = StagedNetwork(network, staging)
        to_engine: list[object] = []
        to_loop: list[object] = []
        owner = TransferOwner(
            me=ref,
            facts=link_facts,
            pool=staged,
            layout=layout,
            network=network,
            timeouts=timeouts or TimeoutsConfig(),
            config=TransportConfig(
                piece_bytes=piece_bytes, pull_window_bytes=pull_window_bytes, strict=strict
            ),
            clock=self.clock,
            random=self.random,
            to_engine=to_engine.append,
            to_loop=to_loop.append,
            secret=secret,
            max_links=max_links,
        )
        node = Node(ref, owner, network, staged, layout, to_engine, to_loop)
        self.nodes.append(node)
        return node

    def _network(
        self,
        name: str,
        memory: StagedMemory,
        prefer_unix: bool | None,
        tls: TlsConfig | None,
        timeouts: TimeoutsConfig,
        max_links: int,
        has_nccl: bool,
    ) -> Network:
        network: Network
        if tls is None and self.transport == "stream-tls":
            tls = link_certificates()
        ipc: IpcDevice | None = None
        if self.transport == "cuda_ipc":
            loop = LoopCudaIpc(self.ipc, name, memory, wake=lambda: None)
            ipc = IpcDevice(loop, clock=self.clock, lease_s=timeouts.lease_s)
        if self._is_in_memory:
            network = self.wires.join(name, memory=memory, wake=lambda: None)
        else:
            network = StreamNetwork(
                memory=memory,
                kv_listen="127.0.0.1:0",
                unix_dir=self._unix_dir.name,
                prefer_unix=self.transport in ("stream-unix", "staged", *_AGREED)
                if prefer_unix is None
                else prefer_unix,
                strict=False,
                clock=self.clock,
                random=self.random,
                tls=None if tls is None else LinkTls(tls),
                ipc=ipc,
            )
            if has_nccl:
                nccl = LoopNccl(self.fabric, name, memory, wake=lambda: None, max_comms=max_links)
                device = NcclDevice(nccl, clock=self.clock, timeouts=timeouts, max_comms=max_links)
                network = NcclNetwork(network, device)
        if self._faults is None:
            return network
        make_fault = self._faults
        return FaultyNetwork(network, self.clock, lambda dialled: make_fault(name, dialled), memory)

    def _stage(self, name: str, layout: KvLayout, max_links: int, timeouts: TimeoutsConfig) -> Staging:
        """A device of this name, and the memory that its pieces go through: hardly more than one for each link."""
        copies = self.copies[name] = LoopCopies(
            DeviceMemory(layout.pool_bytes),
            schedule=self._schedule,
            delay=lambda: self.random.random() * 1e-4,
            wake=lambda: None,
        )
        made = self.staging[name] = Staging(
            copies,
            copies.memory,
            block_bytes=layout.block_bytes,
            staging_bytes=(max_links + _NUM_SPARE_SLOTS) * layout.block_bytes,
            max_links=max_links,
            clock=self.clock,
            lease_s=timeouts.lease_s,
        )
        return made

    # --- time and turns

    def _schedule(self, delay_s: float, call: Callable[[], None]) -> None:
        self._num_scheduled += 1
        heapq.heappush(self._due, (self.clock.now_s() + delay_s, self._num_scheduled, call))

    def run(self, until: Callable[[], bool], *, for_s: float = 60.0) -> None:
        """Give turns, and let time pass when nothing moves, until the condition holds; at most so long."""
        end_s = self.clock.now_s() + for_s
        while not until():
            dues, is_busy = self._turns()
            if is_busy or until():
                continue
            if self._wait_sockets():
                continue
            due_s = min(dues, default=None)
            assert due_s is not None and due_s <= end_s, (
                f"nothing more happens by {end_s}: {self._describe()}"
            )
            self.clock.advance_to(max(due_s, self.clock.now_s()))

    def settle(self) -> None:
        """Give turns until nothing moves without time passing (packets under way in memory do arrive)."""
        while True:
            _dues, is_busy = self._turns()
            if is_busy or self._wait_sockets():
                continue
            if not self._due or self._due[0][0] > self.clock.now_s() + 1e-3:
                return
            self.clock.advance_to(self._due[0][0])

    def sleep(self, seconds: float) -> None:
        """So much virtual time passes, with all turns that are due in it."""
        end_s = self.clock.now_s() + seconds
        while True:
            dues, is_busy = self._turns()
            if is_busy or self._wait_sockets():
                continue
            due_s = min(dues, default=end_s)
            if due_s >= end_s:
                self.clock.advance_to(end_s)
                self._turns()
                return
            self.clock.advance_to(max(due_s, self.clock.now_s()))

    def _turns(self) -> tuple[list[float], bool]:
        """One turn of everybody. returns (moments at which somebody wants a turn, whether somebody does now)."""
        now_s = self.clock.now_s()
        is_busy = False
        dues: list[float] = []
        while self._due and self._due[0][0] <= now_s:
            heapq.heappop(self._due)[2]()
            is_busy = True
        for node in self.nodes:
            if node.is_stopped or node.is_gone:
                continue
            told = len(node.to_engine) + len(node.to_loop)
            delay_s = node.owner.step()
            is_busy = is_busy or len(node.to_engine) + len(node.to_loop) > told
            if delay_s is not None:
                is_busy = is_busy or delay_s == 0.0
                dues.append(now_s + delay_s)
        if self._due:
            dues.append(self._due[0][0])
        return dues, is_busy

    def _wait_sockets(self) -> bool:
        """Whether some socket has something for a node that isn't stopped, or gets it in a moment."""
        selectors = [
            network.waiter()._selector
            for node in self.nodes
            if not node.is_stopped and not node.is_gone
            for network in [innermost(node.network)]
            if isinstance(network, StreamNetwork)
        ]
        if not selectors:
            return False
        filenos = [selector.fileno() for selector in selectors]  # type: ignore[attr-defined]
        ready, _, _ = select.select(filenos, [], [], _QUIET_S)
        return bool(ready)

    def _describe(self) -> str:
        return "; ".join(f"{node.ref.id}: {node.to_engine[-3:]} {node.to_loop[-2:]}" for node in self.nodes)

    # --- what tests do

    def pair(self, prefill: Node, decode: Node, *, session_id: int = 1) -> None:
        """Order the link and wait until it is up."""
        self.order(prefill, decode, session_id=session_id)
        self.run(lambda: any(state.up for state in link_states(prefill, decode)))

    def order(self, prefill: Node, decode: Node, *, session_id: int = 1) -> None:
        prefill.owner.handle(messages.OrderLink(session_id, decode.ref, decode.owner.addresses))

    def grant(self, prefill: Node, decode: Node, lease_id: int, num_blocks: int, num_skip: int = 0) -> None:
        """D expects the lease."""
        block_ids = decode.granted[lease_id] = decode.take_blocks(num_blocks - num_skip)
        decode.owner.handle(messages.ExpectLease(lease_id, prefill.ref, num_skip, block_ids))

    def open(self, prefill: Node, decode: Node, lease_id: int, num_blocks: int, num_skip: int = 0) -> None:
        """A grant at D and an open lease at P."""
        self.grant(prefill, decode, lease_id, num_blocks, num_skip)
        prefill.owner.handle(messages.OpenLease(lease_id, decode.ref, num_blocks, num_skip))

    def offer(self, prefill: Node, lease_id: int, upto: int, num_new: int) -> tuple[int, ...]:
        """P offers new blocks with random content; returns their ids."""
        block_ids = prefill.take_blocks(num_new)
        for block_id in block_ids:
            prefill.fill(block_id, self.random.randbytes(prefill.layout.block_bytes))
        prefill.owner.handle(messages.Offer(lease_id, upto, block_ids))
        return block_ids

    def hand_off(
        self, prefill: Node, decode: Node, lease_id: int, num_blocks: int, num_skip: int = 0
    ) -> tuple[int, ...]:
        """Open, offer all, commit; without waiting."""
        self.open(prefill, decode, lease_id, num_blocks, num_skip)
        block_ids = self.offer(prefill, lease_id, num_blocks, num_blocks - num_skip)
        prefill.owner.handle(messages.CommitLease(lease_id, 7, None))
        return block_ids

    def wait_ends(self, lease_id: int, *nodes: Node, for_s: float = 60.0) -> None:
        """Until each of these nodes has closed the lease."""
        self.run(lambda: all(node.ends(lease_id) for node in nodes), for_s=for_s)

    def kill(self, node: Node) -> None:
        """As kill -9: its connections end, nothing of it runs any more."""
        node.is_gone = True
        devices: list[LoopNccl | LoopCudaIpc] = [*self.fabric.devices, *self.ipc.devices]
        for device in devices:
            if device.name == node.ref.id:
                device.die()
        if node.ref.id in self.copies:
            self.copies[node.ref.id].die()
        node.owner._network.close()
        for link in node.owner._links:
            innermost(link._channel).close("killed")

    def close(self) -> None:
        for node in self.nodes:
            node.owner.close()
        self._unix_dir.cleanup()


def innermost(outer: Any) -> Any:
    """The network, or channel, that the others are wrapped around."""
    while inner := next(
        (vars(outer)[name] for name in ("_inner", "control", "_control") if name in vars(outer)), None
    ):
        outer = inner
    return outer


def link_states(prefill: Node, decode: Node) -> list[messages.LinkState]:
    """What P's loop was told about the link to D."""
    return [
        state
        for state in prefill.to_loop
        if isinstance(state, messages.LinkState) and state.decode_worker == decode.ref
    ]


def assert_handed_off(prefill: Node, decode: Node, lease_id: int, sent: tuple[int, ...]) -> None:
    """Confirmed at P, handed off at D, once each, and the bytes are equal."""
    [closed] = prefill.ends(lease_id)
    assert isinstance(closed, messages.LeaseClosed) and closed.error is None, closed
    [handed_off] = decode.ends(lease_id)
    assert isinstance(handed_off, messages.HandedOff), handed_off
    received = decode.granted[lease_id]
    assert handed_off.received_bytes == len(sent) * prefill.layout.block_bytes
    for source, target in zip(sent, received):
        assert prefill.block(source) == decode.block(target)


def assert_at_rest(*nodes: Node) -> None:
    """Nothing is open, nothing is held."""
    for node in nodes:
        for link in node.owner._links:
            assert link.num_leases == 0
