"""Workers whose model is divided among processes: they serve as one, and end as one.

A small random Llama with 8 heads and 2 KV heads, in float32: of the decode worker's four ranks two share each KV head.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from contextlib import aclosing
from pathlib import Path

import msgspec
import pytest

from pdserve.client import AsyncClient
from pdserve.clock import SystemClock
from pdserve.engine import fake_rule
from pdserve.engine.port import Row, Runner, SampleSpec
from pdserve.errors import Incompatible, PdserveError, WorkerLost
from pdserve.node.load import LoadProgress, load_model
from pdserve.node.rank_channel import JoinOrder, LoadOrder
from pdserve.node.ranks import LOADS_S, Ranks, _Rank
from pdserve.request import GenerateRequest, Tokens
from pdserve.sampling import SampleKey, SamplingParams
from pdserve.service.config import load
from pdserve.service.lifecycle import EXIT_OK, EXIT_UNSOUND, EXIT_USAGE
from pdserve.tokenizer import Tokenizer
from tests.support.pids import wait_gone
from tests.support.processes import run_cli
from tests.support.singles import Single, Singles
from tests.unit.engine_torch.driving import make_runner
from tests.unit.engine_torch.random_model import write_random_model

NUM_TOKENS = 120
PARAMS = tuple(
    SamplingParams(temperature=temperature, max_tokens=NUM_TOKENS, min_tokens=NUM_TOKENS)
    for temperature in (0.0, 1.0)
)
PROMPTS = tuple(tuple(range(3 + index, 203 + index)) for index in range(2))
DEADLINE_S = 110.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_random_model(
        tmp_path_factory.mktemp("model"),
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=fake_rule.VOCAB_SIZE,
        eos_token_id=fake_rule.EOS_ID,
    )
    for name, content in Tokenizer.fake().files.items():
        (folder / name).write_bytes(content)
    return folder


def answer(runner: Runner, prompt: tuple[int, ...], params: SamplingParams, seed: int) -> list[int]:
    """Of the whole model, in this process."""
    key = SampleKey(
        params=params, seed=seed, choice=0, eos_token_ids=(fake_rule.EOS_ID,), max_tokens=NUM_TOKENS
    )
    ids, computed = list(prompt), 0
    table = list(range(runner.layout.blocks_for(len(prompt) + NUM_TOKENS)))
    while len(ids) < len(prompt) + NUM_TOKENS:
        output = runner.run([Row(ids[computed:], computed, table, SampleSpec(key, ids, len(prompt)))])[0]
        assert output.token_id is not None
        computed = len(ids)
        ids.append(output.token_id)
    return ids[len(prompt) :]


async def ask(
    client: AsyncClient,
    prompt: tuple[int, ...],
    params: SamplingParams,
    seed: int,
    on_tokens: Callable[[], None] = lambda: None,
) -> list[int]:
    got: list[int] = []
    request = GenerateRequest(input=prompt, seed=seed, sampling=params)
    async with aclosing(client.generate(request, deadline_s=DEADLINE_S)) as events:
        async for event in events:
            if isinstance(event, Tokens):
                got += event.token_ids
                on_tokens()
    return got


def rank_pids(worker: Single) -> list[int]:
    """Of the ranks that a worker's last incarnation has started, by its log."""
    lines = [json.loads(line) for line in worker.log.read_text().splitlines() if line.startswith("{")]
    found: list[int] = [line["pids"] for line in lines if line["event"] == "ranks.joined"][-1]
    return found


async def test_divided_workers_serve_as_one_and_end_as_one(tmp_path: Path, folder: Path) -> None:
    common = ("--model", str(folder), "--engine.dtype", "float32", "--engine.num-blocks", "64")
    whole = make_runner(folder, num_blocks=64)
    wanted = [answer(whole, prompt, params, seed=5) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    with Singles(tmp_path) as cluster:
        router = cluster.router("r0", "--model", str(folder))
        p0 = cluster.worker("prefill", "p0", *common, "--tensor-parallel", "2", "--threads", "1")
        d0 = cluster.worker("decode", "d0", *common, "--tensor-parallel", "4", "--threads", "1")
        cluster.start()
        await asyncio.gather(*(single.ready() for single in cluster.all.values()))
        assert await d0.metric("pdserve_worker_ranks") == 4
        async with AsyncClient(router.address) as client:
            # Blocks go from a worker of 2 ranks to one of 4.
            got = await asyncio.gather(
                *(ask(client, prompt, params, seed=5) for prompt, params in zip(PROMPTS, PARAMS, strict=True))
            )
            assert got == wanted
            assert await d0.metric("pdserve_kv_transfer_bytes_total", direction="received") > 0

            # A rank is killed in the middle of a stream: the worker ends, the stream goes on at a whole one.
            begun = asyncio.Event()
            streaming = asyncio.create_task(ask(client, PROMPTS[0], PARAMS[0], 5, begun.set))
            await begun.wait()
            others = rank_pids(d0)
            os.kill(others[1], signal.SIGKILL)
            assert await asyncio.to_thread(d0.wait) == EXIT_UNSOUND, d0.log_tail()
            for pid in others:
                await wait_gone(pid)
            d1 = cluster.worker("decode", "d1", *common, "--threads", "1").start()
            assert await streaming == wanted[0]
            await d1.ready()

            # A rank that stands still is found by the watchdog, and its worker ends.
            stopped = rank_pids(p0)[0]
            os.kill(stopped, signal.SIGSTOP)
            asked = asyncio.create_task(ask(client, PROMPTS[1], PARAMS[0], 5))
            assert await asyncio.to_thread(p0.wait) == EXIT_UNSOUND, p0.log_tail()
            await wait_gone(stopped)
            asked.cancel()


def broken_start(
    folder: Path, size: int, spoil: Callable[[Ranks], None], loads_s: float = LOADS_S
) -> PdserveError:
    """The error of a load; all ranks have ended behind it. spoil: what happens once they have been started."""
    config = load(flags={"worker.model": str(folder), "engine.num_blocks": 8, "engine.tensor_parallel": size})
    clock = SystemClock()
    with Ranks(size, loads_s=loads_s) as ranks:
        spoil(ranks)
        with pytest.raises(PdserveError) as raised:
            load_model(config, LoadProgress(clock, lambda state: None, None), clock, ranks)
    return raised.value


def test_a_rank_that_ends_while_it_loads_ends_the_load(folder: Path) -> None:
    error = broken_start(folder, 3, lambda ranks: os.kill(ranks.pids[1], signal.SIGKILL))
    assert isinstance(error, WorkerLost) and error.fields == {"rank": 2, "exit_code": -signal.SIGKILL}


def test_a_rank_that_stands_still_while_it_loads_ends_the_load(folder: Path) -> None:
    error = broken_start(folder, 2, lambda ranks: os.kill(ranks.pids[0], signal.SIGSTOP), loads_s=1.0)
    assert isinstance(error, WorkerLost) and error.fields == {"rank": 1, "exit_code": -signal.SIGKILL}


def test_ranks_that_read_different_models_are_no_team(folder: Path, tmp_path: Path) -> None:
    """The folder was replaced meanwhile: another layout over the same bytes."""
    other = write_random_model(tmp_path, num_attention_heads=8, num_key_value_heads=2, num_hidden_layers=1)

    class LateRanks(Ranks):
        def _send(self, rank: _Rank, order: LoadOrder | JoinOrder, descriptors: Sequence[int] = ()) -> None:
            assert isinstance(order, LoadOrder)
            super()._send(rank, msgspec.structs.replace(order, folder=str(other)), descriptors)

    config = load(flags={"worker.model": str(folder), "engine.num_blocks": 8, "engine.tensor_parallel": 2})
    clock = SystemClock()
    with LateRanks(2) as ranks, pytest.raises(Incompatible, match="different models"):
        load_model(config, LoadProgress(clock, lambda state: None, None), clock, ranks)


def test_a_rank_that_cannot_load_says_why(folder: Path, tmp_path: Path) -> None:
    """A file that this rank finds gone, in words of its own."""
    copy = shutil.copytree(folder, tmp_path / "model")

    class LateRanks(Ranks):
        def _send(self, rank: _Rank, order: LoadOrder | JoinOrder, descriptors: Sequence[int] = ()) -> None:
            assert isinstance(order, LoadOrder)
            super()._send(rank, msgspec.structs.replace(order, folder=str(copy)), descriptors)

    (copy / "model.safetensors").unlink()
    config = load(flags={"worker.model": str(folder), "engine.num_blocks": 8, "engine.tensor_parallel": 2})
    clock = SystemClock()
    with LateRanks(2) as ranks, pytest.raises(Incompatible, match="safetensors"):
        load_model(config, LoadProgress(clock, lambda state: None, None), clock, ranks)


def test_what_cannot_be_divided_is_one_line(folder: Path) -> None:
    done = run_cli("worker", "--model", str(folder), "--tensor-parallel", "3", "--routers", "127.0.0.1:1")
    assert done.returncode == EXIT_USAGE
    last = done.stderr.splitlines()[-1]
    assert "the query heads can't be divided among so many ranks" in last and "num_heads=8" in last


async def test_a_rank_that_stands_still_is_found_in_a_step_of_a_new_shape(
    tmp_path: Path, folder: Path
) -> None:
    """Of which nobody knows how long it takes: the watchdog waits, and sums over the ranks do for a minute."""
    with Singles(tmp_path) as cluster:
        router = cluster.router("r0", "--model", str(folder))
        worker = cluster.worker("both", "b0", "--model", str(folder), "--tensor-parallel", "2")
        cluster.start()
        await asyncio.gather(*(single.ready() for single in cluster.all.values()))
        (stopped,) = rank_pids(worker)
        os.kill(stopped, signal.SIGSTOP)
        async with AsyncClient(router.address) as client:
            asked = asyncio.create_task(ask(client, PROMPTS[0], PARAMS[0], 5))
            assert await asyncio.to_thread(worker.wait) == EXIT_UNSOUND, worker.log_tail()
            asked.cancel()
        assert "rank 1 stands still" in worker.log.read_text()
        await wait_gone(stopped)


async def test_ranks_end_with_their_worker(tmp_path: Path, folder: Path) -> None:
    with Singles(tmp_path) as cluster:
        cluster.router("r0", "--model", str(folder))
        worker = cluster.worker("both", "b0", "--model", str(folder), "--tensor-parallel", "2")
        cluster.start()
        await worker.ready()
        pids = rank_pids(worker)
        worker.kill()
        for pid in pids:
            await wait_gone(pid)
        worker.start()
        await worker.ready()
        others = rank_pids(worker)
        assert not {*others} & {*pids}
        assert await asyncio.to_thread(worker.terminate) == EXIT_OK, worker.log_tail()
        for pid in others:
            await wait_gone(pid)
