"""What requests change about logits before the filters, on a device: the meaning is that of `token_changes`.

The host turns each spec into a list of single places: ids ruled out as bits, biases and penalties as (row, id, number).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pdserve.engine.device.devices import Device, send
from pdserve.engine.port import SampleSpec
from pdserve.engine.token_changes import changes_nothing
from pdserve.errors import RowFailed
from pdserve.sampling import forbidden_now
from pdserve.token_mask import num_words, to_mask

NEVER = float("-inf")


@dataclass(frozen=True, slots=True)
class Edited:
    """rows: those that are changed, by their place in the step; logits [rows, vocabulary] float64 of them; failed: why
    some of them can't be sampled from."""

    rows: tuple[int, ...]
    logits: Tensor
    failed: dict[int, RowFailed]


@dataclass(slots=True)
class _Places:
    """Numbers at single places of the changed rows."""

    rows: list[npt.NDArray[np.int64]] = field(default_factory=list)
    ids: list[npt.NDArray[np.int64]] = field(default_factory=list)
    values: list[npt.NDArray[np.float64]] = field(default_factory=list)

    def add(self, row: int, ids: npt.ArrayLike, values: npt.ArrayLike) -> None:
        found = np.asarray(ids, dtype=np.int64)
        self.rows.append(np.full(len(found), row, dtype=np.int64))
        self.ids.append(found)
        self.values.append(np.broadcast_to(np.asarray(values, dtype=np.float64), found.shape))


def edited(device: Device, logits: Tensor, specs: Sequence[SampleSpec]) -> Edited:
    """logits [rows, vocabulary] float32, not changed. Launches and doesn't wait."""
    vocab_size = logits.shape[1]
    forbidden = [_forbidden(spec) for spec in specs]
    rows = tuple(row for row, spec in enumerate(specs) if not changes_nothing(spec, forbidden[row]))
    failed: dict[int, RowFailed] = {}
    if not rows:
        return Edited(rows, logits[:0].to(torch.float64), failed)
    words = np.full((len(rows), num_words(vocab_size)), -1, dtype=np.int32)
    biases, factors, amounts = _Places(), _Places(), _Places()
    for place, row in enumerate(rows):
        spec, params = specs[row], specs[row].key.params
        _rule_out(words[place], spec, forbidden[row], vocab_size)
        bias: dict[int, float] = {}
        for token_id, value in params.logit_bias:
            if token_id < vocab_size:
                bias[token_id] = bias.get(token_id, 0.0) + value
        biases.add(place, list(bias), list(bias.values()))
        if not _penalises(spec):
            continue
        ids = np.asarray(spec.ids, dtype=np.int64)
        if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
            failed[row] = RowFailed(
                "the sampler failed", position=spec.position, cause="an id outside the vocabulary"
            )
            continue
        if params.repetition_penalty != 1:
            factors.add(place, np.unique(ids), params.repetition_penalty)
        if params.frequency_penalty or params.presence_penalty:
            made, counts = np.unique(ids[spec.num_prompt_tokens :], return_counts=True)
            amounts.add(place, made, params.frequency_penalty * counts + params.presence_penalty)
    places = send(device, np.array(rows, dtype=np.int64))
    result = logits.index_select(0, places).to(torch.float64)
    bits = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = (send(device, words).unsqueeze(-1) >> bits & 1).flatten(1)[:, :vocab_size]
    result.masked_fill_(allowed == 0, NEVER)
    _at(device, result, biases, lambda values, bias: values + bias)
    _at(device, result, factors, _repeated)
    _at(device, result, amounts, lambda values, amount: values - amount)
    return Edited(rows, result, failed)


def _forbidden(spec: SampleSpec) -> Sequence[int]:
    # Tokens that aren't known yet count as made; what depends on which they are doesn't run ahead.
    return forbidden_now(spec.key, spec.ids, spec.num_prompt_tokens - spec.num_unknown)


def _penalises(spec: SampleSpec) -> bool:
    params = spec.key.params
    return bool(params.repetition_penalty != 1 or params.frequency_penalty or params.presence_penalty)


def _rule_out(
    words: npt.NDArray[np.int32], spec: SampleSpec, forbidden: Sequence[int], vocab_size: int
) -> None:
    """Clear the bits of ids that its structure or the request doesn't allow. words [vocabulary / 32], all bits set."""
    if spec.mask is not None:
        mask = spec.mask[: len(words)]
        words[: len(mask)] &= mask
        words[len(mask) :] = 0
    if spec.key.params.allowed_token_ids:
        words &= to_mask(_inside(spec.key.params.allowed_token_ids, vocab_size), vocab_size)
    if forbidden:
        words &= ~to_mask(_inside(forbidden, vocab_size), vocab_size)


def _inside(ids: Sequence[int], vocab_size: int) -> list[int]:
    return [token_id for token_id in ids if 0 <= token_id < vocab_size]


def _at(device: Device, logits: Tensor, places: _Places, change: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Change single values in place; no place is named twice."""
    if not places.rows:
        return
    here = (send(device, np.concatenate(places.rows)), send(device, np.concatenate(places.ids)))
    logits.index_put_(here, change(logits[here], send(device, np.concatenate(places.values))))


def _repeated(values: Tensor, factor: Tensor) -> Tensor:
    return torch.where(values < 0, values * factor, values / factor)
