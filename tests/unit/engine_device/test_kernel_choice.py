"""The fastest kernels that are right are taken; wrong ones end the start."""

from __future__ import annotations

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor

from pdserve.engine.attention import Heads
from pdserve.engine.device.device_pool import DevicePool
from pdserve.engine.device.devices import CpuDevice
from pdserve.engine.device.kernel_choice import MakeKernels, candidates, choose_kernels
from pdserve.engine.device.paged_attention import GatheredKernels, PagedKernels
from pdserve.engine.layout import KvLayout
from pdserve.errors import Incompatible
from tests.unit.engine_device.driving import FLOAT32

LAYOUT = KvLayout(
    num_blocks=5, kv_heads=2, layers=2, block_size=16, head_dim=8, dtype="float32", item_bytes=4
)
HEADS = Heads(6, 2, 8, softcap=20.0, windows=(0, 4))


class Other(GatheredKernels):
    """The same, by another name."""

    name = "other"


class Wrong(Other):
    """One number is off, or none at all."""

    off = 0.1

    def attend_singles(
        self, layer: int, queries: Tensor, blocks: Tensor, ends: Tensor, outputs: Tensor
    ) -> None:
        super().attend_singles(layer, queries, blocks, ends, outputs)
        outputs[3, 1, 2] += self.off


class WrongInChunks(Other):
    """Single tokens are right."""

    def attend_chunk(self, layer: int, queries: Tensor, blocks: Tensor, start: int, outputs: Tensor) -> None:
        super().attend_chunk(layer, queries, blocks, start, outputs)
        outputs[-1, 0, 0] += 0.1


class Blind(Other):
    """Sees no windows."""

    def __init__(self, pool: DevicePool, heads: Heads) -> None:
        super().__init__(pool, Heads(6, 2, 8, softcap=20.0))


class Poisoned(Wrong):
    """Gives NaN."""

    off = float("nan")


def choose(makers: list[MakeKernels], seconds: list[float], width: int = 0) -> str:
    device = CpuDevice(seconds=seconds)
    chosen = choose_kernels(makers, device, LAYOUT, HEADS, FLOAT32, width)
    return chosen(DevicePool(LAYOUT, torch.float32, device), HEADS).name


@pytest.mark.parametrize(("seconds", "want"), [([2e-4, 1e-4], "other"), ([1e-4, 2e-4], "gathered")])
def test_the_fastest_is_taken_and_logged(seconds: list[float], want: str) -> None:
    with capture_logs() as lines:
        assert choose([GatheredKernels, Other], seconds) == want
    (line,) = lines
    assert line["event"] == "engine.kernels"
    assert (line["chosen"], line["gathered_us"], line["other_us"]) == (
        want,
        seconds[0] * 1e6,
        seconds[1] * 1e6,
    )


def test_what_is_timed_has_the_tables_of_a_graph() -> None:
    """Which hold a whole window; where that is too much for one, it isn't taken."""
    widths: list[int] = []

    class Watched(Other):
        def attend_singles(
            self, layer: int, queries: Tensor, blocks: Tensor, ends: Tensor, outputs: Tensor
        ) -> None:
            widths.append(blocks.shape[1])
            if blocks.shape[1] == 200:
                raise torch.OutOfMemoryError("a whole window")
            super().attend_singles(layer, queries, blocks, ends, outputs)

    assert choose([GatheredKernels, Watched], [2e-4, 1e-4], width=100) == "other"
    assert choose([GatheredKernels, Watched], [2e-4], width=200) == "gathered"
    assert choose([GatheredKernels, Watched], [2e-4, 1e-4], width=3) == "other"
    assert widths == [64, 64, 100, 64, 64, 200, 64, 64, 64]  # two kinds of layers, then what is timed


class Refusing(Other):
    """As torch's are where it was built without them."""

    refusal: type[RuntimeError] = RuntimeError

    def attend_singles(
        self, layer: int, queries: Tensor, blocks: Tensor, ends: Tensor, outputs: Tensor
    ) -> None:
        raise self.refusal("not built with them")


class Broken(Refusing):
    """The device reports an error."""

    refusal = torch.AcceleratorError


def test_one_that_refuses_is_left_out_and_one_that_breaks_is_not() -> None:
    with capture_logs() as lines:
        assert choose([GatheredKernels, Refusing], [1e-4]) == "gathered"
    assert [line["event"] for line in lines] == ["engine.kernels_refused", "engine.kernels"]
    assert (lines[0]["kernels"], lines[0]["reason"]) == ("other", "not built with them")
    with pytest.raises(torch.AcceleratorError):
        choose([GatheredKernels, Broken], [1e-4])


@pytest.mark.parametrize("wrong", [Wrong, Poisoned, WrongInChunks, Blind])
def test_one_that_computes_wrongly_is_not_served_with(wrong: type[Other]) -> None:
    with pytest.raises(Incompatible, match=r"computes wrongly.*kernels=other"):
        choose([GatheredKernels, wrong], [1.0, 1.0])


def test_each_candidate_is_made_once() -> None:
    made: list[PagedKernels] = []

    def other(pool: DevicePool, heads: Heads) -> PagedKernels:
        made.append(Other(pool, heads))
        return made[-1]

    choose_kernels([GatheredKernels, other], CpuDevice(seconds=[1.0, 2.0]), LAYOUT, HEADS, FLOAT32)
    assert len(made) == 1


def test_a_cpu_has_nothing_to_choose() -> None:
    assert candidates(CpuDevice(), LAYOUT, HEADS, torch.float32) == [GatheredKernels]
    assert choose([GatheredKernels], []) == "gathered"
