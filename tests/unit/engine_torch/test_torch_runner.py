"""The runner on a small random model: chunks, mixed batches, hand-off, and rows that fail alone."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from pdserve.engine.numerics import LinearKind, Precision, has_native_bfloat16
from pdserve.engine.port import Row, Runner
from pdserve.engine.torch_runner import TorchRunner
from pdserve.errors import RowFailed
from pdserve.modelstore.errors import BadModel
from pdserve.sampling import SamplingParams
from tests.support.memories import pool_bytes
from tests.unit.engine_torch.driving import (
    BLOCK_SIZE,
    Stream,
    advance,
    advance_with_logits,
    copy_blocks,
    make_runner,
    sample_key,
)
from tests.unit.engine_torch.random_model import SMALL, write_random_model

VOCABULARY: int = SMALL["vocab_size"]
BFLOAT16 = torch.bfloat16
KINDS = {
    "float32": Precision("float32", torch.float32, torch.float32, LinearKind.ONEDNN),
    "float32 plain": Precision("float32", torch.float32, torch.float32, LinearKind.PLAIN),
    "half weights": Precision("bfloat16", torch.float32, BFLOAT16, LinearKind.FBGEMM_HALF),
    "bfloat16 plain": Precision("bfloat16", BFLOAT16, BFLOAT16, LinearKind.PLAIN),
    "bfloat16 packed": Precision("bfloat16", BFLOAT16, BFLOAT16, LinearKind.ONEDNN),
}
HERE = [kind for kind in KINDS if kind != "bfloat16 packed" or has_native_bfloat16()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("model"), dtype=BFLOAT16)


@pytest.fixture(scope="module", params=HERE)
def precision(request: pytest.FixtureRequest) -> Precision:
    return KINDS[request.param]


@pytest.fixture(scope="module")
def runner(folder: Path, precision: Precision) -> TorchRunner:
    runner = make_runner(folder, precision=precision)
    np.frombuffer(pool_bytes(runner), dtype=np.uint8)[:] = (
        0xFF  # NaN in both dtypes: nothing may read what nobody wrote
    )
    return runner


def prompt(length: int, seed: int = 1) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(VOCABULARY) for _ in range(length)]


def tables(count: int, blocks_each: int = 12, num_blocks: int = 256) -> list[list[int]]:
    """Scattered block tables without a block in common."""
    blocks = list(range(num_blocks))
    random.Random(4).shuffle(blocks)
    return [blocks[index * blocks_each : (index + 1) * blocks_each] for index in range(count)]


def greedy_logits(runner: TorchRunner, ids: list[int], table: list[int], cuts: list[int]) -> torch.Tensor:
    """Logits of each sampled position, [samples, vocabulary]."""
    stream = Stream(list(ids), table)
    given = [advance_with_logits(runner, [(stream, cut)])[0] for cut in cuts]
    return torch.stack([logits for logits in given if logits is not None])


def assert_equal_but_for_rounding(runner: TorchRunner, got: torch.Tensor, want: torch.Tensor) -> None:
    """As vectors, since one bfloat16 logit may be some units in the last place off: 2⁻⁵ where it lies above 4.

    A few roundings of 2⁻⁹ each come through the layers (0.004 to 0.007 in all); one wrong token in the middle of the
    prompt makes it 0.11.
    """
    limit = 2.0**-6 if "/bfloat16/" in runner.card.numerics else 1e-5
    assert float((got - want).norm() / want.norm()) < limit


def test_it_is_a_runner(runner: TorchRunner) -> None:
    port: Runner = runner
    assert port.card.vocab_size == VOCABULARY
    assert port.card.window_tokens == 2048
    assert port.card.cache_seed == bytes.fromhex(port.card.weights_fingerprint)
    assert port.layout.num_blocks == 256
    assert port.pool.num_bytes == port.layout.pool_bytes
    assert (port.layout.kv_heads, port.layout.layers, port.layout.head_dim) == (2, 2, 16)


@pytest.mark.parametrize("cuts", [[1] * 70, [7] * 10, [16] * 5, [33, 1, 20, 16], [64, 6], [69, 1]])
def test_cuts_of_a_prompt_make_no_difference_but_rounding(runner: TorchRunner, cuts: list[int]) -> None:
    whole = greedy_logits(runner, prompt(70), tables(2)[0], [70, 1, 1])
    cut = greedy_logits(runner, prompt(70), tables(2)[1], [*cuts, 1, 1])
    assert_equal_but_for_rounding(runner, cut, whole)


def test_company_makes_no_difference_but_rounding(runner: TorchRunner) -> None:
    """Prefill chunks, long and short decode rows in one step."""
    lengths = [1, 3, 16, 17, 40, 90, 91, 130]
    alone = [greedy_logits(runner, prompt(n, n), tables(8)[i], [n, 1, 1, 1]) for i, n in enumerate(lengths)]
    streams = [Stream(prompt(n, n), tables(8)[i]) for i, n in enumerate(lengths)]
    got: list[list[torch.Tensor]] = [[] for _ in lengths]
    source = random.Random(9)
    while any(len(samples) < 4 for samples in got):
        order = [index for index in range(8) if len(got[index]) < 4 and source.random() < 0.7]
        source.shuffle(order)
        parts = [(streams[index], source.choice([5, 16, 60])) for index in order]
        for index, logits in zip(order, advance_with_logits(runner, parts) if parts else [], strict=True):
            if logits is not None:
                got[index].append(logits)
    for mine, want in zip(got, alone, strict=True):
        assert_equal_but_for_rounding(runner, torch.stack(mine), want)


def test_blocks_carry_a_sequence_to_another_runner(
    folder: Path, runner: TorchRunner, precision: Precision
) -> None:
    """Prefill here, copy the blocks, decode there: as the disaggregated path does."""
    other = make_runner(folder, precision=precision)
    np.frombuffer(pool_bytes(other), dtype=np.uint8)[:] = 0xFF
    here, there = tables(2)
    stayed = Stream(prompt(37), here)
    advance(runner, [(stayed, 37)])
    moved = Stream(list(stayed.ids), there, num_computed=37, num_prompt_tokens=37)
    num_blocks = runner.layout.blocks_for(37)
    copy_blocks(runner, here[:num_blocks], other, there[:num_blocks])
    for _ in range(20):
        advance(runner, [(stayed, 1)])
        advance(other, [(moved, 1)])
    assert moved.ids == stayed.ids


def test_shared_blocks_serve_as_a_prefix(runner: TorchRunner) -> None:
    first, second = tables(2)
    one = Stream(prompt(50), first)
    advance(runner, [(one, 50)])
    shared = first[:3]
    two = Stream([*prompt(50)[:48], 5, 6, 7], shared + second, num_computed=48)
    fresh = Stream(list(two.ids), second)
    advance(runner, [(two, 3)])
    advance(runner, [(fresh, 51)])
    assert two.ids == fresh.ids


def test_seeded_sampling_depends_on_seed_and_choice(runner: TorchRunner) -> None:
    params = SamplingParams(temperature=1.0)
    keys = [sample_key(params, seed, choice) for seed in (1, 2) for choice in (0, 1)]
    streams = [Stream(prompt(20), table, key) for table, key in zip(tables(5), [*keys, keys[0]], strict=True)]
    advance(runner, [(stream, 20) for stream in streams])
    for _ in range(12):
        advance(runner, [(stream, 1) for stream in streams])
    assert streams[0].ids == streams[4].ids
    assert len({tuple(stream.ids) for stream in streams}) == 4


def test_a_row_that_samples_nothing_gives_nothing(runner: TorchRunner) -> None:
    stream = Stream(prompt(20), tables(1)[0])
    (output,) = runner.run([stream.row(10)])
    assert (output.token_id, output.error) == (None, None)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"token_ids": (1, VOCABULARY)}, "outside the vocabulary"),
        ({"token_ids": (-1, 2)}, "outside the vocabulary"),
        ({"token_ids": ()}, "without tokens"),
        ({"block_table": (3, 256)}, "outside the pool"),
        ({"block_table": (-1, 3)}, "outside the pool"),
        ({"block_table": (3,)}, "too short"),
        ({"start": -1}, "too short"),
    ],
)
def test_a_bad_row_fails_alone(runner: TorchRunner, change: dict[str, object], words: str) -> None:
    stream = Stream(prompt(20), tables(1)[0])
    good = stream.row(20)
    want = runner.run([good])[0].token_id
    fields = {"token_ids": (1, 2), "start": BLOCK_SIZE - 1, "block_table": (200, 201), "sample": good.sample}
    bad = Row(**(fields | change))  # type: ignore[arg-type]
    outputs = runner.run([bad, good, bad])
    assert [output.token_id for output in outputs] == [None, want, None]
    for output in (outputs[0], outputs[2]):
        assert isinstance(output.error, RowFailed)
        assert words in str(output.error)


def test_a_row_whose_kv_is_poisoned_fails_alone(runner: TorchRunner) -> None:
    good, bad = Stream(prompt(20), tables(2)[0]), Stream(prompt(20), tables(2)[1])
    advance(runner, [(good, 20), (bad, 20)])
    size = runner.layout.block_bytes
    first = bad.block_table[0]
    pool_bytes(runner)[first * size : (first + 1) * size] = b"\xff" * size
    for order in ([good, bad], [bad, good]):
        outputs = dict(zip(map(id, order), runner.run([stream.row(1) for stream in order]), strict=True))
        assert isinstance(outputs[id(bad)].error, RowFailed)
        assert outputs[id(good)].token_id is not None


def test_only_bad_rows(runner: TorchRunner) -> None:
    (output,) = runner.run([Row((), 0, (1,), None)])
    assert output.error is not None


# oneDNN multiplies bfloat16 only on CPUs that have it.
@pytest.mark.parametrize("kind", HERE)
@pytest.mark.parametrize("deterministic", [False, True])
def test_every_kind_of_arithmetic_gives_the_same_but_rounding(
    folder: Path, kind: str, deterministic: bool
) -> None:
    """Also those that another CPU would choose."""
    cuts = [30, 20, 1, 1, 1]
    reference = greedy_logits(
        make_runner(folder, precision=KINDS["float32 plain"]), prompt(50), tables(1)[0], cuts
    )
    runner = make_runner(folder, precision=KINDS[kind], deterministic=deterministic)
    got = greedy_logits(runner, prompt(50), tables(1)[0], cuts)
    limit = {"float32": 1e-4, "float32 plain": 1e-4, "half weights": 0.03}.get(kind, 0.15)
    assert float((got[0] - reference[0]).abs().max()) < limit * float(reference[0].abs().max())


def test_memory_decides_the_number_of_blocks(folder: Path) -> None:
    def build(kv_memory_bytes: int) -> TorchRunner:
        return TorchRunner(
            folder,
            dtype="float32",
            deterministic=False,
            num_threads=1,
            num_blocks=None,
            kv_memory_bytes=kv_memory_bytes,
            block_size=BLOCK_SIZE,
        )

    block_bytes = build(1 << 20).layout.block_bytes
    assert build(10 * block_bytes + 5).layout.num_blocks == 10
    with pytest.raises(BadModel, match="holds no block"):
        build(block_bytes - 1)


def test_biases_and_a_head_of_its_own(tmp_path: Path) -> None:
    """They take part: another bias, or head, gives other logits."""
    plain = write_random_model(tmp_path / "a", seed=5, tie_word_embeddings=False)
    biased = write_random_model(
        tmp_path / "b", seed=5, tie_word_embeddings=False, attention_bias=True, mlp_bias=True
    )
    tied = write_random_model(tmp_path / "c", seed=5)
    results = [greedy_logits(make_runner(path), prompt(9), [1, 2], [9])[0] for path in (plain, biased, tied)]
    assert not torch.allclose(results[0], results[1], atol=1e-3)
    assert not torch.allclose(results[0], results[2], atol=1e-3)


def test_a_missing_layer_is_named(tmp_path: Path) -> None:
    folder = write_random_model(tmp_path)
    text = (folder / "config.json").read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 3')
    (folder / "config.json").write_text(text)
    with pytest.raises(BadModel, match=r"tensor=model\.layers\.2\."):
        make_runner(folder)
