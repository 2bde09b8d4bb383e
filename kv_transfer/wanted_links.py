"""Which links a prefill worker's routers want, and when to dial them.

Orders are counted per (session, pair): a link is wanted as long as one session wants it. A wanted link that is down
is dialled again with back-off, unless a proven worker doesn't fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kv_transfer.link import Link
from pdserve.errors import Incompatible, Overloaded, PdserveError
from pdserve.ids import Random, WorkerRef

UNWANTED_S = 5.0
"""How long a link lives on that nobody wants."""
MIN_BACKOFF_S = 0.05
MAX_BACKOFF_S = 1.0


@dataclass(slots=True, eq=False)
class WantedLink:
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


class WantedLinks:
    """Transfer owner only. Says what is due; the owner dials and closes."""

    def __init__(self, *, max_links: int, random: Random) -> None:
        self._max_links = max_links
        self._random = random
        self._wanted: dict[WorkerRef, WantedLink] = {}

    def __iter__(self) -> Iterator[WantedLink]:
        return iter(list(self._wanted.values()))

    def get(self, decode_worker: WorkerRef) -> WantedLink | None:
        return self._wanted.get(decode_worker)

    def order(
        self, session_id: int, decode_worker: WorkerRef, addresses: tuple[str, ...], now_s: float
    ) -> WantedLink:
        """A session wants this pair. Raises Overloaded beyond max_links."""
        wanted = self._wanted.get(decode_worker)
        if wanted is None:
            if len(self._wanted) >= self._max_links:
                raise Overloaded("full", max_links=self._max_links)
            wanted = self._wanted[decode_worker] = WantedLink(decode_worker, addresses, due_s=now_s)
        elif not wanted.sessions:
            wanted.due_s = None if wanted.link is not None else now_s
        wanted.addresses = addresses
        wanted.sessions[session_id] = None
        return wanted

    def cancel(self, session_id: int, decode_worker: WorkerRef, now_s: float) -> None:
        """The session no longer wants it."""
        wanted = self._wanted.get(decode_worker)
        if wanted is None or session_id not in wanted.sessions:
            return
        del wanted.sessions[session_id]
        if not wanted.sessions:
            wanted.due_s = now_s + UNWANTED_S

    def cancel_all(self, session_id: int, now_s: float) -> None:
        """The session has ended."""
        for decode_worker in list(self._wanted):
            self.cancel(session_id, decode_worker, now_s)

    def went_up(self, wanted: WantedLink) -> None:
        wanted.reason = ""
        wanted.backoff_s = MIN_BACKOFF_S

    def went_down(self, wanted: WantedLink, error: PdserveError, now_s: float) -> None:
        """Note why, and when to dial again."""
        wanted.link = None
        wanted.reason = _told(error)
        wanted.is_final = isinstance(error, Incompatible)
        if wanted.sessions:
            wanted.due_s = now_s + wanted.backoff_s * (0.5 + 0.5 * self._random.random())
            wanted.backoff_s = min(2 * wanted.backoff_s, MAX_BACKOFF_S)

    def due(self, now_s: float) -> list[WantedLink]:
        """Pairs to be dialled (wanted), or closed and forgotten (unwanted)."""
        found: list[WantedLink] = []
        for wanted in self:
            if wanted.due_s is None or wanted.due_s > now_s:
                continue
            if wanted.sessions:
                wanted.due_s = None
                if not wanted.is_final and wanted.link is None:
                    found.append(wanted)
            elif wanted.link is None:
                del self._wanted[wanted.decode_worker]
            elif wanted.link.num_leases:
                wanted.due_s = now_s + UNWANTED_S
            else:
                found.append(wanted)
        return found

    def forget(self, wanted: WantedLink) -> None:
        """The unwanted link is closed."""
        self._wanted.pop(wanted.decode_worker, None)

    def next_due_s(self) -> float | None:
        return min(
            (wanted.due_s for wanted in self._wanted.values() if wanted.due_s is not None), default=None
        )

    def spare(self) -> WantedLink | None:
        """When full: an unwanted pair without leases, which gives its place to a wanted one."""
        if len(self._wanted) < self._max_links:
            return None
        for wanted in self._wanted.values():
            if not wanted.sessions and (wanted.link is None or wanted.link.num_leases == 0):
                return wanted
        return None


def _told(error: PdserveError) -> str:
    """What a router reads of it: whether to ask again later, whether an operator must act."""
    if isinstance(error, Overloaded):
        return "full"
    return f"misfit: {error}" if isinstance(error, Incompatible) else str(error)
