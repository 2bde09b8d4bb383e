"""Which `traceparent` of a client is taken over."""

from __future__ import annotations

import pytest

from router.traceparent import traceparent_of

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize(
    "sent", [f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00", f"cc-{TRACE}-{PARENT}-01-what.later=adds"]
)
def test_a_valid_one_is_taken_as_it_stands(sent: str) -> None:
    assert traceparent_of([("other", "x"), ("traceparent", sent)]) == sent


@pytest.mark.parametrize(
    "sent",
    [
        "",
        "nonsense",
        f"00-{TRACE.upper()}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-01-more",
        f"cc-{TRACE}-{PARENT}-01.more",
        f"cc-{TRACE}-{PARENT}-01-{'x' * 300}",
        f"00-{TRACE}-{PARENT}-01\n",
        b"\x00",
    ],
)
def test_another_is_none(sent: object) -> None:
    assert traceparent_of([("traceparent", sent)]) == ""


def test_none_and_two() -> None:
    good = f"00-{TRACE}-{PARENT}-01"
    assert traceparent_of(None) == traceparent_of([]) == ""
    assert traceparent_of([("traceparent", good), ("traceparent", good)]) == ""
