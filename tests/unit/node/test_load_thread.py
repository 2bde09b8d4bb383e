"""The thread that loads a model, and what it leaves behind: nothing."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest
import torch

from pdserve.node.load import LoadProgress, LoadState
from pdserve.node.process import _load_unless_stopped
from pdserve.service.config import load
from pdserve.service.lifecycle import StopSignals
from pdserve.tokenizer import Tokenizer
from tests.support.virtual_clock import VirtualClock
from tests.support.waiting import until
from tests.unit.engine_torch.random_model import write_random_model


def system_threads() -> set[str]:
    return set(os.listdir("/proc/self/task"))


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
async def test_no_thread_of_a_load_lives_on(tmp_path: Path) -> None:
    """Nor one of its compute threads: while libgomp counts more of them than cores, those of a step sleep after each
    kernel, and the next one waits for them."""
    folder = write_random_model(tmp_path / "m")
    for name, content in Tokenizer.fake().files.items():
        (folder / name).write_bytes(content)
    clock = VirtualClock()
    settings = load(
        flags={
            "worker.model": str(folder),
            "engine.num_blocks": 4,
            "engine.threads": 2,
            "engine.device": "cpu",
        }
    )
    loaders: set[int] = set()
    teams: set[str] = set()

    def compute(state: LoadState) -> None:
        """On the thread that loads: a larger model's weights are packed by a team there."""
        before = system_threads()
        torch.set_num_threads(2)
        torch.ones(1 << 22).exp_()
        loaders.add(threading.get_native_id())
        teams.update(system_threads() - before)

    before = system_threads()
    async with StopSignals() as stop:
        model = await _load_unless_stopped(settings, stop, LoadProgress(clock, compute, None), clock, None)
    assert model is not None
    assert len(loaders) == 1
    assert threading.get_native_id() not in loaders
    assert len(teams) == 1  # else the load had nothing to leave

    async def are_gone() -> bool:
        return not (system_threads() - before) & (teams | {str(loader) for loader in loaders})

    await until("no thread of the load is left", are_gone, limit_s=20)
