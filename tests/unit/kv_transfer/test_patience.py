"""How long an answer about a lease is waited for, while its link moves and when it doesn't."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import UNSET

from kv_transfer.frames import Ping
from kv_transfer.framing import HEADER_BYTES, encode, parse_body, parse_header
from kv_transfer.patience import Patience

LEASE_S = 5.0


@dataclass
class Waiting:
    progress_s: float
    watched_s: float = -1.0
    pass_limit: int = 0


def test_a_link_that_stands_still_is_given_lease_s() -> None:
    patience, lease = Patience(LEASE_S), Waiting(progress_s=10.0)
    patience.watch(lease, num_ahead=100)
    assert patience.due_s(lease) == 15.0
    patience.move(12.0)
    assert patience.due_s(lease) == 17.0


def test_a_lease_that_more_passed_than_were_before_it_has_lost_its_frame() -> None:
    patience, lease = Patience(LEASE_S), Waiting(progress_s=10.0)
    patience.watch(lease, num_ahead=8)
    for second in range(1, 33):
        patience.pass_piece(10.0 + second)
        patience.watch(lease, num_ahead=8)
    assert patience.due_s(lease) == 47.0
    patience.pass_piece(43.0)
    assert patience.is_passed_over(lease)
    assert patience.due_s(lease) == 15.0
    lease.progress_s = 44.0
    patience.watch(lease, num_ahead=8)
    assert not patience.is_passed_over(lease)
    assert patience.due_s(lease) == 49.0


def test_what_the_other_end_says_counts_while_it_grows() -> None:
    patience, lease = Patience(LEASE_S), Waiting(progress_s=10.0)
    patience.watch(lease, num_ahead=1)
    patience.hear(3, 11.0)
    patience.hear(3, 12.0)
    patience.hear(UNSET, 13.0)
    assert patience.due_s(lease) == 16.0
    assert patience.moves == 0, "or both ends would tell each other for ever that something moves"


def test_a_ping_to_an_early_version_says_no_more_than_that_knows() -> None:
    assert Ping.of(7, (1, 0)).moves is UNSET
    wire = encode(Ping.of(7, (1, 1)), generation=1)
    assert parse_body(parse_header(wire[:HEADER_BYTES]), wire[HEADER_BYTES:]) == Ping(7)
