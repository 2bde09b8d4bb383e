"""The engine on a real GPU against the one on the CPU. Skips without one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pdserve.engine.device.devices import CudaDevice
from pdserve.engine.device.runner import DeviceRunner, device_precision
from pdserve.kv_memory import DeviceMemory
from tests.support.random_families import FAMILIES, save_random
from tests.unit.engine_device.test_device_engine import texts
from tests.unit.engine_torch.driving import BLOCK_SIZE, make_runner
from tests.unit.engine_torch.random_model import write_random_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


def on_gpu(folder: Path) -> DeviceRunner:
    device = CudaDevice(0)
    return DeviceRunner(
        folder,
        device,
        precision=device_precision("float32", "auto", device),
        num_blocks=64,
        utilization=0.9,
        block_size=BLOCK_SIZE,
        max_step_tokens=64,
        max_batch=4,
    )


def test_requests_get_the_texts_of_the_cpu(tmp_path: Path) -> None:
    folder = write_random_model(tmp_path)
    runner = on_gpu(folder)
    assert isinstance(runner.pool, DeviceMemory)
    assert texts(runner) == texts(make_runner(folder, num_blocks=64))


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_gives_the_texts_of_the_cpu(name: str, tmp_path: Path) -> None:
    folder = save_random(name, tmp_path)
    assert texts(on_gpu(folder)) == texts(make_runner(folder, num_blocks=64))
