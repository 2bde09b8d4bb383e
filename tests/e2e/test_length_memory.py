"""A worker's memory doesn't grow with the variety of lengths: real processes, by the kernel's count."""

from __future__ import annotations

import sys
from contextlib import aclosing
from pathlib import Path
from random import Random

import pytest

from pdserve.client import AsyncClient
from pdserve.engine.kernel_caches import rounded_rows
from pdserve.engine.numerics import choose_precision
from pdserve.modelstore.errors import BadModel
from pdserve.request import Finished, GenerateRequest
from pdserve.sampling import SamplingParams
from tests.support.byte_tokens import byte_tokenizer
from tests.support.footprint import Footprint
from tests.support.singles import Single, Singles
from tests.unit.engine_torch.random_model import WIDE, write_random_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(sys.platform != "linux", reason="asks /proc"),
]

LONGEST = 512  # one step's tokens: no longer prompt shows a product another number of rows
# Kernels for one number of rows are some 2 MiB, and each length used to have its own: more than 1,000 MiB in all.
MOST_GROWN_MIB = 16


async def ask(client: AsyncClient, random: Random, num_tokens: int) -> None:
    """One prompt of this length, with no hits in the prefix cache, and two tokens behind it."""
    request = GenerateRequest(
        input=tuple(random.choices(range(1, 250), k=num_tokens)),
        sampling=SamplingParams(max_tokens=2, ignore_eos=True),
    )
    async with aclosing(client.generate(request, deadline_s=100.0)) as events:
        finished = [event async for event in events if isinstance(event, Finished)]
    assert len(finished) == 1


def mib(worker: Single) -> float:
    return Footprint.of(worker.pid).rss_bytes / (1 << 20)


@pytest.mark.parametrize(
    ("dtype", "linear"),
    [
        ("float32", "plain"),
        ("float32", "onednn"),
        ("bfloat16", "onednn"),
        ("bfloat16", "fbgemm-half"),
    ],
)
async def test_500_lengths(dtype: str, linear: str, tmp_path: Path) -> None:
    try:
        choose_precision(dtype, linear)
    except BadModel as missing:
        pytest.skip(str(missing))
    folder = write_random_model(tmp_path / "model", **WIDE)
    for name, content in byte_tokenizer([bytes([value]) for value in range(256)]).files.items():
        (folder / name).write_bytes(content)
    engine = ("--engine.dtype", dtype, "--engine.linear", linear, "--engine.num-blocks", "128")
    random = Random(1)
    with Singles(tmp_path, "--log.level", "warning") as cluster:
        router = cluster.router("r0")
        worker = cluster.worker("both", "w", "--model", str(folder), *engine)
        cluster.start()
        await worker.ready()
        lengths = list(range(1, LONGEST + 1))
        async with AsyncClient(router.address) as client:
            for num_rows in {rounded_rows(length): None for length in lengths}:
                await ask(client, random, num_rows)
            before = mib(worker)
            random.shuffle(lengths)
            for length in lengths[:500]:
                await ask(client, random, length)
            grown = mib(worker) - before
    print(f"{dtype} {linear}: {before:.0f} MiB, then {grown:+.1f} MiB over 500 lengths")
    assert grown < MOST_GROWN_MIB
