"""Which decode workers each prefill worker is to be linked with, and keeping the orders up to date.

Routers choose by rendezvous hash over the worker ids: without talking to each other they choose alike, so their
orders join on the same links, and a worker that comes or goes changes only the pairs that it is part of.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from pdserve.ids import WorkerRef
from pdserve.messages import Pair, PairState, Unpair
from router.member import Member, PairRecord

ASK_AGAIN_S = 5.0  # a pair that is down because a worker has no room for it is asked for again
EXTRA_S = 60.0  # an extra pair is given up so long after the others were last all full


def rank_decodes(prefill_id: str, decode_ids: Iterable[str]) -> list[str]:
    """The decode workers' ids, the one that this prefill worker should be linked with first, first."""
    return sorted(decode_ids, key=lambda decode_id: (_weight(prefill_id, decode_id), decode_id))


def _weight(prefill_id: str, decode_id: str) -> bytes:
    text = f"{len(prefill_id)}:{prefill_id}{decode_id}".encode()
    return blake2b(text, digest_size=8, person=b"pdserve.pair").digest()


@dataclass(slots=True)
class _Extra:
    """Pairs of one prefill worker above the configured number; needed_s: when all of these were full."""

    number: int = 0
    needed_s: float = -math.inf


class PairOrders:
    """Orders and their state, kept in the prefill workers' member records. Event-loop thread only.

    pairs_per_prefill  how many decode workers a prefill worker is linked with; more while all of these are full
    """

    def __init__(self, pairs_per_prefill: int) -> None:
        self._pairs_per_prefill = pairs_per_prefill
        self._extra: dict[str, _Extra] = {}  # by prefill worker's id

    def refresh(self, members: Sequence[Member], now_s: float) -> None:
        """Order what is wanted and not ordered, take back what is ordered and not wanted."""
        decodes = {member.id: member for member in members if member.decodes and member.live}
        prefills = [member for member in members if member.prefills and member.live]
        self._extra = {member.id: self._extra.get(member.id, _Extra()) for member in prefills}
        for prefill in prefills:
            number = self._pairs_per_prefill + self._extra[prefill.id].number
            wanted = rank_decodes(prefill.id, decodes)[:number]
            self._order(prefill, [decodes[decode_id] for decode_id in wanted], now_s)

    def ask_again(self, members: Sequence[Member], now_s: float) -> None:
        """Repeat orders that a worker turned down for want of room."""
        by_id = {member.id: member for member in members}
        for prefill in members:
            for record in prefill.pairs.values():
                decode = by_id.get(record.decode.id)
                full = not record.up and record.reason.startswith("full")
                if full and decode is not None and now_s - record.asked_s >= ASK_AGAIN_S:
                    record.asked_s = now_s
                    prefill.send(Pair(decode.ref, decode.hello.kv_addresses))

    def widen(self, members: Sequence[Member], now_s: float) -> None:
        """A decode worker has refused. Where every linked one does and others exist, order one link more."""
        by_id = {member.id: member for member in members}
        num_decodes = sum(1 for member in members if member.decodes and member.usable)
        widened = False
        for prefill in members:
            if not prefill.prefills or not prefill.pairs:
                continue
            linked = [by_id[decode_id] for decode_id in prefill.pairs if decode_id in by_id]
            extra = self._extra.setdefault(prefill.id, _Extra())
            if all(_is_full(decode) for decode in self._regular(prefill, linked)):
                extra.needed_s = now_s
            if len(prefill.pairs) < num_decodes and all(_is_full(decode) for decode in linked):
                extra.number += 1
                widened = True
        if widened:
            self.refresh(members, now_s)

    def narrow(self, members: Sequence[Member], now_s: float) -> None:
        """Give up extra links, one at a time, where the regular ones have had room for EXTRA_S."""
        narrowed = False
        for extra in self._extra.values():
            if extra.number and now_s - extra.needed_s >= EXTRA_S:
                extra.number -= 1
                extra.needed_s = now_s
                narrowed = True
        if narrowed:
            self.refresh(members, now_s)

    def _regular(self, prefill: Member, linked: Sequence[Member]) -> list[Member]:
        """Those of the linked decode workers that are so without need."""
        first = rank_decodes(prefill.id, [decode.id for decode in linked])[: self._pairs_per_prefill]
        return [decode for decode in linked if decode.id in first]

    def on_state(self, prefill: Member, state: PairState) -> bool:
        """A prefill worker tells the state of a link.

        returns  whether it is news; what belongs to an order taken back, or to an earlier epoch, isn't
        """
        record = prefill.pairs.get(state.decode_worker.id)
        if record is None or record.decode != state.decode_worker or state.generation < record.generation:
            return False
        record.up, record.transport = state.up, state.transport
        record.reason, record.generation = state.reason, state.generation
        return True

    def on_lost(self, prefill: Member, decode: WorkerRef, generation: int) -> bool:
        """A decode worker has lost this link, or one after it; the prefill worker doesn't know yet, or can't tell.

        returns  whether that is news
        """
        record = prefill.pairs.get(decode.id)
        if record is None or record.decode != decode or not record.up or generation < record.generation:
            return False
        record.up, record.reason = False, "the decode worker has lost the link"
        return True

    def _order(self, prefill: Member, wanted: Sequence[Member], now_s: float) -> None:
        refs = {decode.id: decode.ref for decode in wanted}
        for decode_id, record in list(prefill.pairs.items()):
            if refs.get(decode_id) != record.decode:
                del prefill.pairs[decode_id]
                prefill.send(Unpair(record.decode))
        for decode in wanted:
            if decode.id not in prefill.pairs:
                prefill.pairs[decode.id] = PairRecord(decode.ref, asked_s=now_s)
                prefill.send(Pair(decode.ref, decode.hello.kv_addresses))


def _is_full(decode: Member) -> bool:
    return decode.refusing or not decode.usable
