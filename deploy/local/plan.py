"""Which processes a local cluster consists of, with their command lines, addresses and cores. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deploy.command import PROGRAM, arguments_of, environ_of
from pdserve.service.address import join_address, split_address
from pdserve.service.config import Config
from pdserve.service.exposure import workers_listen
from pdserve.service.settings import ConfigError

_ANY_HOST = {"0.0.0.0": "127.0.0.1", "::": "::1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How many workers of each role."""

    num_prefill: int = 0
    num_decode: int = 0
    num_both: int = 0

    def __str__(self) -> str:
        named = ((self.num_prefill, "prefill"), (self.num_decode, "decode"), (self.num_both, "both"))
        return " + ".join(f"{count} {role}" for count, role in named if count)

    def roles(self) -> list[str]:
        """The role of each worker: prefill first, then decode, then both."""
        return ["prefill"] * self.num_prefill + ["decode"] * self.num_decode + ["both"] * self.num_both


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """One child: who it is and how it is started.

    metrics  host:port of its HTTP server, where its readiness is asked for
    has_weights  whether it has to load any before it is ready
    cores    CPU numbers it is kept on; empty = wherever the system likes
    environ  all of its environment
    """

    role: str
    id: str
    command: tuple[str, ...]
    metrics: str
    environ: Mapping[str, str]
    cores: tuple[int, ...] = ()
    has_weights: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan:
    """The whole cluster.

    target       what clients dial; operators: what operators and workers dial
    secret_file  which all processes have in common
    """

    target: str
    operators: str
    secret_file: str
    router: ProcessSpec
    workers: tuple[ProcessSpec, ...]

    @property
    def processes(self) -> tuple[ProcessSpec, ...]:
        """All children, the router first."""
        return (self.router, *self.workers)


def make_plan(
    shape: Shape,
    config: Config,
    *,
    config_file: Path | None,
    flags: Mapping[str, object],
    cores: Sequence[int],
    environ: Mapping[str, str],
    reserve: Callable[[str, int], int],
    draw_secret: Callable[[int], Path],
) -> ClusterPlan:
    """Lay out the processes.

    flags    "table.key" → value: what each child is given beside the file (the environment it inherits)
    cores    CPU numbers that this process may use
    environ  of this process
    reserve  (host, port) → port: keeps an address for a child, a free port for 0; raises ConfigError if it is taken
    draw_secret  port of the workers' listener → a file with a secret for this cluster; called if none is configured
    Raises ConfigError when the shape can't serve a request.
    """
    _check(shape, config)
    host, port = split_address(config.router.listen)
    listen = join_address(host, reserve(host, port))
    target = dialled(listen)
    workers_host, workers_port = split_address(workers_listen(config.router))
    workers_port = reserve(workers_host, workers_port)
    for_workers = join_address(workers_host, workers_port)
    secret_file = config.cluster.secret_file or str(draw_secret(workers_port))
    metrics_host, metrics_port = split_address(config.metrics.listen)

    def metrics(index: int) -> str:
        wanted = metrics_port + index if metrics_port else 0
        return join_address(metrics_host, reserve(metrics_host, wanted))

    def spec(
        role: str, name: str, index: int, own: Mapping[str, object], kept_on: tuple[int, ...]
    ) -> ProcessSpec:
        address = metrics(index)
        values = {**flags, **own, "metrics.listen": address, "cluster.secret_file": secret_file}
        return ProcessSpec(
            role=role,
            id=name,
            command=(*PROGRAM, *arguments_of(role, values, config_file)),
            metrics=dialled(address),
            cores=kept_on,
            has_weights=role != "router" and config.engine.kind == "torch",
            environ=environ_of(role, config.engine, environ),
        )

    roles = shape.roles()
    shares = divide_cores(cores, len(roles), config.engine.threads)
    router_id = config.router.id or "router"
    router = spec(
        "router",
        router_id,
        0,
        {
            "router.listen": listen,
            "router.workers_listen": for_workers,
            "router.id": router_id,
            "router.model": _router_model(config),
        },
        (),
    )
    workers = []
    for index, role in enumerate(roles):
        name = f"{role}-{roles[:index].count(role)}"
        own: dict[str, object] = {
            "worker.id": name,
            "worker.routers": dialled(for_workers),
            "engine.threads": shares[index].num_threads,
        }
        workers.append(spec(role, name, index + 1, own, shares[index].cores))
    return ClusterPlan(
        target=target,
        operators=dialled(for_workers),
        secret_file=secret_file,
        router=router,
        workers=tuple(workers),
    )


def dialled(address: str) -> str:
    """Where to reach, from this machine, what listens on `address`."""
    host, port = split_address(address)
    return join_address(_ANY_HOST.get(host, host), port)


@dataclass(frozen=True, slots=True)
class CoreShare:
    """One worker's part of the machine."""

    num_threads: int
    cores: tuple[int, ...]


def divide_cores(cores: Sequence[int], num_workers: int, num_threads: int) -> list[CoreShare]:
    """Give each worker the same number of compute threads, and cores of its own where there are plenty.

    num_threads  per worker; 0 = the cores divided by the workers, at least 1
    Equal threads on all workers are what `deterministic` needs. A worker is kept on its own neighbouring cores only
    if there are at least two for each: with fewer, its transfer and event loop threads would stand in the engine's
    way while another worker's core idles.
    """
    each = len(cores) // num_workers if num_workers else 0
    threads = num_threads or max(1, each)
    pinned = each >= 2 and threads <= each
    ordered = sorted(cores)
    return [
        CoreShare(threads, tuple(ordered[index * each : (index + 1) * each]) if pinned else ())
        for index in range(num_workers)
    ]


def _router_model(config: Config) -> str:
    """It reads the tokenizer while the workers load, and before it listens."""
    if config.router.model or config.engine.kind == "fake":
        return config.router.model
    return config.worker.model


def _check(shape: Shape, config: Config) -> None:
    for count in (shape.num_prefill, shape.num_decode, shape.num_both):
        if count < 0:
            raise ConfigError(f"numbers of workers must not be negative, got {count}")
    if shape.num_both:
        return
    if not shape.num_decode:
        raise ConfigError("no worker would decode: give --decode or --both at least 1")
    if not shape.num_prefill and not config.router.allow_local_prefill:
        raise ConfigError(
            "no worker would prefill: give --prefill or --both at least 1, or set router.allow_local_prefill = true"
        )
