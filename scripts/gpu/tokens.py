"""What the device samples: the tokens of the CPU, and the same ones when steps are launched ahead."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdserve.engine.port import LaunchingRunner, Row, RowOutput, Runner, SampleSpec
from pdserve.sampling import SampleKey, SamplingParams

_STEPS = 12
_PROMPT = 24
_DRAWN = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9),
    SamplingParams(temperature=1.2, min_p=0.05, presence_penalty=0.5, frequency_penalty=0.3),
)
_AHEAD = _DRAWN[:2]  # penalties wait for their last token
_OTHERS = 1 / 12  # of all tokens: logits sum in another order, and a draw may lie between two tokens


_Launching = LaunchingRunner[Any]


@dataclass(slots=True)
class _Sequence:
    """Blocks of its own; the last of `ids` isn't computed yet."""

    key: SampleKey
    ids: list[int]
    table: tuple[int, ...]
    num_computed: int = 0

    def row(self) -> Row:
        spec = SampleSpec(self.key, tuple(self.ids), _PROMPT)
        return Row(tuple(self.ids[self.num_computed :]), self.num_computed, self.table, spec)

    def row_ahead(self) -> Row:
        """Behind one whose token isn't known yet."""
        spec = SampleSpec(self.key, tuple(self.ids), _PROMPT, num_unknown=1)
        return Row((0,), len(self.ids), self.table, spec)

    def add(self, token_id: int) -> None:
        self.num_computed = len(self.ids)
        self.ids.append(token_id)


def check_tokens(here: _Launching, reference: Runner) -> dict[str, Any]:
    """Raises AssertionError where the device's tokens are others, more often than rounding explains."""
    others = _differing(here, reference)
    num_tokens = _STEPS * len(_DRAWN)
    assert others <= num_tokens * _OTHERS, f"{others} of {num_tokens} sampled tokens aren't the CPU's"
    waited, ahead = _waiting(here), _launched_ahead(here)
    assert ahead == waited, f"steps launched ahead give {ahead} instead of {waited}"
    return {"sampled": num_tokens, "sampled_otherwise": others, "launched_ahead": _STEPS * len(_AHEAD)}


def _differing(here: Runner, reference: Runner) -> int:
    """Tokens that aren't those of the CPU, which both go on with."""
    ours, theirs = _sequences(_DRAWN, here), _sequences(_DRAWN, here)
    others = 0
    for _ in range(_STEPS):
        got, want = _tokens(here.run(_rows(ours))), _tokens(reference.run(_rows(theirs)))
        others += sum(mine != right for mine, right in zip(got, want, strict=True))
        for each, token_id in zip((*ours, *theirs), (*want, *want), strict=True):
            each.add(token_id)
    return others


def _waiting(here: Runner) -> list[list[int]]:
    sequences = _sequences(_AHEAD, here)
    for _ in range(_STEPS):
        for each, token_id in zip(sequences, _tokens(here.run(_rows(sequences))), strict=True):
            each.add(token_id)
    return [each.ids for each in sequences]


def _launched_ahead(here: _Launching) -> list[list[int]]:
    """Each step goes on with tokens that only the device knows."""
    sequences = _sequences(_AHEAD, here)
    goes_on: Mapping[int, int] = {number: number for number in range(len(sequences))}
    launched = here.launch(_rows(sequences))
    for _ in range(_STEPS - 1):
        following = here.launch([each.row_ahead() for each in sequences], goes_on)
        for each, token_id in zip(sequences, _tokens(here.collect(launched)), strict=True):
            each.add(token_id)
        launched = following
    for each, token_id in zip(sequences, _tokens(here.collect(launched)), strict=True):
        each.add(token_id)
    return [each.ids for each in sequences]


def _sequences(drawn: Sequence[SamplingParams], runner: Runner) -> list[_Sequence]:
    source = random.Random(2)
    width = runner.layout.blocks_for(_PROMPT + _STEPS + 1)
    return [
        _Sequence(
            SampleKey(params=params, seed=number + 1, choice=0, eos_token_ids=(), max_tokens=1 << 30),
            [source.randrange(256) for _ in range(_PROMPT)],
            tuple(range(number * width, (number + 1) * width)),
        )
        for number, params in enumerate(drawn)
    ]


def _rows(sequences: Sequence[_Sequence]) -> list[Row]:
    return [each.row() for each in sequences]


def _tokens(outputs: Sequence[RowOutput]) -> list[int]:
    found = []
    for output in outputs:
        assert output.token_id is not None, output.error
        found.append(output.token_id)
    return found
