"""Numbers in messages are those that the user wrote, also behind a 32-bit float."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.decimals import as_written
from pdserve.errors import InvalidRequest


def single(value: float) -> float:
    found: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return found


@pytest.mark.parametrize(
    "text", ["7", "0.7", "1.1", "-2.3", "1e-05", "100.5", "0", "inf", "nan", "1e+300", "0.1234567890123"]
)
def test_as_written(text: str) -> None:
    assert as_written(float(text)) == text


@given(st.integers(-10_000_000, 10_000_000), st.integers(-6, 3))
def test_seven_digits_survive_a_32_bit_float(digits: int, exponent: int) -> None:
    written = float(f"{digits}e{exponent}")
    if len(str(abs(digits)).strip("0")) <= 6:
        assert float(as_written(single(written))) == written


def test_in_a_message() -> None:
    assert (
        str(InvalidRequest("out of range", value=single(1.1), limit=2.0))
        == "out of range (value=1.1, limit=2)"
    )
