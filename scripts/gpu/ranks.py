"""A model divided between two GPUs: greedy tokens of the CPU's engine, and what a decode step takes."""

from __future__ import annotations

import os
import random
from typing import Any

from pdserve.clock import SystemClock
from pdserve.engine.port import Row, SampleSpec
from pdserve.engine.torch_runner import TorchRunner
from pdserve.node.device_runner import find_device
from pdserve.node.load import LoadProgress
from pdserve.node.ranks import Ranks
from pdserve.sampling import SampleKey, SamplingParams
from pdserve.service.config import load
from scripts.gpu.model import LARGE, SMALL, random_llama
from scripts.gpu.place import GpuPlace

_CLOCK = SystemClock()
_BLOCK, _TOKENS, _STEPS = 16, 16, 32
_NEAR_TIE = 5e-2  # of log-likelihoods: greedy may choose otherwise between two as near as this
_GREEDY = SampleKey(
    params=SamplingParams(temperature=0, logprobs=0), seed=0, choice=0, eos_token_ids=(), max_tokens=1 << 30
)


def check_ranks(place: GpuPlace) -> dict[str, Any]:
    """Raises AssertionError where a greedy token isn't the CPU's, nor a near tie."""
    if place.is_dry:
        os.environ["PDSERVE_DEVICE"] = "double"
    folder = random_llama(place.folder, SMALL if place.is_dry else LARGE)
    config = load(
        flags={
            "worker.model": str(folder), "engine.tensor_parallel": 2, "engine.num_blocks": 64,
            "engine.device": f"cuda:{place.prefill}", "engine.dtype": "float32", "engine.max_batch": 4,
            "engine.max_step_tokens": 64, "transport.kinds": "stream",
        }
    )  # fmt: skip
    device = find_device(config.engine.device)
    assert device is not None, "there is no GPU"
    reference = TorchRunner(
        folder, dtype="float32", deterministic=False, num_threads=len(os.sched_getaffinity(0)), num_blocks=64,
        kv_memory_bytes=0, block_size=_BLOCK,
    )  # fmt: skip
    source = random.Random(1)
    num_ties = 0
    with Ranks(2) as ranks:
        runner = ranks.load_on(device, folder, config, LoadProgress(_CLOCK, lambda state: None, None))
        for length in (3, 40):
            ids, start = [source.randrange(256) for _ in range(length)], 0
            table = list(range(runner.layout.blocks_for(length + _TOKENS)))
            for _ in range(_TOKENS):
                row = Row(tuple(ids[start:]), start, table, SampleSpec(_GREEDY, tuple(ids), length))
                (got,), logits = runner.run([row]), reference.logits([row])[0].log_softmax(-1)
                assert got.token_id is not None, got.error
                wanted = int(logits.argmax())
                if got.token_id != wanted:
                    num_ties += 1
                    assert float(logits[wanted] - logits[got.token_id]) < _NEAR_TIE, (got.token_id, wanted)
                start = len(ids)
                ids.append(wanted)
        row = Row((5,), 40, list(range(3)), SampleSpec(_GREEDY, (5,) * 41, 1))
        runner.run([row])
        began_s = _CLOCK.now_s()
        for _ in range(_STEPS):
            runner.run([row])
        step_ms = (_CLOCK.now_s() - began_s) / _STEPS * 1e3
    return {
        "tokens": 2 * _TOKENS,
        "near_ties": num_ties,
        "step_ms": step_ms,
        "numerics": runner.card.numerics,
    }
