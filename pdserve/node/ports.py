"""What a worker is assembled from: the ports, and what is known of it before it has a role."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from kv_transfer.metrics import DeviceCounts
from kv_transfer.transports.port import Network
from pdserve.children.prover import Prove, prove_inline
from pdserve.clock import Clock
from pdserve.energy import EnergyMeter
from pdserve.engine.port import Runner
from pdserve.ids import Random, WorkerRef
from pdserve.kv_memory import KvMemory
from pdserve.owner import Driver, Post, Waiter
from pdserve.service.config import Config
from pdserve.tracing import Tracer
from pdserve.worker.background import Background
from pdserve.worker.driver import OnDeath
from pdserve.worker.role import Roles
from pdserve.worker.sessions import Resolver, SessionDialer
from pdserve.worker.structures import WorkerStructures


@dataclass(frozen=True, slots=True)
class NetworkEnd:
    """A worker's place in the links' network.

    memory  the KV pool as its links see it
    waiter  where its owner's thread must wait on sockets
    """

    network: Network
    memory: KvMemory
    waiter: Waiter | None = None


class Drive(Protocol):
    """Makes the driver of an owner. on_death: called, on the driver's thread, if the owner raises."""

    def __call__(self, name: str, waiter: Waiter | None, on_death: OnDeath) -> Driver: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPorts:
    """Everything a worker needs from outside: real in a process, virtual in a simulation.

    random_for  a source for one owner: "engine", "transfer", "loop"
    network     joins the links' network: (the KV pool's memory, wake of the transfer owner's driver) → its end
    inbox       makes the way of one sender's messages to the loop: function that takes them in → post
    roles       what makes the core of each role
    background  where structures are compiled
    prove       whether they compile within limits
    energy      of what the model computes on; None = the machine can't tell
    tracer      takes the spans of sampled requests
    count_devices  what links have of the worker's device
    nccl_library  version and file of what is loaded now; "" = none
    sleep       between heartbeats; a simulated process that is stopped doesn't return from it
    """

    clock: Clock
    random_for: Callable[[str], Random]
    network: Callable[[KvMemory, Callable[[], None]], NetworkEnd]
    drive: Drive
    inbox: Callable[[Callable[[object], None]], Post]
    dialer: SessionDialer
    resolver: Resolver
    roles: Roles
    background: Background
    prove: Prove = prove_inline
    energy: EnergyMeter | None = None
    tracer: Tracer = field(default_factory=Tracer.off)
    count_devices: Callable[[], DeviceCounts] = DeviceCounts
    nccl_library: Callable[[], str] = str
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready to run, and its tokenizer for routers that have no model folder.

    name           what GetModel says
    eos_token_ids  what ends a text
    structures     compiles what requests want their text to be; None = made of the files when one asks
    """

    name: str
    runner: Runner
    tokenizer_fingerprint: str
    tokenizer_files: Mapping[str, bytes]
    eos_token_ids: tuple[int, ...]
    structures: WorkerStructures | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSetup:
    """Who the worker is, whatever its role.

    host_id  equal on workers that share a host
    """

    me: WorkerRef
    config: Config
    model: LoadedModel
    metrics_address: str = ""
    host_id: str = ""
    secret: bytes | None = None
