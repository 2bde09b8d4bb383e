"""A decoder's layers as one call: the same bits as its parts one by one, whatever the family, step and threads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pdserve.engine.attention import Span, StepAttention, Turn, begun_blocks
from pdserve.engine.kv_pool import KvPool
from pdserve.engine.model_folder import ModelFolder
from pdserve.engine.models.decoder import Decoder, StepInputs
from pdserve.engine.native.attention import NativeSteps
from pdserve.engine.native.library import Kernels
from pdserve.engine.numerics import choose_precision
from tests.support.native_kernels import EACH_VARIANT
from tests.support.random_families import save_random
from tests.unit.engine_torch.random_gguf import write_gguf
from tests.unit.engine_torch.random_model import write_random_model

BLOCK_SIZE = 16
TABLES = [list(range(20)), list(range(40, 60)), list(range(20, 40))]
# (sequence, its positions before the step, tokens in the step)
STEPS = [
    [(0, 0, 70), (1, 0, 3)],
    [(0, 70, 1), (1, 3, 1)],
    [(0, 71, 1), (1, 4, 1)],
    [(0, 72, 1), (1, 5, 1), (2, 0, 260)],
    [(2, 260, 1)],
]


@dataclass(frozen=True)
class PartByPart:
    """Attention that isn't a program's, so layers call it, and all else, one by one."""

    attention: StepAttention

    def attend(self, layer: int, projected: Tensor, turn: Turn) -> Tensor:
        return self.attention.attend(layer, projected, turn)


class Model:
    """One, over a pool of its own."""

    def __init__(self, folder: ModelFolder, decoder: Decoder, kernels: Kernels) -> None:
        layout = folder.layout(choose_precision("bfloat16", kernels="native"), BLOCK_SIZE, 60)
        self.decoder = decoder
        self.pool = KvPool(layout, torch.bfloat16)
        self.steps = NativeSteps(kernels, self.pool, folder.heads())

    def forward(self, parts: list[tuple[int, int, int]], *, is_whole: bool) -> Tensor:
        """Hidden states of all tokens behind the last layer."""
        spans, first = [], 0
        for sequence, start, length in parts:
            spans.append(Span(first, length, start, TABLES[sequence]))
            first += length
        self.pool.begin_blocks(begun_blocks(spans, BLOCK_SIZE))
        positions = torch.tensor([at for span in spans for at in range(span.start, span.end)])
        ids = (positions * 37 + 11) % 64
        attention = self.steps.of(spans)
        step = StepInputs(
            ids, positions, torch.arange(first), attention if is_whole else PartByPart(attention)
        )
        return self.decoder.forward(step)


def assert_same_bits(path: Path, kernels: Kernels, *, is_program: bool = True) -> None:
    folder = ModelFolder.open(path, long_context=False, progress=None)
    precision = choose_precision("bfloat16", kernels="native", variant=kernels.variant)
    before = torch.get_num_threads()
    with torch.inference_mode():
        decoder = folder.decoder(precision)
        whole, parts = (Model(folder, decoder, kernels) for _ in range(2))
        assert decoder.is_one_call is is_program
        try:
            for number, step in enumerate(STEPS):
                torch.set_num_threads(1)
                want = parts.forward(step, is_whole=False)
                for num_threads in (1, 2, 5):  # again: the same K and V, once more
                    torch.set_num_threads(num_threads)
                    got = whole.forward(step, is_whole=True)
                    assert torch.equal(got, want), (number, num_threads)
            assert torch.equal(whole.pool.tensor, parts.pool.tensor)
        finally:
            torch.set_num_threads(before)


@pytest.mark.parametrize("kernels", EACH_VARIANT)
@pytest.mark.parametrize(
    "changes", [{}, {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}], ids=str
)
def test_plain_weights(tmp_path: Path, kernels: Kernels, changes: dict[str, Any]) -> None:
    assert_same_bits(write_random_model(tmp_path, dtype=torch.bfloat16, **changes), kernels)


@pytest.mark.parametrize("kernels", EACH_VARIANT)
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q5_1"])
def test_quantised_weights(tmp_path: Path, kernels: Kernels, kind: str) -> None:
    write_gguf(tmp_path, kind)
    assert_same_bits(tmp_path, kernels)


@pytest.mark.slow
@pytest.mark.parametrize("kernels", EACH_VARIANT)
@pytest.mark.parametrize(
    "name", ["qwen2", "qwen3 with biases", "mistral", "gemma3", "gemma3 capped", "phi3", "phi4 mini"]
)
def test_every_dense_family(tmp_path: Path, kernels: Kernels, name: str) -> None:
    """Norms behind attention and feed-forward, norms of heads, two ropes, windows, soft caps."""
    assert_same_bits(save_random(name, tmp_path), kernels)


@pytest.mark.slow
@pytest.mark.parametrize("kernels", EACH_VARIANT)
def test_experts_go_part_by_part(tmp_path: Path, kernels: Kernels) -> None:
    assert_same_bits(save_random("mixtral", tmp_path), kernels, is_program=False)
