"""Which routers want which links of a prefill worker."""

from __future__ import annotations

from collections.abc import Iterator

from kv_transfer.messages import CancelAllLinks, CancelLink, LinkState, OrderLink
from pdserve.ids import WorkerRef
from pdserve.owner import Post


class LinkOrders:
    """The orders by session; the transfer owner joins equal ones into one link. Loop only."""

    def __init__(self, to_transfer: Post) -> None:
        self._to_transfer = to_transfer
        self._wanted: dict[int, dict[WorkerRef, None]] = {}

    def open(self, session_id: int) -> None:
        self._wanted[session_id] = {}

    def close(self, session_id: int) -> None:
        """The session has ended: it wants nothing."""
        self._wanted.pop(session_id, None)
        self._to_transfer(CancelAllLinks(session_id))

    def order(self, session_id: int, decode_worker: WorkerRef, addresses: tuple[str, ...]) -> None:
        self._wanted[session_id][decode_worker] = None
        self._to_transfer(OrderLink(session_id, decode_worker, addresses))

    def cancel(self, session_id: int, decode_worker: WorkerRef) -> None:
        """Idempotent."""
        self._wanted[session_id].pop(decode_worker, None)
        self._to_transfer(CancelLink(session_id, decode_worker))

    def concerned(self, state: LinkState) -> Iterator[int]:
        """The sessions that are to be told."""
        for session_id, wanted in self._wanted.items():
            if state.decode_worker in wanted and state.session_id in (None, session_id):
                yield session_id
