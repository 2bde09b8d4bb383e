"""The soak's verdict on memory, over series that were recorded (MiB)."""

from __future__ import annotations

import pytest

from tests.soak.growth import has_grown

# Processes that lived through 5,000 requests, or (short) 1,000; the last look is behind the last round of attacks.
SERIES = {
    "fake": "136 162 122 231 134 106 184 188 113 130 125 116 132 152 113 115 155 129 141 145 162 147",
    "torch": "164 156 169 153 182 133 142 143 145 180 150 164 151 155 145 153 178 152 153 153 173 191",
    "short": "200 200 200 168 168 188 188 188 196 196 213 213 213 227 227 227 178 141 142 142 151 180",
    "worker": "381 369 370 369 370 377 371 378 371 378 371 371 378 381 374 375 380 376 384 384 385 385",
}
# A router whose threads each had a heap of its own: the last round of attacks left more than anything before.
HEAPS = "69 113 94 93 169 115 152 188 254 228 225 242 242 252 252 115 116 125 224"


def looks(series: str) -> list[int]:
    return [int(mib) for mib in series.split()]


def verdict(series: list[int], at_end: list[int]) -> bool:
    return has_grown([mib << 20 for mib in series], [mib << 20 for mib in at_end])


@pytest.mark.parametrize("name", SERIES)
def test_what_goes_up_and_down_has_not_grown(name: str) -> None:
    *during, last = looks(SERIES[name])
    assert not verdict(during, [last, last, last + 3])


@pytest.mark.parametrize(("name", "mib_a_look"), [("fake", 3), ("torch", 2), ("worker", 5)])
def test_a_leak_on_top_of_it_is_seen(name: str, mib_a_look: int) -> None:
    leaking = [mib + mib_a_look * look for look, mib in enumerate(looks(SERIES[name]))]
    assert verdict(leaking[:-1], leaking[-1:])


def test_what_only_the_end_leaves_behind_is_seen() -> None:
    assert verdict(looks(HEAPS), [369, 369, 369])
    assert not verdict(looks(HEAPS), [369, 369, 254])


def test_a_step_in_the_middle_of_the_run_is_seen() -> None:
    assert verdict([100] * 30 + [117] * 30, [117] * 3)
    assert not verdict([100] * 30 + [116] * 30, [116] * 3)  # 16 MiB are the bound's
    assert not verdict([400] * 30 + [440] * 30, [440] * 3)
