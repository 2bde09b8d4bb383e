"""Random numbers: the published answers of Philox4x32-10, and our packing of seed, position and choice."""

from __future__ import annotations

import pytest

from pdserve.engine.philox import philox4x32, uniform

# Random123's known-answer tests (kat_vectors): counter, key, output.
KNOWN = [
    ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "want"), KNOWN)
def test_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], want: tuple[int, int, int, int]
) -> None:
    assert philox4x32(counter, key) == want


# (seed, position, choice) -> u · 2⁵³: these must never change, or a seed would give another text.
VECTORS = [
    ((0, 0, 0), 0x6627E8D5E169C58D >> 11),
    ((0xFFFFFFFFFFFFFFFF, 0xFFFFFFFFFFFFFFFF, 0xFFFFFFFFFFFFFFFF), 0x408F276D41C83B0E >> 11),
    ((0x299F31D0A4093822, 0x85A308D3243F6A88, 0x0370734413198A2E), 0xD16CFE0994FDCCEB >> 11),
]


@pytest.mark.parametrize(("where", "want"), VECTORS)
def test_u_is_the_first_53_bits(where: tuple[int, int, int], want: int) -> None:
    assert uniform(*where) * 2**53 == want


def test_every_part_of_the_counter_and_key_matters() -> None:
    values = {
        uniform(seed, position, choice)
        for seed in (1, 1 << 40)
        for position in range(50)
        for choice in range(4)
    }
    assert len(values) == 2 * 50 * 4
    assert all(0 <= value < 1 for value in values)
    assert 0.4 < sum(values) / len(values) < 0.6
