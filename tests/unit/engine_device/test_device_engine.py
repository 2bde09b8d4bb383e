"""The engine over a device's runner against the engine over the CPU's: whole requests, steps launched ahead."""

from __future__ import annotations

from pathlib import Path

from pdserve.engine.device.devices import CpuDevice
from pdserve.engine.engine import Engine
from pdserve.engine.port import Runner
from pdserve.engine.scheduler import EngineLimits
from pdserve.sampling import SamplingParams
from tests.support.virtual_clock import VirtualClock
from tests.unit.engine_core.building import assert_at_rest, run_out, sample_key, sequence, start_local, step
from tests.unit.engine_device.driving import make_device_runner
from tests.unit.engine_torch.driving import make_runner
from tests.unit.engine_torch.random_model import write_random_model

PARAMS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.9, top_p=0.8, min_tokens=10),
    SamplingParams(temperature=0.7, top_k=30, repetition_penalty=1.1),
    SamplingParams(temperature=1.1, min_p=0.02, logprobs=2),
]


def texts(runner: Runner) -> list[list[int]]:
    """Of requests that come one after the other, are computed in chunks, and end by length or by token."""
    target = Engine(runner, EngineLimits(max_step_tokens=24, chunk_tokens=24, max_batch=4), VirtualClock())
    seqs = []
    for handle, params in enumerate(PARAMS, start=1):
        prompt = [3 + handle * 7 + at % 50 for at in range(9 * handle)]
        seq = sequence(prompt, handle=handle, key=sample_key(12 + 5 * handle, seed=handle, params=params))
        seqs.append(start_local(target, seq))
        for _ in range(4):
            step(target)
    run_out(target)
    assert_at_rest(target)
    return [seq.ids for seq in seqs]


def test_requests_get_the_texts_of_the_cpu(tmp_path: Path) -> None:
    folder = write_random_model(tmp_path)
    device = CpuDevice()
    ours = texts(make_device_runner(folder, device=device))
    assert ours == texts(make_runner(folder, num_blocks=64))
    assert device.num_replayed > 20
