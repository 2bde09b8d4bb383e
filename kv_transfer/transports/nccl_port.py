"""What the links need of NCCL: a dozen calls on two-rank, non-blocking communicators of one device.

All are made by the transfer owner's thread, and none waits. A call that fails raises WorkerLost with NCCL's own words;
its communicator is then good for nothing but `revoke` and `abort`. Communicators and events are numbers, never reused.
"""

from __future__ import annotations

from typing import Protocol

from pdserve.errors import WorkerLost
from pdserve.kv_memory import ByteSpan

NCCL = "nccl"
SENDER_RANK, RECEIVER_RANK = 0, 1


class Nccl(Protocol):
    """Sends and receives of one communicator are done in the order of their groups, each on a stream of its own."""

    def make_unique_id(self) -> bytes:
        """Names a communicator to be made, once. Whoever has it can become a rank of it."""
        ...

    def init(self, unique_id: bytes, rank: int) -> int:
        """Begin to make a communicator, of two ranks; `is_settled` says when it can be used."""
        ...

    def is_settled(self, comm: int) -> bool:
        """Whether what was last asked of it is done: it is made, or its group lies on the device. Raises its error."""
        ...

    def begin_group(self) -> None:
        """Sends, or receives, of one communicator follow."""
        ...

    def send(self, comm: int, span: ByteSpan) -> None: ...

    def send_blank(self, comm: int, num_bytes: int) -> None:
        """Bytes without meaning, at most one piece."""
        ...

    def receive(self, comm: int, into: ByteSpan) -> None: ...

    def end_group(self, comm: int) -> None:
        """Hand the group over; nothing else is asked of the communicator until it `is_settled`."""
        ...

    def record(self, comm: int) -> int:
        """An event behind all that the communicator was given, which has settled."""
        ...

    def is_over(self, event: int) -> bool:
        """Whether the device is done with what lies before the event, once; then `is_settled` says if it went well."""
        ...

    def revoke(self, comm: int) -> None:
        """What runs of it on the device gives up its wait for the peer."""
        ...

    def abort(self, comm: int) -> None:
        """Begin to free it, beside this thread: that may have to wait for whatever else runs on the device."""
        ...

    def is_aborted(self, comm: int) -> bool:
        """Whether it is freed: nothing of it touches memory any longer."""
        ...


def nccl_failed(call: str, said: str) -> WorkerLost:
    """The error of a call."""
    return WorkerLost("NCCL failed", call=call, said=said)
