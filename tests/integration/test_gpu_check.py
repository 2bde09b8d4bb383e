"""scripts/gpu_check.py without a GPU: every step on doubles, each with its own end, and what is written of them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from pdserve.engine.device.runner import DeviceRunner, LaunchedStep
from pdserve.engine.layout import KvLayout
from pdserve.engine.port import ModelCard, Row, RowOutput
from pdserve.kv_memory import KvMemory
from scripts.gpu.model import SMALL, random_llama
from scripts.gpu.plan import ROOT, CheckStep, main
from scripts.gpu.tokens import check_tokens
from tests.unit.engine_device.driving import make_device_runner
from tests.unit.engine_torch.driving import make_runner


def _report(path: Path) -> dict[str, dict[str, object]]:
    return {step["step"]: step for step in json.loads(path.read_text())["steps"]}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cuda_ipc", "nccl", "stream", "stream --on-cpu d", "stream --on-cpu p"])
def test_links_of_a_dry_run(kind: str, tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    step = CheckStep("links", ("links", "--kind", *kind.split()), 120.0)
    assert main([step], "", ["--dry-run", "--json", str(out)]) == 0
    found = _report(out)["links"]["found"]
    assert isinstance(found, dict)
    assert len(found["sizes"]) == 3 and found["prefill_killed"]["other_lives"]


@dataclass(frozen=True, slots=True)
class _Wrong:
    """A sound runner but for how it changes what it is asked."""

    sound: DeviceRunner
    reseeds: bool = False
    forgets: bool = False

    @property
    def card(self) -> ModelCard:
        return self.sound.card

    @property
    def layout(self) -> KvLayout:
        return self.sound.layout

    @property
    def pool(self) -> KvMemory:
        return self.sound.pool

    def run(self, rows: Sequence[Row]) -> list[RowOutput]:
        return self.collect(self.launch(rows))

    def launch(self, rows: Sequence[Row], after: Mapping[int, int] | None = None) -> LaunchedStep:
        asked = [_reseeded(row) for row in rows] if self.reseeds else rows
        return self.sound.launch(asked, None if self.forgets else after)

    def collect(self, launched: LaunchedStep) -> list[RowOutput]:
        return self.sound.collect(launched)


def _reseeded(row: Row) -> Row:
    assert row.sample is not None
    key = replace(row.sample.key, seed=row.sample.key.seed + 1)
    return replace(row, sample=replace(row.sample, key=key))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_llama(tmp_path_factory.mktemp("model"), SMALL)


def test_a_sound_device_gives_the_tokens_of_the_cpu(folder: Path) -> None:
    found = check_tokens(make_device_runner(folder), make_runner(folder, num_blocks=64))
    assert found == {"sampled": 48, "sampled_otherwise": 0, "launched_ahead": 24}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"reseeds": True}, "sampled tokens aren't the CPU's"),
        ({"forgets": True}, "steps launched ahead give"),
    ],
)
def test_a_device_that_gives_others_is_told(folder: Path, wrong: dict[str, bool], said: str) -> None:
    device = _Wrong(make_device_runner(folder), **wrong)
    with pytest.raises(AssertionError, match=said):
        check_tokens(device, make_runner(folder, num_blocks=64))


def test_a_step_that_fails_is_written_down_and_the_next_one_runs(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    steps = [
        CheckStep("wrong", ("links", "--gpus", "none"), 60.0),
        CheckStep("environment", ("environment",), 60.0),
    ]
    assert main(steps, "", ["--dry-run", "--json", str(out)]) == 1
    wrong, after = _report(out).values()
    assert not wrong["ok"] and "invalid literal" in str(wrong["error"]) and after["ok"]


def test_a_step_without_a_gpu_fails_in_words(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    assert main([CheckStep("environment", ("environment",), 60.0)], "", ["--json", str(out)]) == 1
    assert "NCCL" in str(_report(out)["environment"]["error"])


def test_what_the_budget_doesnt_reach_is_not_begun(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    arguments = ["--dry-run", "--budget", "0", "--json", str(out)]
    assert main([CheckStep("environment", ("environment",), 60.0)], "", arguments) == 1
    assert "the budget is used up" in str(_report(out)["environment"]["error"])


def test_a_step_over_its_time_is_ended_with_its_processes(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    arguments = ["--dry-run", "--budget", "5.5", "--json", str(out)]
    assert main([CheckStep("cluster", ("cluster",), 60.0)], "", arguments) == 1
    assert "not done within" in str(_report(out)["cluster"]["error"])


@pytest.mark.slow
@pytest.mark.parametrize("script", ["gpu_check.py", "multi_gpu_check.py"])
def test_every_step(script: str, tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    line = [sys.executable, f"scripts/{script}", "--dry-run", "--json", str(out)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=480)
    assert done.returncode == 0, done.stdout + out.read_text()
    assert all(step["ok"] for step in _report(out).values())
