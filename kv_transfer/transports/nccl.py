"""The network of a worker with a device: any other network, whose connections may go over NCCL besides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kv_transfer.transports.nccl_channel import ControlChannel, NcclChannel
from kv_transfer.transports.nccl_device import NcclDevice
from kv_transfer.transports.port import Channel


class ControlNetwork(Protocol):
    """A Network of ControlChannels."""

    @property
    def addresses(self) -> tuple[str, ...]: ...
    def dial(self, addresses: Sequence[str]) -> ControlChannel: ...
    def accept(self) -> Sequence[ControlChannel]: ...
    def poll(self) -> None: ...
    def next_due_s(self) -> float | None: ...
    def close(self) -> None: ...


class NcclNetwork:
    """Transfer owner only. `poll` raises InvariantViolated when the device can't be trusted with memory any longer."""

    def __init__(self, control: ControlNetwork, device: NcclDevice) -> None:
        self.control = control
        self._device = device
        self._channels: list[NcclChannel] = []

    @property
    def addresses(self) -> tuple[str, ...]:
        return self.control.addresses

    def dial(self, addresses: Sequence[str]) -> Channel:
        return self._wrap(self.control.dial(addresses))

    def accept(self) -> Sequence[Channel]:
        return [self._wrap(channel) for channel in self.control.accept()]

    def _wrap(self, control: ControlChannel) -> NcclChannel:
        channel = NcclChannel(control, self._device)
        self._channels.append(channel)
        return channel

    def poll(self) -> None:
        self.control.poll()
        self._device.poll()

    def next_due_s(self) -> float | None:
        self._channels = [each for each in self._channels if each.closed_reason is None or not each.is_idle]
        dues = [self.control.next_due_s(), self._device.next_due_s()]
        dues += [channel.next_due_s() for channel in self._channels]
        return min((due_s for due_s in dues if due_s is not None), default=None)

    def close(self) -> None:
        self.control.close()
