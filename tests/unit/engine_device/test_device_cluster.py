"""A cluster in which one worker computes on a device and the other on the CPU: the texts of a cluster of CPUs."""

from __future__ import annotations

import random
from pathlib import Path
from typing import cast

import pytest

from pdserve.engine.device.devices import CpuDevice
from pdserve.engine.device.runner import DeviceRunner
from pdserve.sampling import SamplingParams
from pdserve.service.config import Config, EngineConfig
from pdserve.tokenizer import Tokenizer
from tests.support.random_families import VOCAB_SIZE, save_random
from tests.support.serving import ONE_PAIR
from tests.support.torch_cluster import (
    BLOCK_SIZE,
    Answer,
    Job,
    RecordingRunner,
    Shape,
    Shelf,
    TorchCluster,
    play,
)
from tests.unit.engine_device.driving import FLOAT32

MAX_BATCH, CHUNK, NUM_BLOCKS = 8, 64, 128


class MixedShelf(Shelf):
    """The runner of one worker is a device's; what the others record isn't asked for."""

    def __init__(self, folder: Path, on_device: int) -> None:
        super().__init__(folder, Tokenizer.fake(VOCAB_SIZE), dtype="float32", deterministic=False)
        self.device = CpuDevice()
        self._path = folder
        self._on_device = on_device

    def runner(self, index: int, num_blocks: int) -> RecordingRunner:
        if index != self._on_device:
            return super().runner(index, num_blocks)
        runner = _Unrecorded(
            self._path,
            self.device,
            precision=FLOAT32,
            num_blocks=num_blocks,
            utilization=0.9,
            block_size=BLOCK_SIZE,
            max_step_tokens=CHUNK,
            max_batch=MAX_BATCH,
        )
        return cast(RecordingRunner, runner)


class _Unrecorded(DeviceRunner):
    def begin_record(self) -> None:
        self.bits: dict[int, int] = {}
        self.num_conflicts = self.largest_batch = self.longest_row = 0


@pytest.mark.parametrize("on_device", [0, 1], ids=["prefill", "decode"])
def test_one_worker_of_the_pair_is_on_a_device(on_device: int, tmp_path: Path) -> None:
    folder = save_random("gemma3 capped", tmp_path)
    draw = random.Random(4)
    prompts = [tuple(draw.randrange(3, VOCAB_SIZE) for _ in range(length)) for length in (150, 65, 40, 7)]
    jobs = [
        Job(
            prompt=prompt,
            sampling=SamplingParams(temperature=0.5 * index, ignore_eos=True, max_tokens=12),
            seed=index,
        )
        for index, prompt in enumerate(prompts)
    ]

    async def talk(cluster: TorchCluster) -> list[Answer]:
        return await cluster.ask_all(jobs, len(jobs))

    engine = EngineConfig(dtype="float32", max_step_tokens=CHUNK, max_batch=MAX_BATCH)
    shape = Shape(config=Config(engine=engine), workers=ONE_PAIR, num_blocks=NUM_BLOCKS)
    mixed = MixedShelf(folder, on_device)
    record = play(mixed, shape, talk)
    assert record.received_blocks > 0
    assert record.tokens == play(MixedShelf(folder, on_device=-1), shape, talk).tokens
    assert (mixed.device.num_replayed > 0) == (on_device == 1)
