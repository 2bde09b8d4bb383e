"""The router as a process: gRPC and HTTP servers around `RouterApp`, signals, drain, exit code."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
import uvloop
from prometheus_client import CollectorRegistry

from pdserve.children.children import Children
from pdserve.clock import SystemClock
from pdserve.ids import Random, draw_text_id, system_random
from pdserve.malloc import share_one_heap
from pdserve.rpc.v1 import admin_pb2_grpc, inference_pb2_grpc, session_pb2_grpc, vllm_engine_pb2_grpc
from pdserve.service.config import Config
from pdserve.service.exposure import check_router, workers_listen
from pdserve.service.grpc_session import WorkersServicer
from pdserve.service.http import HttpServer
from pdserve.service.http_config import http_extra
from pdserve.service.lifecycle import EXIT_OK, StopSignals
from pdserve.service.logs import set_up_logs
from pdserve.service.loop_stack import LoopStack
from pdserve.service.loop_watch import LoopWatch
from pdserve.service.peer_proof import RouterGuard
from pdserve.service.receiving import Receiving, most_at_once
from pdserve.service.rpc import (
    ADMIN,
    INFERENCE,
    VLLM_ENGINE,
    WORKERS,
    Health,
    add_reflection,
    bind,
    make_server,
)
from pdserve.service.rpc_requests import RequestReader
from pdserve.service.secret import read_secret
from pdserve.service.tls import server_credentials
from pdserve.service.tracing import open_tracer
from pdserve.service.wrong_listener import WrongListener
from pdserve.tokenizer import Tokenizer
from pdserve.tracing import Tracer
from router.admin_door import AdminServicer
from router.app import RouterApp
from router.caller_interceptor import CallerInterceptor, asker_of_call
from router.door import InferenceServicer
from router.gate import GENERATE_MANY, Gate
from router.http_backend import RouterHttpBackend
from router.keys_follower import KeysFollower
from router.many import ManyCalls
from router.model_folder import load_tokenizer
from router.structures import NUM_THREADS
from router.vllm_door import VllmEngineServicer
from router.work import ThreadWork

if TYPE_CHECKING:
    from http_door.opening import OpenDoor

log = structlog.get_logger()

_LISTEN, _WORKERS_LISTEN = "router.listen", "router.workers_listen"
# Threads that read large requests give the interpreter back so soon. A token takes it several times on its way through;
# with two of them at work, streams of a token each 10 ms had gaps of up to 66 ms, and 243 with Python's own 5 ms.
SWITCH_S = 0.001
STOP_GRACE_S = 2.0  # after a drain: what calls have to write their status


def serve(config: Config) -> int:
    """Run a router on a loop of its own until a signal; returns the exit code. Main thread. Raises ConfigError."""
    share_one_heap()
    sys.setswitchinterval(SWITCH_S)
    if config.http.listen:
        with http_extra("http.listen"):
            import http_door.opening  # noqa: F401  # now: it would hold up the loop for a third of a second
    gc.freeze()  # what was imported: else each look for cycles in a large request's objects walks it, for 40 ms
    return uvloop.run(run_router(config))  # a fifth more tokens a second than asyncio's own loop


async def run_router(config: Config, stop_grace_s: float = STOP_GRACE_S) -> int:
    """Serve until SIGTERM or SIGINT, then drain. Returns the exit code; raises ConfigError if it can't listen.

    stop_grace_s  how long calls that don't end by themselves (a health watch) are waited for at the end
    """
    clock, random = SystemClock(), system_random()
    router_id = config.router.id or draw_text_id(random, "router")
    set_up_logs(config.log, role="router", router=router_id)
    log.debug("router.configured", **config.effective())
    secret = read_secret(config.cluster.secret_file)  # before the loop has anything else to do
    for setting in check_router(config, has_secret=secret is not None):
        log.warning("listener.insecure", setting=setting)
    keys = KeysFollower(Path(config.router.keys_file)) if config.router.keys_file else None
    tokenizer = load_tokenizer(config.router.model) if config.router.model else None
    work, structure_work = ThreadWork(), ThreadWork(NUM_THREADS, "structures")
    registry, open_spans = CollectorRegistry(), ExitStack()
    try:
        tracer = open_spans.enter_context(
            open_tracer(config.tracing, "pdserve-router", router_id, registry, clock, random)
        )
        async with StopSignals() as stop, asyncio.TaskGroup() as tasks:
            process = _Process(
                config,
                router_id,
                secret,
                keys,
                clock,
                random,
                work,
                structure_work,
                tasks,
                tokenizer,
                registry,
                tracer,
                stop_grace_s,
            )
            await process.run(stop)
    finally:
        work.close()
        structure_work.close()
        open_spans.close()
    return EXIT_OK


class _Process:
    """What one run of the process holds."""

    def __init__(
        self,
        config: Config,
        router_id: str,
        secret: bytes | None,
        keys: KeysFollower | None,
        clock: SystemClock,
        random: Random,
        work: ThreadWork,
        structure_work: ThreadWork,
        tasks: asyncio.TaskGroup,
        tokenizer: Tokenizer | None,
        registry: CollectorRegistry,
        tracer: Tracer,
        stop_grace_s: float,
    ) -> None:
        self._config = config
        self._clock = clock
        self._random = random
        self._stop_grace_s = stop_grace_s
        self._tasks = tasks
        self._listening = False
        self._asked_to_stop = False
        self._registry = registry
        self._health_changed = asyncio.Event()
        self._watch = LoopWatch(self._registry, clock, clock.cpu_s, LoopStack(clock))
        self._children = Children(
            self._registry,
            tasks.create_task,
            clock,
            os.environ,
            memory_bytes=config.children.memory_bytes,
        )
        self._app = RouterApp(
            config,
            clock,
            random,
            router_id=router_id,
            work=work,
            structure_work=structure_work,
            prover=self._children.prover(config.children.compile_s),
            renderer=self._children.renderer(config.children.render_s),
            tokenizer=tokenizer,
            registry=self._registry,
            on_serving=lambda serving: self._health_changed.set(),
            keys=None if keys is None else keys.keys,
            tracer=tracer,
        )
        self._keys = keys
        timeouts, router = config.timeouts, config.router
        self._gate = Gate(self._app.admission, self._app.metrics, clock)
        self._many = ManyCalls(self._app, self._gate, clock, router.max_shared_calls)
        most_bytes = 2 * router.max_request_bytes  # of larger messages not even the bytes are taken in

        self._receiving = self._receiving_of(most_at_once(config, most_bytes))

        def reader(receiving: Receiving) -> RequestReader:
            return RequestReader(
                router.max_request_bytes,
                self._app.turns,
                asker_of_call,
                self._app.on_unread,
                receiving,
                (GENERATE_MANY,),
            )

        self._for_clients = make_server(
            keepalive_s=timeouts.client_keepalive_s,
            answer_s=timeouts.client_stall_s,
            max_message_bytes=most_bytes,
            random=random,
            gates=(
                CallerInterceptor(self._app.callers, self._app.metrics),
                self._gate,
                reader(self._receiving),
            ),
        )
        self._for_workers = make_server(
            keepalive_s=timeouts.keepalive_s,
            max_message_bytes=router.max_message_bytes,
            random=random,
            gates=(reader(self._receiving_of(router.max_receiving_bytes // router.max_message_bytes)),),
        )
        self._guard = RouterGuard(router_id, secret, clock, random)
        self._health = Health(self._for_clients, self._for_workers)

    async def run(self, stop: StopSignals) -> None:
        http = HttpServer(self._registry, lambda: (), self._not_ready)
        metrics_address = await http.start(self._config.metrics.listen)
        self._watch.start()
        try:
            async with self._children, self._app:
                address, workers_address = self._listen_for_clients(), self._listen_for_workers()
                await self._for_workers.start()
                await self._for_clients.start()
                door = self._open_http()
                self._listening = True
                side_tasks = [self._tasks.create_task(self._tell_health())]
                if self._keys is not None:
                    side_tasks.append(self._tasks.create_task(self._keys.run(self._app.callers)))
                log.info(
                    "router.listening",
                    address=address,
                    workers=workers_address,
                    http="" if door is None else door.address,
                    metrics=metrics_address,
                )
                await stop.wait()
                await self._drain(door)
                for task in side_tasks:
                    task.cancel()
        finally:
            self._watch.stop()
            http.close()

    def _receiving_of(self, most: int) -> Receiving:
        return Receiving(max(1, most), self._clock, self._app.metrics.receiving_refused.inc)

    def _open_http(self) -> OpenDoor | None:
        """The HTTP door, if there is to be one. Raises ConfigError."""
        if not self._config.http.listen:
            return None
        with http_extra("http.listen"):
            from http_door.opening import open_door
        return open_door(
            RouterHttpBackend(self._app, self._gate, self._not_ready),
            self._config,
            self._config.http.listen,
            clock=self._clock,
            random=self._random,
            registry=self._registry,
            receiving=self._receiving,
            stop_grace_s=self._stop_grace_s,
        )

    def _listen_for_clients(self) -> str:
        server = self._for_clients
        inference_pb2_grpc.add_InferenceServicer_to_server(
            InferenceServicer(self._app, self._gate, self._many), server
        )
        vllm = VllmEngineServicer(self._app, self._gate, self._clock)
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(vllm, server)
        server.add_generic_rpc_handlers((WrongListener(dict.fromkeys((WORKERS, ADMIN), _WORKERS_LISTEN)),))
        add_reflection(server, (INFERENCE, VLLM_ENGINE))
        tls = self._config.tls
        return bind(server, self._config.router.listen, _LISTEN, server_credentials(tls, tls.client_ca_file))

    def _listen_for_workers(self) -> str:
        server = self._for_workers
        workers = WorkersServicer(
            on_session=self._app.attach_session,
            guard=self._guard,
            tasks=self._tasks,
            count_unknown=self._app.metrics.count_unknown,
            count_crash=self._app.metrics.session_crashes.inc,
        )
        session_pb2_grpc.add_WorkersServicer_to_server(workers, server)
        admin = AdminServicer(self._app, self._guard, self._random)
        admin_pb2_grpc.add_AdminServicer_to_server(admin, server)
        server.add_generic_rpc_handlers((WrongListener(dict.fromkeys((INFERENCE, VLLM_ENGINE), _LISTEN)),))
        add_reflection(server, (WORKERS, ADMIN))
        tls = self._config.tls
        credentials = server_credentials(tls, tls.ca_file)
        return bind(server, workers_listen(self._config.router), _WORKERS_LISTEN, credentials)

    async def _tell_health(self) -> None:
        """Health of the process, and of its clients' services: whether a pair could take a request now."""
        await self._health.serving("")
        await self._health.serving(WORKERS)
        while True:
            tell = self._health.serving if self._app.serving else self._health.not_serving
            await tell(INFERENCE)
            await tell(VLLM_ENGINE)
            self._health_changed.clear()
            await self._health_changed.wait()

    async def _drain(self, door: OpenDoor | None) -> None:
        self._asked_to_stop = True
        await self._health.drain()
        if delay_s := self._config.router.drain_delay_s:
            log.info("router.still_serving", drain_delay_s=delay_s)
            await asyncio.sleep(delay_s)
        await self._app.drain()
        self._app.close_sessions()
        self._many.close()
        stopping = [each.stop(self._stop_grace_s) for each in (self._for_clients, self._for_workers)]
        await asyncio.gather(*stopping, *([] if door is None else [door.stop()]))

    def _not_ready(self) -> list[str]:
        reasons = []
        if not self._listening:
            reasons.append("not listening yet")
        if self._app.text.tokenizer is None:
            is_loading = self._app.text.is_loading
            reasons.append(
                f"no tokenizer yet: {'it is being read' if is_loading else 'no worker has sent it'}"
            )
        if self._asked_to_stop:
            reasons.append("draining" if self._app.admission.draining else "asked to stop")
        return reasons
