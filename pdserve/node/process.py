"""A worker as a process: real model, sockets, threads and signals."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import structlog

from kv_transfer.transports.libnccl import describe_loaded
from kv_transfer.transports.stream import StreamNetwork
from kv_transfer.transports.stream_tls import LinkTls
from pdserve.children.children import Children
from pdserve.children.prover import Prove, prove_in_task
from pdserve.clock import Clock, SystemClock
from pdserve.errors import PdserveError, WorkerLost
from pdserve.ids import Epoch, Random, WorkerRef, draw_text_id, system_random
from pdserve.kv_memory import KvMemory
from pdserve.messages import Role
from pdserve.modelstore.progress import ByteProgress
from pdserve.node.link_devices import open_devices
from pdserve.node.load import LoadProgress, LoadState, load_model
from pdserve.node.ports import LoadedModel, NetworkEnd, WorkerPorts, WorkerSetup
from pdserve.node.ranks import Ranks, verify_for_ranks
from pdserve.node.worker import Worker
from pdserve.owner import Waiter
from pdserve.service.config import Config
from pdserve.service.energy import find_energy_meter
from pdserve.service.exposure import check_worker
from pdserve.service.grpc_session import GrpcDialer
from pdserve.service.http import HttpServer
from pdserve.service.lifecycle import EXIT_OK, EXIT_UNSOUND, StopSignals
from pdserve.service.logs import set_up_logs
from pdserve.service.loop_stack import LoopStack
from pdserve.service.loop_watch import LoopWatch
from pdserve.service.metrics import WorkerMetrics
from pdserve.service.secret import read_secret
from pdserve.service.tls import worker_tls
from pdserve.service.tracing import open_tracer
from pdserve.tracing import Tracer
from pdserve.worker.background import ThreadBackground
from pdserve.worker.driver import EventWaiter, LoopInbox, OnDeath, ThreadDriver
from pdserve.worker.resolver import RouterResolver
from pdserve.worker.role import Roles

log = structlog.get_logger()

# What a router has proven may take longer on a slower, or busier, machine; then another worker may be quicker.
_COMPILE_LIMITS = 3
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

Bar = AbstractContextManager[ByteProgress | None]
"""What shows progress while it is entered, if there is a terminal."""


async def run_worker(
    config: Config,
    role: Role,
    roles: Roles,
    end_now: Callable[[int], None] = os._exit,
    make_bar: Callable[[], Bar] = nullcontext,
) -> int:
    """Run one worker until it is drained or broken; returns the exit code.

    roles     what makes the core of each role
    end_now   ends the process where nothing can be waited for: a hanging engine, a stop while the model loads
    make_bar  shows how the weights are loaded
    Raises ConfigError, UnknownModel, Incompatible and the like for what an operator must change.
    """
    verify_for_ranks(config)
    clock, random = SystemClock(), system_random()
    epoch = Epoch(clock.wall_ns(), random.getrandbits(64))
    me = WorkerRef(config.worker.id or draw_text_id(random, role.value), epoch)
    set_up_logs(config.log, role=role.value, worker=me.id)
    log.debug("worker.configured", epoch=str(epoch), **config.effective())
    secret = read_secret(config.cluster.secret_file)
    for setting in check_worker(config, has_secret=secret is not None):
        log.warning("listener.insecure", setting=setting)
    link_tls = LinkTls(config.tls) if config.transport.link_tls else None
    metrics = WorkerMetrics()
    health = _Health(metrics)
    http = HttpServer(metrics.registry, health.not_alive, health.not_ready)
    metrics_address = await http.start(config.metrics.listen)
    watch = LoopWatch(metrics.registry, clock, clock.cpu_s, LoopStack(clock))
    open_parts = ExitStack()
    try:
        tracer = open_parts.enter_context(
            open_tracer(config.tracing, "pdserve-worker", me.id, metrics.registry, clock, random)
        )
        async with (
            StopSignals() as stop,
            asyncio.TaskGroup() as tasks,
            Children(
                metrics.registry,
                tasks.create_task,
                clock,
                os.environ,
                memory_bytes=config.children.memory_bytes,
            ) as children,
        ):
            prover = children.prover(_COMPILE_LIMITS * config.children.compile_s, _too_slow)
            prove = prove_in_task(prover, tasks.create_task)
            ranks: Ranks | None = None
            if config.engine.tensor_parallel > 1:
                ranks = open_parts.enter_context(Ranks(config.engine.tensor_parallel, me.id))
                metrics.ranks.set(config.engine.tensor_parallel)
            with make_bar() as bar:
                inbox = LoopInbox(asyncio.get_running_loop(), health.on_load)
                progress = LoadProgress(clock, inbox.post, bar)
                model = await _load_unless_stopped(config, stop, progress, clock, ranks)
            if model is None:
                log.info("worker.stopped_while_loading")
                end_now(EXIT_OK)  # nothing is in hand, and a thread that loads can't be stopped
                return EXIT_OK
            metrics.load_s.set(progress.elapsed_s)
            _log_loaded(model, progress)
            watch.start()  # while it loads, nobody waits for its loop
            setup = WorkerSetup(
                me=me,
                config=config,
                model=model,
                metrics_address=metrics_address,
                host_id=_host_id(),
                secret=secret,
            )
            dialer = _make_dialer(setup, random, tasks, metrics)
            ports = _real_ports(setup, clock, random, dialer, roles, prove, link_tls, tracer)
            health.worker = worker = Worker(setup, ports, metrics, role)
            if ranks is not None:
                ranks.watch(worker.break_off)
            draining = tasks.create_task(_drain_when_asked(worker, stop))
            code = await worker.run()
            draining.cancel()
            health.is_broken = code == EXIT_UNSOUND
            if worker.end is not None and worker.end.hangs:
                await dialer.closed()  # the routers should hear the last word
                end_now(code)
    finally:
        watch.stop()
        http.close()
        open_parts.close()
    log.info("worker.ended", code=code)
    return code


def _log_loaded(model: LoadedModel, progress: LoadProgress) -> None:
    layout, card = model.runner.layout, model.runner.card
    log.info(
        "model.loaded", model=model.name, num_blocks=layout.num_blocks, window_tokens=card.window_tokens,
        numerics=card.numerics, **progress.facts(),
    )  # fmt: skip


class _Health:
    """What /healthz and /readyz say, and /metrics of the weights."""

    def __init__(self, metrics: WorkerMetrics) -> None:
        self._metrics = metrics
        self.worker: Worker | None = None
        self.is_broken = False
        self._load: LoadState | None = None

    def on_load(self, state: object) -> None:
        assert isinstance(state, LoadState)
        self._load = state
        self._metrics.model_bytes.set(state.total_bytes)
        self._metrics.loaded_bytes.set(state.loaded_bytes)

    def not_alive(self) -> Sequence[str]:
        if self.is_broken:
            return ["the engine or the links are broken"]
        return [] if self.worker is None else self.worker.not_alive

    def not_ready(self) -> Sequence[str]:
        if self.worker is not None:
            return self.worker.not_ready
        return ["the model is loading" if self._load is None else f"the model is loading: {self._load}"]


async def _drain_when_asked(worker: Worker, stop: StopSignals) -> None:
    await stop.wait()
    worker.drain()


async def _load_unless_stopped(
    config: Config, stop: StopSignals, progress: LoadProgress, clock: Clock, ranks: Ranks | None
) -> LoadedModel | None:
    """Load on another thread: signals and /healthz are answered meanwhile. None: asked to stop before it was done.

    The thread ends then, and its compute threads with it: while there are more of them than cores, libgomp lets none
    spin, and each kernel of a step waits for one to wake up.
    """
    thread = ThreadPoolExecutor(1, "load")
    loading = asyncio.get_running_loop().run_in_executor(thread, load_model, config, progress, clock, ranks)
    thread.shutdown(wait=False)
    stopped = asyncio.create_task(stop.wait())
    either: tuple[asyncio.Future[Any], ...] = (loading, stopped)
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    return await loading if loading.done() else None


def _make_dialer(
    setup: WorkerSetup, random: Random, tasks: asyncio.TaskGroup, metrics: WorkerMetrics
) -> GrpcDialer:
    timeouts = setup.config.timeouts
    return GrpcDialer(
        setup.me,
        keepalive_s=timeouts.keepalive_s,
        connect_s=timeouts.link_s,
        max_message_bytes=setup.config.router.max_message_bytes,
        secret=setup.secret,
        tls=worker_tls(setup.config.tls),
        random=random,
        tasks=tasks,
        count_unknown=metrics.count_unknown,
    )


def _too_slow(kind: str, limit_s: float) -> PdserveError:
    return WorkerLost(f"{kind} takes longer to compile here than 3 * children.compile_s", limit_s=limit_s)


def _real_ports(
    setup: WorkerSetup,
    clock: Clock,
    random: Random,
    dialer: GrpcDialer,
    roles: Roles,
    prove: Prove,
    link_tls: LinkTls | None,
    tracer: Tracer,
) -> WorkerPorts:
    config, loop = setup.config, asyncio.get_running_loop()
    pool = setup.model.runner.pool
    devices = open_devices(config, pool, setup.model.runner.layout.block_bytes, clock)

    def network(pool: KvMemory, wake: Callable[[], None]) -> NetworkEnd:
        memory = devices.seen(pool)
        stream = StreamNetwork(
            memory=memory,
            kv_listen=config.worker.kv_listen,
            unix_dir=config.worker.unix_dir,
            prefer_unix=config.transport.prefer_unix,
            strict=config.transport.strict,
            clock=clock,
            random=random,
            tls=link_tls,
            ipc=devices.ipc,
        )
        return NetworkEnd(devices.over(stream), memory, stream.waiter())

    def drive(name: str, waiter: Waiter | None, on_death: OnDeath) -> ThreadDriver:
        return ThreadDriver(waiter or EventWaiter(), name, on_death)

    return WorkerPorts(
        clock=clock,
        random_for=lambda owner: random,  # the system's source may be used by every thread
        network=network,
        drive=drive,
        inbox=lambda deliver: LoopInbox(loop, deliver).post,
        dialer=dialer,
        resolver=RouterResolver(),
        roles=roles,
        background=ThreadBackground("structures"),
        prove=prove,
        count_devices=devices.counts,
        nccl_library=describe_loaded,
        energy=find_energy_meter(clock, setup.model.runner.card.gpus),
        tracer=tracer,
    )


def _host_id() -> str:
    """Equal in all processes of one host, and of one boot of it."""
    boot_id = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    return f"{socket.gethostname()}/{boot_id}"
