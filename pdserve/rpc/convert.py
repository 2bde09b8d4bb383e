"""Session messages and cache events to protobuf and back: protobuf objects stop here."""

from __future__ import annotations

from pdserve.errors import InvalidRequest
from pdserve.ids import WorkerRef
from pdserve.messages import BlocksRemoved, BlocksStored, CacheEvent, SnapshotPart
from pdserve.rpc.down import from_proto as down_from_proto
from pdserve.rpc.down import to_proto as down_to_proto
from pdserve.rpc.up import from_proto as up_from_proto
from pdserve.rpc.up import to_proto as up_to_proto
from pdserve.rpc.v1 import session_pb2 as pb
from pdserve.rpc.values import hashes_from, worker_from, worker_to

__all__ = [
    "cache_event_from_proto",
    "cache_event_to_proto",
    "cache_opening_from_proto",
    "cache_opening_to_proto",
    "down_from_proto",
    "down_to_proto",
    "up_from_proto",
    "up_to_proto",
]


def cache_opening_to_proto(worker: WorkerRef) -> pb.CacheEvent:
    """The first message of a CacheEvents stream: it names the worker and carries no event."""
    return pb.CacheEvent(worker=worker_to(worker))


def cache_opening_from_proto(msg: pb.CacheEvent) -> WorkerRef:
    """Raises InvalidRequest if the stream doesn't begin by naming its worker."""
    if not msg.HasField("worker"):
        raise InvalidRequest("the first cache event must name its worker")
    return worker_from(msg.worker)


def cache_event_to_proto(event: CacheEvent) -> pb.CacheEvent:
    """The protobuf form of one event."""
    joined = b"".join(event.hashes)
    match event:
        case BlocksStored():
            return pb.CacheEvent(sequence=event.sequence, stored=pb.BlocksStored(hashes=joined))
        case BlocksRemoved():
            return pb.CacheEvent(sequence=event.sequence, removed=pb.BlocksRemoved(hashes=joined))
        case SnapshotPart():
            part = pb.SnapshotPart(hashes=joined, first=event.first, last=event.last)
            return pb.CacheEvent(sequence=event.sequence, snapshot=part)


def cache_event_from_proto(msg: pb.CacheEvent) -> CacheEvent:
    """Raises InvalidRequest if the message holds no event, or hashes of another length."""
    match msg.WhichOneof("event"):
        case "stored":
            return BlocksStored(msg.sequence, hashes_from(msg.stored.hashes))
        case "removed":
            return BlocksRemoved(msg.sequence, hashes_from(msg.removed.hashes))
        case "snapshot":
            part = msg.snapshot
            return SnapshotPart(msg.sequence, hashes_from(part.hashes), part.first, part.last)
        case _:
            raise InvalidRequest("an empty cache event, or one of a later version", sequence=msg.sequence)
