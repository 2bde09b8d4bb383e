"""The in-memory network: the links of a whole simulated cluster in one process, under an injected schedule.

Frames and payloads are copied when they are sent, and arrive after a drawn delay, in order on each connection.
One-sided, D reads P's pool itself, at the moment of its turn (or, with `copy_delay`, when a device copy would be
done), so a late reader sees what the blocks hold by then. Posted, the devices of both ends move the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kv_transfer.transports.cuda_ipc import IpcDevice
from pdserve.clock import Clock
from tests.support.memories import StagedMemory
from tests.support.memory_channel import DeviceWatch, MemoryChannel, Schedule, WireKind
from tests.support.posted_channel import PostedChannel
from tests.support.sharing_channel import SharingChannel

_SCHEME = "mem://"


@dataclass(frozen=True, slots=True)
class _Cut:
    """Nothing arrives from `source` at `target`; what is under way waits."""

    source: str
    target: str


class MemoryNetwork:
    """The wires between all nodes. One event loop, or one test, calls everything.

    schedule    calls a function after so many seconds (the virtual loop's call_later)
    delay       draws the seconds that the next packet travels
    copy_delay  one-sided only: draws the seconds of a device copy; None = done within the turn
    host_of     the host that a node's name stands on: cuts are between hosts, and outlive their processes
    """

    def __init__(
        self,
        *,
        clock: Clock,
        schedule: Schedule,
        delay: Callable[[], float] = lambda: 0.0,
        kind: WireKind = WireKind.TWO_SIDED,
        copy_delay: Callable[[], float] | None = None,
        host_of: Callable[[str], str] = lambda name: name,
    ) -> None:
        self.clock = clock
        self.schedule = schedule
        self.delay = delay
        self.kind = kind
        self.copy_delay = copy_delay
        self.bytes_per_s: float | None = None  # of each connection, each way; None: as fast as they are sent
        self.on_heal: Callable[[], None] = lambda: None
        self._host_of = host_of
        self._nodes: dict[str, MemoryNode] = {}
        self._cuts: dict[_Cut, list[MemoryChannel]] = {}

    def join(
        self,
        name: str,
        *,
        memory: StagedMemory,
        wake: Callable[[], None],
        watch: DeviceWatch | None = None,
        ipc: IpcDevice | None = None,
    ) -> MemoryNode:
        """A worker's place in the network; a later one of the same name takes the address over.

        memory  of its pool; wake: makes its driver call `step`
        watch   sees what devices do there (posted)
        ipc     passes the memory on a device
        """
        node = MemoryNode(self, name, memory, wake, watch, ipc)
        self._nodes[name] = node
        return node

    def find(self, address: str) -> MemoryNode | None:
        """The node that listens there."""
        return self._nodes.get(address.removeprefix(_SCHEME))

    def leave(self, node: MemoryNode) -> None:
        """The node stops listening."""
        if self._nodes.get(node.name) is node:
            del self._nodes[node.name]

    def cut(self, source: str, target: str) -> None:
        """One way between two hosts is broken: packets wait, as they do in TCP, until `heal`."""
        self._cuts.setdefault(_Cut(source, target), [])

    def heal(self, source: str, target: str) -> None:
        """What waited goes on."""
        for channel in self._cuts.pop(_Cut(source, target), []):
            channel.retry_delivery()
        self.on_heal()

    def is_cut(self, source: str, target: str) -> bool:
        """Between the hosts of these nodes, this way."""
        return _Cut(self._host_of(source), self._host_of(target)) in self._cuts

    def holds(self, channel: MemoryChannel, source: str, target: str) -> bool:
        """Whether a packet of this channel must wait; the channel is told when to try again."""
        if not self._cuts:
            return False
        held = self._cuts.get(_Cut(self._host_of(source), self._host_of(target)))
        if held is None:
            return False
        if channel not in held:
            held.append(channel)
        return True


class MemoryNode:
    """One worker's Network."""

    def __init__(
        self,
        network: MemoryNetwork,
        name: str,
        memory: StagedMemory,
        wake: Callable[[], None],
        watch: DeviceWatch | None,
        ipc: IpcDevice | None,
    ) -> None:
        self._ipc = ipc
        self.name = name
        self.memory = memory
        self.wake = wake
        self._watch = watch
        self._network = network
        self._channels: list[MemoryChannel] = []
        self._accepted: list[MemoryChannel] = []
        self._is_closed = False

    @property
    def addresses(self) -> tuple[str, ...]:
        return (_SCHEME + self.name,)

    def dial(self, addresses: Sequence[str]) -> MemoryChannel:
        """A name at which nobody listens when the packet arrives is a refused connection."""
        address = next((address for address in addresses if address.startswith(_SCHEME)), "")
        near = self._channel(address.removeprefix(_SCHEME))
        near.connect(self._connect)
        return near

    def _connect(self, near: MemoryChannel) -> MemoryChannel | None:
        """The dialler's first packet has arrived."""
        target = self._network.find(near.peer_name)
        if target is None or target._is_closed:
            return None
        far = target._channel(self.name)
        far.remote_memory = self.memory
        target._accepted.append(far)
        target.wake()
        return far

    def _channel(self, peer_name: str) -> MemoryChannel:
        network, memory = self._network, self.memory
        if network.kind is WireKind.POSTED:
            channel: MemoryChannel = PostedChannel(
                network, name=self.name, peer_name=peer_name, memory=memory, wake=self.wake, watch=self._watch
            )
        elif self._ipc is not None:
            channel = SharingChannel(
                network, name=self.name, peer_name=peer_name, memory=memory, wake=self.wake, device=self._ipc
            )
        else:
            channel = MemoryChannel(
                network, name=self.name, peer_name=peer_name, memory=memory, wake=self.wake
            )
        self._channels = [
            other for other in self._channels if other.closed_reason is None or not other.is_idle
        ]
        self._channels.append(channel)
        return channel

    def accept(self) -> list[MemoryChannel]:
        accepted, self._accepted = self._accepted, []
        return accepted

    def poll(self) -> None:
        """Packets come by themselves."""
        if self._ipc is not None:
            self._ipc.poll()

    def next_due_s(self) -> float | None:
        return None if self._ipc is None else self._ipc.next_due_s()

    def close(self) -> None:
        """Also what a killed process leaves behind: its peers see the end of their connections, after a delay."""
        self._is_closed = True
        self._network.leave(self)
        for channel in self._channels:
            channel.close("the worker is gone")
            channel.abort()
