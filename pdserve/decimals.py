"""Numbers as people write them."""

from __future__ import annotations

import struct

_MOST = 3.4e38  # more fits in no 32-bit float


def shortest(value: float) -> float:
    """The shortest decimal of a 32-bit float: 1e-05 where it reads as 9.999999747378752e-06."""
    if not abs(value) < _MOST:
        return value
    for digits in range(1, 10):
        text = f"{float(value):.{digits}g}"
        if struct.pack("<f", float(text)) == struct.pack("<f", float(value)):
            return float(text)
    return float(value)


def as_written(value: float) -> str:
    """0.7 and 7, whether the number has been a 32-bit float on its way or not."""
    is_single = abs(value) < _MOST and struct.unpack("<f", struct.pack("<f", value))[0] == value
    return repr(shortest(value) if is_single else value).removesuffix(".0")
