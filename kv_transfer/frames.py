"""The frames of a link. Handshake: HELLO, PROOF (each side sends both). End: BYE. Life: PING, PONG.

P to D: READY, DATA, COMMIT, CONFIRM, WITHDRAW. D to P: PULL, ACK, RELEASED, FAIL. Both: STALE.
How they lie on the wire is in framing.py.
"""

from __future__ import annotations

from kv_transfer.lease_frames import (
    Ack,
    Commit,
    Confirm,
    Data,
    Fail,
    Pull,
    PulledPiece,
    Ready,
    Released,
    Stale,
    Withdraw,
)
from kv_transfer.link_frames import Bye, Hello, Ping, Pong, Proof

__all__ = [
    "Ack",
    "Bye",
    "Commit",
    "Confirm",
    "Data",
    "Fail",
    "Frame",
    "FRAME_CLASSES",
    "Hello",
    "Ping",
    "Pong",
    "Proof",
    "Pull",
    "PulledPiece",
    "Ready",
    "Released",
    "Stale",
    "Withdraw",
]

Frame = (
    Hello
    | Proof
    | Bye
    | Ping
    | Pong
    | Ready
    | Pull
    | Data
    | Commit
    | Ack
    | Confirm
    | Released
    | Withdraw
    | Fail
    | Stale
)

_CLASSES: tuple[type[Frame], ...] = (
    Hello,
    Proof,
    Bye,
    Ping,
    Pong,
    Ready,
    Pull,
    Data,
    Commit,
    Ack,
    Confirm,
    Released,
    Withdraw,
    Fail,
    Stale,
)
FRAME_CLASSES: dict[int, type[Frame]] = {int(cls.kind): cls for cls in _CLASSES}
"""By the kind in a header."""
