"""The sampler on a device: the tokens that `sampler` gives for the same logits, for all rows of a step at once.

Nothing waits for the device before `SampledTokens.outputs`: shapes follow from the specs alone, what is ruled out
stays in place as −inf. Sums over a vocabulary are added in another order than on the CPU, so a draw that falls within
some 10⁻¹⁵ of the border between two tokens may give the other one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pdserve.engine import philox
from pdserve.engine.device.devices import Device, send
from pdserve.engine.device.token_edits import edited
from pdserve.engine.port import RowOutput, SampleSpec, nothing_left
from pdserve.errors import RowFailed
from pdserve.sampling import SamplingParams, TokenLogprobs

NEVER = float("-inf")


class DeviceSampler:
    """Engine owner's thread only."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def launch(self, logits: Tensor, specs: Sequence[SampleSpec]) -> SampledTokens:
        """logits [rows, vocabulary] float32, not changed; one spec a row."""
        is_finite = torch.isfinite(logits.sum(dim=-1, dtype=torch.float64))
        tokens = logits.argmax(dim=-1)
        edits = edited(self._device, logits, specs)
        edited_at = {row: place for place, row in enumerate(edits.rows)}
        drawn = [row for row, spec in enumerate(specs) if spec.key.params.temperature > 0]
        picked = [row for row in edits.rows if specs[row].key.params.temperature == 0]
        is_left = torch.ones_like(is_finite)
        for rows, chosen in ((drawn, self._draw), (picked, _best)):
            if not rows:
                continue
            places = send(self._device, np.array(rows, dtype=np.int64))
            values = logits.index_select(0, places).to(torch.float64)
            if changed := [(at, edited_at[row]) for at, row in enumerate(rows) if row in edited_at]:
                here, there = send(self._device, np.array(changed, dtype=np.int64).T.copy())
                values.index_copy_(0, here, edits.logits.index_select(0, there))
            tokens.index_copy_(0, places, chosen(values, [specs[row] for row in rows]))
            is_left.index_copy_(0, places, values.amax(dim=-1) > NEVER)
        verdict = torch.stack((tokens, is_finite.to(torch.int64), is_left.to(torch.int64)))
        scored = [row for row, spec in enumerate(specs) if spec.key.params.logprobs is not None]
        return SampledTokens(
            tokens,
            specs,
            [spec.position for spec in specs],
            edits.failed,
            self._bring(verdict),
            self._logprobs(logits, tokens, specs, scored),
        )

    def _bring(self, values: Tensor) -> Tensor:
        """A tensor of the host that will hold these once all is done that is launched by now."""
        host = self._device.host_buffer(values.numel(), values.dtype).view(values.shape)
        return host.copy_(values, non_blocking=True)

    def _draw(self, logits: Tensor, specs: Sequence[SampleSpec]) -> Tensor:
        """[rows] int64: the token of each row's draw. logits [rows, vocabulary] float64."""
        params = [spec.key.params for spec in specs]
        column = self._columns(params)
        # Shifted first, so that a tiny temperature can't overflow: the best token has weight exp(0).
        left = (logits - logits.amax(dim=-1, keepdim=True)) / column["temperature"]
        if any(each.min_p > 0 for each in params):
            left = _only(left, left >= left.amax(dim=-1, keepdim=True) + column["min_p"].log())
        if any(each.top_k > 0 for each in params):
            left = _only(left, left >= _nth_best(left, column["top_k"]))
        if any(each.top_p < 1 for each in params):
            left = _only(left, _reaching(left, -left, column["top_p"]))
        if any(each.typical_p < 1 for each in params):
            left = _only(left, _typical(left, column["typical_p"]))
        probabilities = torch.softmax(left, dim=-1)
        us = send(
            self._device,
            np.array([philox.uniform(spec.key.seed, spec.position, spec.key.choice) for spec in specs]),
        )
        passed = (probabilities.cumsum(dim=-1) <= us.unsqueeze(1)).sum(dim=-1)
        ids = torch.arange(logits.shape[1], device=logits.device)
        last = torch.where(probabilities > 0, ids, 0).amax(dim=-1)
        return torch.minimum(passed, last)

    def _columns(self, params: Sequence[SamplingParams]) -> dict[str, Tensor]:
        """[rows, 1] float64 of what the filters need; what doesn't filter becomes what keeps all."""
        names = ("temperature", "min_p", "top_p", "typical_p", "top_k")
        values = [[float(getattr(each, name)) for name in names] for each in params]
        sent = send(self._device, np.array(values, dtype=np.float64))
        return dict(zip(names, torch.split(sent, 1, dim=1), strict=True))

    def _logprobs(
        self, logits: Tensor, tokens: Tensor, specs: Sequence[SampleSpec], rows: Sequence[int]
    ) -> _Logprobs | None:
        if not rows:
            return None
        places = send(self._device, np.array(rows, dtype=np.int64))
        raw = logits.index_select(0, places)
        logprobs = torch.log_softmax(raw, dim=-1, dtype=torch.float64)
        chosen = logprobs.gather(1, tokens.index_select(0, places).unsqueeze(1))
        top = min(max(specs[row].key.params.logprobs or 0 for row in rows), raw.shape[1])
        ids = torch.sort(raw, dim=-1, descending=True, stable=True).indices[:, :top]
        values = torch.cat((chosen, logprobs.gather(1, ids)), dim=1).to(torch.float32)
        return _Logprobs(tuple(rows), self._bring(values), self._bring(ids))


@dataclass(frozen=True, slots=True)
class _Logprobs:
    """Of some rows: values [rows, 1 + top], the chosen token's first; ids [rows, top]. On the host."""

    rows: tuple[int, ...]
    values: Tensor
    ids: Tensor

    def by_row(self, specs: Sequence[SampleSpec]) -> dict[int, TokenLogprobs]:
        found: dict[int, TokenLogprobs] = {}
        for row, values, ids in zip(self.rows, self.values.tolist(), self.ids.tolist(), strict=True):
            top = specs[row].key.params.logprobs or 0
            found[row] = TokenLogprobs(values[0], tuple(zip(ids[:top], values[1 : 1 + top], strict=True)))
        return found


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """What `DeviceSampler.launch` has begun.

    tokens  [rows] int64 on the device, for the next step; of a row that fails any id
    """

    tokens: Tensor
    specs: Sequence[SampleSpec]
    positions: Sequence[int]
    failed: dict[int, RowFailed]
    verdict: Tensor
    logprobs: _Logprobs | None

    def outputs(self) -> list[RowOutput]:
        """One a row. To be called once a mark behind `launch` has been waited for."""
        logprobs = {} if self.logprobs is None else self.logprobs.by_row(self.specs)
        outputs: list[RowOutput] = []
        for row, (token, is_finite, is_left) in enumerate(self.verdict.t().tolist()):
            spec = self.specs[row]
            if not is_finite:
                outputs.append(
                    RowOutput(error=RowFailed("logits are not finite", position=self.positions[row]))
                )
            elif row in self.failed:
                outputs.append(RowOutput(error=self.failed[row]))
            elif not is_left:
                outputs.append(RowOutput(error=nothing_left(spec, self.positions[row])))
            else:
                outputs.append(RowOutput(token, logprobs.get(row)))
        return outputs


def _best(logits: Tensor, specs: Sequence[SampleSpec]) -> Tensor:
    return logits.argmax(dim=-1)


def _only(logits: Tensor, kept: Tensor) -> Tensor:
    return logits.masked_fill(~kept, NEVER)


def _nth_best(logits: Tensor, n: Tensor) -> Tensor:
    """[rows, 1]: each row's n-th best value, n [rows, 1]; of 0 its last."""
    size = logits.shape[1]
    ordered = torch.sort(logits, dim=-1, descending=True).values
    place = torch.where(n > 0, n, float(size)).clamp(max=size).to(torch.int64) - 1
    return ordered.gather(1, place)


def _reaching(logits: Tensor, keys: Tensor, reach: Tensor) -> Tensor:
    """Which are the fewest tokens, in ascending order of keys, whose probabilities reach so much; 1: all.

    Of equal keys the lower id goes first. Always one at least.
    """
    order = torch.sort(keys, dim=-1, stable=True).indices
    ordered = torch.softmax(logits, dim=-1).gather(1, order)
    before = ordered.cumsum(dim=-1).roll(1, dims=-1)
    before[:, 0] = NEVER
    kept = (before < reach) | (reach >= 1)
    return torch.empty_like(kept).scatter_(1, order, kept)


def _typical(logits: Tensor, typical_p: Tensor) -> Tensor:
    """As `token_filters.typical_p_places`: nearest to the expected information first, with equals of the last."""
    logprobs = torch.log_softmax(logits, dim=-1)
    probabilities = logprobs.exp()
    entropy = -torch.where(probabilities > 0, probabilities * logprobs, 0.0).sum(dim=-1, keepdim=True)
    distance = (-logprobs - entropy).abs()
    nearest = _reaching(logits, distance, typical_p)
    last = torch.where(nearest, distance, NEVER).amax(dim=-1, keepdim=True)
    return (distance <= last) | (typical_p >= 1)
