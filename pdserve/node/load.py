"""What a worker loads before it can take a role, and how far it is: for /readyz, the log, and a bar in a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from kv_transfer.link_facts import STREAM
from kv_transfer.transports.cuda_ipc_port import CUDA_IPC
from kv_transfer.transports.nccl_port import NCCL
from pdserve.clock import Clock, spend_s
from pdserve.engine.port import Row, Runner
from pdserve.errors import Incompatible
from pdserve.kv_memory import HostMemory
from pdserve.memfd import MEMFD, shareable_memory
from pdserve.modelstore.progress import ByteProgress
from pdserve.modelstore.resolve import resolve
from pdserve.node.ports import LoadedModel
from pdserve.node.ranks import Ranks
from pdserve.service.config import Config
from pdserve.tokenizer import Tokenizer
from pdserve.worker.structures import WorkerStructures

log = structlog.get_logger()

_LINE_EVERY_S = 5.0
_MB = 1_000_000
# The fake model's blocks are tiny: memory alone would allow millions, whose bookkeeping is all that would be tested.
_MAX_FAKE_BLOCKS = 8192


@dataclass(frozen=True, slots=True)
class LoadState:
    """One moment of a load; a text for people."""

    loaded_bytes: int
    total_bytes: int
    elapsed_s: float

    def __str__(self) -> str:
        loaded, total = (f"{size / _MB:,.0f}" for size in (self.loaded_bytes, self.total_bytes))
        return f"{loaded} of {total} MB of weights, {self.elapsed_s:.0f} s"


class LoadProgress:
    """Implements `ByteProgress` for the thread that loads; `post` takes the states to whoever reads them.

    bar  in a terminal; then there are no log lines, which would break it
    """

    def __init__(self, clock: Clock, post: Callable[[LoadState], None], bar: ByteProgress | None) -> None:
        self._clock = clock
        self._post = post
        self._bar = bar
        self._started_s = self._told_s = clock.now_s()
        self._total_bytes = 0

    def begin(self, phase: str, total_bytes: int | None) -> None:
        """The weights are open, their size is known."""
        self._total_bytes = total_bytes or 0
        if self._bar is not None:
            self._bar.begin(phase, total_bytes)
        else:
            log.info("model.loading", total_bytes=self._total_bytes)
        self.reached(0)

    def reached(self, num_bytes: int) -> None:
        """A line every few seconds: a small model has none."""
        self._post(LoadState(num_bytes, self._total_bytes, self.elapsed_s))
        if self._bar is not None:
            self._bar.reached(num_bytes)
        elif self._clock.now_s() - self._told_s >= _LINE_EVERY_S:
            self._told_s = self._clock.now_s()
            log.info("model.loading", loaded_bytes=num_bytes, **self.facts())

    @property
    def elapsed_s(self) -> float:
        return self._clock.now_s() - self._started_s

    def facts(self) -> dict[str, object]:
        """For the line that says that it is done."""
        return {"total_bytes": self._total_bytes, "took_s": round(self.elapsed_s, 3)}


def load_model(
    config: Config, progress: LoadProgress, clock: Clock, ranks: Ranks | None = None
) -> LoadedModel:
    """Weights, KV pool and tokenizer. Blocks for seconds; raises what an operator must change.

    ranks  the processes among which the model is divided, if it is
    """
    if config.engine.kind == "fake":
        return _load_fake(config, clock)
    folder = resolve(config.worker.model)
    tokenizer = Tokenizer.load(folder)
    runner = _load_torch(folder, config, progress, ranks)
    return LoadedModel(
        name=config.worker.model,
        runner=runner,
        tokenizer_fingerprint=tokenizer.fingerprint,
        tokenizer_files=tokenizer.files,
        eos_token_ids=tokenizer.eos_token_ids,
        structures=_prepare_structures(tokenizer, clock),
    )


def _prepare_structures(tokenizer: Tokenizer, clock: Clock) -> WorkerStructures:
    structures = WorkerStructures(tokenizer.files, clock)
    structures.prepare(tokenizer)
    return structures


def _make_memory(config: Config) -> Callable[[int], HostMemory]:
    """What makes the memory of the KV pool: such as others may map, if any link may ask for that."""
    may_be_mapped = {MEMFD, CUDA_IPC} & set(config.transport.kinds)
    return shareable_memory if may_be_mapped else HostMemory


def _load_torch(folder: Path, config: Config, progress: ByteProgress, ranks: Ranks | None) -> Runner:
    # Here, so that a worker with the fake engine never imports torch.
    from pdserve.node.cpu_runner import make_cpu_runner
    from pdserve.node.device_runner import find_device, make_device_runner

    engine = config.engine
    device = find_device(engine.device)
    if device is not None:
        verify_for_gpu(config)
        if ranks is not None:
            return ranks.load_on(device, folder, config, progress)
        return make_device_runner(folder, engine, device, progress=progress)
    if engine.kv_dtype != "auto":
        raise Incompatible("engine.kv_dtype needs a GPU", kv_dtype=engine.kv_dtype, device=engine.device)
    if ranks is not None:
        return ranks.load(folder, config, progress)
    return make_cpu_runner(folder, engine, make_memory=_make_memory(config), progress=progress)


def verify_for_gpu(config: Config) -> None:
    """Raises Incompatible: settings that only a CPU can keep."""
    engine = config.engine
    kinds = set(config.transport.kinds)
    if engine.tensor_parallel > 1 and {NCCL, CUDA_IPC} & kinds:
        raise Incompatible(
            "the KV pools of several GPUs go through the host: of nccl, cuda_ipc and stream, transport.kinds may have "
            "stream alone with engine.tensor_parallel above 1",
            tensor_parallel=engine.tensor_parallel,
            kinds=",".join(config.transport.kinds),
        )
    if engine.deterministic:
        raise Incompatible("engine.deterministic can't be kept on a GPU; engine.device=cpu can")
    for name, value, anywhere in (
        ("linear", engine.linear, ("auto", "plain")),
        ("kernels", engine.kernels, ("auto", "torch")),
        ("kernel_variant", engine.kernel_variant, ("auto",)),
    ):
        if value not in anywhere:
            raise Incompatible(
                f"engine.{name} names a kernel of CPUs, the engine computes on a GPU", **{name: value}
            )
    if config.worker.role != "both" and not {NCCL, CUDA_IPC, STREAM} & kinds:
        raise Incompatible(
            "the KV pool lies on a GPU, from where links go over nccl, cuda_ipc or stream; add one to transport.kinds, "
            "or set engine.device=cpu",
            kinds=",".join(config.transport.kinds),
        )


def _load_fake(config: Config, clock: Clock) -> LoadedModel:
    from pdserve.engine.fake_runner import FakeRunner
    from pdserve.worker.paced_runner import PacedRunner

    engine = config.engine
    num_blocks = engine.num_blocks
    if num_blocks == 0:
        block_bytes = FakeRunner(num_blocks=1, block_size=engine.block_size).layout.block_bytes
        num_blocks = max(1, min(engine.kv_memory_bytes // block_bytes, _MAX_FAKE_BLOCKS))
    runner: Runner = FakeRunner(
        num_blocks=num_blocks, block_size=engine.block_size, make_memory=_make_memory(config)
    )
    if engine.fake_step_s or engine.fake_token_s:

        def step_s(rows: Sequence[Row]) -> float:
            return engine.fake_step_s + engine.fake_token_s * sum(len(row.token_ids) for row in rows)

        runner = PacedRunner(runner, step_s, spend_s)
    tokenizer = Tokenizer.fake(runner.card.vocab_size)
    return LoadedModel(
        name=runner.card.name,
        runner=runner,
        tokenizer_fingerprint=tokenizer.fingerprint,
        tokenizer_files=tokenizer.files,
        eos_token_ids=tokenizer.eos_token_ids,
        structures=_prepare_structures(tokenizer, clock),
    )
