"""The sampler on a device against the one on the CPU: the same token for the same logits, whatever a request asks."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from pdserve.engine.device.device_sampler import DeviceSampler
from pdserve.engine.device.devices import CpuDevice
from pdserve.engine.port import RowOutput, SampleSpec
from pdserve.engine.sampler import sample
from pdserve.errors import RowFailed
from pdserve.sampling import SampleKey, SamplingParams
from pdserve.token_mask import to_mask

VOCABULARY = 300


def on_device(logits: torch.Tensor, specs: list[SampleSpec]) -> list[RowOutput]:
    return DeviceSampler(CpuDevice()).launch(logits, specs).outputs()


def drawn_params(source: random.Random) -> SamplingParams:
    """Each setting is there in about a third of all requests."""
    wishes: dict[str, Any] = {"temperature": source.choice([0.0, 0.01, 0.7, 1.0, 1.8])}
    ids = [source.randrange(VOCABULARY) for _ in range(source.choice([1, 5, 40]))]
    offered: dict[str, Any] = {
        "top_k": source.choice([1, 3, 50, VOCABULARY, 1000]),
        "top_p": source.choice([0.05, 0.5, 0.9, 0.999]),
        "min_p": source.choice([0.01, 0.1, 1.0]),
        "typical_p": source.choice([0.1, 0.6, 0.95]),
        "repetition_penalty": source.choice([0.7, 1.3]),
        "presence_penalty": source.choice([-1.0, 0.8]),
        "frequency_penalty": source.choice([-0.5, 1.1]),
        "logit_bias": tuple((token_id, source.uniform(-5, 5)) for token_id in sorted(set(ids))),
        "allowed_token_ids": tuple(sorted({*ids, source.randrange(VOCABULARY)})),
        "banned_token_ids": tuple(ids),
        "min_tokens": 8,
        "logprobs": source.choice([0, 1, 5]),
    }
    return SamplingParams(**wishes, **{key: value for key, value in offered.items() if source.random() < 0.3})


def drawn_spec(source: random.Random) -> SampleSpec:
    num_ids, num_prompt = source.randrange(6, 30), source.randrange(1, 6)
    key = SampleKey(
        params=drawn_params(source),
        seed=source.getrandbits(64),
        choice=source.randrange(3),
        eos_token_ids=(source.randrange(VOCABULARY),),
        max_tokens=100,
    )
    allowed = [token_id for token_id in range(VOCABULARY) if source.random() < 0.5]
    mask = to_mask(allowed, VOCABULARY)[: source.choice([10, 4])] if source.random() < 0.2 else None
    return SampleSpec(key, tuple(source.randrange(VOCABULARY) for _ in range(num_ids)), num_prompt, mask)


@pytest.mark.parametrize("seed", range(20))
def test_the_same_token_logprobs_or_error_as_on_the_cpu(seed: int) -> None:
    source = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(24, VOCABULARY, generator=generator) * source.choice([1.0, 4.0])
    if seed % 4 == 0:  # many equals
        logits = logits.round()
    logits[3, 7] = float("nan")
    specs = [drawn_spec(source) for _ in range(24)]
    for got, want in zip(on_device(logits, specs), sample(logits, specs), strict=True):
        assert got.token_id == want.token_id
        assert str(got.error) == str(want.error)
        assert (got.logprobs is None) == (want.logprobs is None)
        if got.logprobs is not None and want.logprobs is not None:
            assert got.logprobs.logprob == pytest.approx(want.logprobs.logprob)
            assert [token_id for token_id, _ in got.logprobs.top] == [
                token_id for token_id, _ in want.logprobs.top
            ]
            np.testing.assert_allclose(
                [value for _, value in got.logprobs.top], [value for _, value in want.logprobs.top], rtol=1e-6
            )


def spec(params: SamplingParams, ids: tuple[int, ...] = (1, 2, 3), num_unknown: int = 0) -> SampleSpec:
    key = SampleKey(params=params, seed=3, choice=0, eos_token_ids=(4,), max_tokens=100)
    return SampleSpec(key, ids, 2, num_unknown=num_unknown)


def test_a_token_that_is_not_known_yet_counts_as_made() -> None:
    """For the position of the draw, and for min_tokens."""
    logits = torch.randn(8, 50, generator=torch.Generator().manual_seed(1))
    logits[:, 4] += 3.0
    for params in (SamplingParams(temperature=1.0), SamplingParams(temperature=0, min_tokens=3)):
        for made in range(5):
            ids = (1, 2, *range(10, 10 + made))
            (known,) = on_device(logits[:1], [spec(params, (*ids, 9))])
            (unknown,) = on_device(logits[:1], [spec(params, ids, num_unknown=1)])
            assert known.token_id == unknown.token_id


def test_an_error_names_the_position_that_was_sampled() -> None:
    """A sequence's ids grow by the step before while this one is on the device."""
    nothing = SamplingParams(temperature=0, banned_token_ids=tuple(range(50)))
    ids = [1, 2, 3]
    key = SampleKey(params=nothing, seed=3, choice=0, eos_token_ids=(4,), max_tokens=100)
    launched = DeviceSampler(CpuDevice()).launch(torch.zeros(1, 50), [SampleSpec(key, ids, 2, num_unknown=1)])
    ids.append(9)
    (output,) = launched.outputs()
    assert output.error is not None and output.error.fields["position"] == 4


def test_an_id_that_the_vocabulary_has_not_ends_only_its_row() -> None:
    specs = [
        spec(SamplingParams(temperature=0, repetition_penalty=1.2), (1, 2, 99)),
        spec(SamplingParams(temperature=0)),
    ]
    bad, good = on_device(torch.arange(50.0).repeat(2, 1), specs)
    assert isinstance(bad.error, RowFailed)
    assert good.token_id == 49
