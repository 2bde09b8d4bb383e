"""Which links a prefill worker's routers want, and when to dial them.

Orders are counted per (session, pair): a link is wanted as long as one session wants it. A wanted link that is down
is dialled again with back-off, unless its end was final: the two don't fit, or that incarnation is gone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kv_transfer.link import Link
from pdserve.errors import Incompatible, Overloaded, PdserveError, Stale
from pdserve.ids import Random, WorkerRef

UNWANTED_S = 5.0
"""How long a link lives on that nobody wants."""
MIN_BACKOFF_S = 0.05
MAX_BACKOFF_S = 1.0


@dataclass(slots=True, eq=False)
class Order:
    """One pair, as its sessions want it.

    reason      why it was down last, in words that routers know: "full", "misfit: …", or any; "" = never tried, or up
    due_s       when to dial (link None), or to close an unwanted one; None = nothing due
    is_final    never dialled again
    """

    decode_worker: WorkerRef
    addresses: tuple[str, ...]
    sessions: dict[int, None] = field(default_factory=dict)
    link: Link | None = None
    reason: str = ""
    due_s: float | None = None
    backoff_s: float = MIN_BACKOFF_S
    is_final: bool = False


class Orders:
    """Transfer owner only. Says what is due; the owner dials and closes."""

    def __init__(self, *, max_links: int, random: Random) -> None:
        self._max_links = max_links
        self._random = random
        self._orders: dict[WorkerRef, Order] = {}

    def __iter__(self) -> Iterator[Order]:
        return iter(list(self._orders.values()))

    def get(self, decode_worker: WorkerRef) -> Order | None:
        return self._orders.get(decode_worker)

    def order(
        self, session_id: int, decode_worker: WorkerRef, addresses: tuple[str, ...], now_s: float
    ) -> Order:
        """A session wants this pair. Raises Overloaded beyond max_links."""
        order = self._orders.get(decode_worker)
        if order is None:
            if len(self._orders) >= self._max_links:
                raise Overloaded("full", max_links=self._max_links)
            order = self._orders[decode_worker] = Order(decode_worker, addresses, due_s=now_s)
        elif not order.sessions:
            order.due_s = None if order.link is not None else now_s
        order.addresses = addresses
        order.sessions[session_id] = None
        return order

    def cancel(self, session_id: int, decode_worker: WorkerRef, now_s: float) -> None:
        """The session wants it no more."""
        order = self._orders.get(decode_worker)
        if order is None or session_id not in order.sessions:
            return
        del order.sessions[session_id]
        if not order.sessions:
            order.due_s = now_s + UNWANTED_S

    def cancel_all(self, session_id: int, now_s: float) -> None:
        """The session has ended."""
        for decode_worker in list(self._orders):
            self.cancel(session_id, decode_worker, now_s)

    def went_up(self, order: Order) -> None:
        order.reason = ""
        order.backoff_s = MIN_BACKOFF_S

    def went_down(self, order: Order, error: PdserveError, now_s: float) -> None:
        """Note why, and when to dial again."""
        order.link = None
        order.reason = _told(error)
        order.is_final = isinstance(error, Incompatible | Stale)
        if order.sessions:
            order.due_s = now_s + order.backoff_s * (0.5 + 0.5 * self._random.random())
            order.backoff_s = min(2 * order.backoff_s, MAX_BACKOFF_S)

    def due(self, now_s: float) -> list[Order]:
        """Orders to be dialled (wanted), or closed and forgotten (unwanted)."""
        found: list[Order] = []
        for order in self:
            if order.due_s is None or order.due_s > now_s:
                continue
            if order.sessions:
                order.due_s = None
                if not order.is_final and order.link is None:
                    found.append(order)
            elif order.link is None:
                del self._orders[order.decode_worker]
            elif order.link.num_leases:
                order.due_s = now_s + UNWANTED_S
            else:
                found.append(order)
        return found

    def forget(self, order: Order) -> None:
        """The unwanted link is closed."""
        self._orders.pop(order.decode_worker, None)

    def next_due_s(self) -> float | None:
        return min((order.due_s for order in self._orders.values() if order.due_s is not None), default=None)

    def spare(self) -> Order | None:
        """When full: an unwanted pair without leases, which gives its place to a wanted one."""
        if len(self._orders) < self._max_links:
            return None
        for order in self._orders.values():
            if not order.sessions and (order.link is None or order.link.num_leases == 0):
                return order
        return None


def _told(error: PdserveError) -> str:
    """What a router reads of it: whether to ask again later, whether an operator must act."""
    if isinstance(error, Overloaded):
        return "full"
    return f"misfit: {error}" if isinstance(error, Incompatible) else str(error)
