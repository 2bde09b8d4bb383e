"""What one API key may do: calls and tokens a minute, generations at a time."""

from __future__ import annotations

import pytest

from pdserve.errors import Overloaded
from pdserve.service.api_keys import ApiKey
from router.key_limits import KeyLimits
from tests.support.virtual_clock import VirtualClock


class Case:
    def __init__(self, **limits: int) -> None:
        self.clock = VirtualClock()
        self.refused: list[str] = []
        self.limits = KeyLimits(ApiKey(tenant="a", **limits), self.clock, self.refused.append)  # type: ignore[arg-type]

    def refuses(self, limit: str) -> float:
        """The next call is refused by it; the seconds to wait."""
        with pytest.raises(Overloaded) as error:
            self.limits.take_call()
        assert error.value.fields["limit"] == limit and self.refused[-1] == limit
        return error.value.retry_after_s


def test_so_many_calls_a_minute_and_the_wait_is_what_it_says() -> None:
    case = Case(requests_per_minute=6)
    for _ in range(6):
        case.limits.take_call()
    assert case.refuses("requests_per_minute") == 10.0
    case.clock.advance(4.0)
    wait_s = case.refuses("requests_per_minute")
    assert wait_s == 6.0
    case.clock.advance(wait_s)
    case.limits.take_call()
    case.refuses("requests_per_minute")
    case.clock.advance(3600.0)
    for _ in range(6):
        case.limits.take_call()
    case.refuses("requests_per_minute")


def test_tokens_are_paid_afterwards() -> None:
    case = Case(tokens_per_minute=600)
    case.limits.take_call()
    case.limits.take_tokens(1_199)
    assert case.refuses("tokens_per_minute") == 60.0
    case.clock.advance(60.0)
    case.limits.take_call()


def test_a_refused_call_costs_nothing() -> None:
    case = Case(tokens_per_minute=60, requests_per_minute=1)
    case.limits.take_tokens(60)
    case.refuses("tokens_per_minute")
    case.clock.advance(1.0)
    case.limits.take_call()


def test_so_many_generations_at_a_time() -> None:
    case = Case(max_concurrent=2)
    case.limits.begin()
    case.limits.begin()
    with pytest.raises(Overloaded, match="max_concurrent"):
        case.limits.begin()
    case.limits.end()
    case.limits.begin()


def test_no_limit_is_none() -> None:
    case = Case()
    for _ in range(1_000):
        case.limits.begin()
    case.limits.take_tokens(1 << 40)
    case.limits.take_call()


def test_other_limits_count_what_was_taken_before() -> None:
    case = Case(requests_per_minute=10)
    for _ in range(8):
        case.limits.take_call()
    case.limits.change(ApiKey(tenant="a", requests_per_minute=9))
    case.limits.take_call()
    case.refuses("requests_per_minute")
    case.limits.change(ApiKey(tenant="a"))
    case.limits.take_call()
