"""The network of a worker whose pool the host can't see: any other network, whose pieces are staged."""

from __future__ import annotations

from collections.abc import Sequence

from kv_transfer.transports.port import Channel, Network
from kv_transfer.transports.staged_channel import StagedChannel
from kv_transfer.transports.staging import Staging


class StagedNetwork:
    """Transfer owner only. `poll` raises InvariantViolated when the device can't be trusted with memory any longer."""

    def __init__(self, inner: Network, staging: Staging) -> None:
        self._inner = inner
        self._staging = staging
        self._channels: list[StagedChannel] = []

    @property
    def addresses(self) -> tuple[str, ...]:
        return self._inner.addresses

    def dial(self, addresses: Sequence[str]) -> Channel:
        return self._wrap(self._inner.dial(addresses))

    def accept(self) -> Sequence[Channel]:
        return [self._wrap(channel) for channel in self._inner.accept()]

    def _wrap(self, inner: Channel) -> StagedChannel:
        channel = StagedChannel(inner, self._staging)
        self._channels.append(channel)
        return channel

    def poll(self) -> None:
        self._inner.poll()
        self._staging.poll()

    def next_due_s(self) -> float | None:
        self._channels = [each for each in self._channels if each.closed_reason is None or not each.is_idle]
        dues = [self._inner.next_due_s(), self._staging.next_due_s()]
        dues += [channel.next_due_s() for channel in self._channels]
        return min((due_s for due_s in dues if due_s is not None), default=None)

    def close(self) -> None:
        self._inner.close()
