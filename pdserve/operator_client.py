"""What an operator asks of a cluster, at the routers' address for workers and operators (`router.workers_listen`)."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from pdserve.ids import Epoch, WorkerRef, system_random
from pdserve.messages import Role
from pdserve.probe import PAIR_PROBE, PairProbe
from pdserve.rpc.v1 import admin_pb2
from pdserve.rpc.v1.admin_pb2_grpc import AdminStub
from pdserve.rpc.v1.inference_pb2 import GetStatusRequest
from pdserve.rpc.values import ROLES
from pdserve.service.peer_proof import WorkerProof
from pdserve.service.proven_call import open_proven
from pdserve.service.targets import Targets
from pdserve.service.tls import ClientTls
from pdserve.status import CLUSTER_STATUS, SCALING_NOTE, ClusterStatus, ScalingNote

_ADMIT_S = 10.0  # how long a router may take to let an operator in
_OPERATOR = WorkerRef("operator", Epoch(0, 0))  # whose proof of the cluster secret it is


class OperatorClient:
    """One event loop. `async with OperatorClient("127.0.0.1:50052", secret=…) as operator: …`

    targets  HOST:PORT, or several of them
    secret   the cluster's, if it has one; or instead
    api_key  an admin's
    tls      ClientTls(ca=…); None = without
    Every method raises errors of pdserve.errors, and Unauthenticated if either side doesn't know the secret.
    """

    def __init__(
        self,
        targets: str | Sequence[str],
        *,
        secret: bytes | None = None,
        api_key: str = "",
        tls: ClientTls | None = None,
        keepalive_s: float = 1.0,
    ) -> None:
        self._targets = Targets(targets, keepalive_s, api_key, tls)
        self._secret = secret

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End all calls and connections; idempotent."""
        await self._targets.close()

    async def set_role(self, worker_id: str, role: Role, *, force: bool = False) -> None:
        """Make a worker drain and rejoin in another role; returns when it has been told.

        force  also if no other worker has the role that it leaves
        Raises UnknownWorker; InvalidRequest if it has that role, or is the last of its own.
        """
        message = admin_pb2.SetRoleRequest(worker_id=worker_id, role=ROLES.write(role), force=force)
        await self._ask("SetRole", message)

    async def drain_worker(self, worker_id: str, *, force: bool = False) -> None:
        """Let a worker serve what it has, and end; otherwise as set_role."""
        await self._ask("DrainWorker", admin_pb2.DrainWorkerRequest(worker_id=worker_id, force=force))

    async def status(self) -> ClusterStatus:
        """Workers, pairs and queue as the router sees them."""
        return CLUSTER_STATUS.read(await self._ask("GetStatus", GetStatusRequest()))

    async def note_scaling(self, note: ScalingNote) -> None:
        """Tell the router what was decided about the number of workers, for its status and metrics."""
        await self._ask("NoteScaling", SCALING_NOTE.write(note))

    async def probe_pair(
        self, prefill_worker: str, decode_worker: str, num_tokens: int, *, deadline_s: float
    ) -> PairProbe:
        """Compute a drawn prompt of so many tokens on one pair and hand it over.

        Raises UnknownWorker; NoWorker if the pair takes no requests now; otherwise what a request may end with.
        """
        message = admin_pb2.ProbePairRequest(
            prefill_worker=prefill_worker, decode_worker=decode_worker, num_tokens=num_tokens
        )
        return PAIR_PROBE.read(await self._ask("ProbePair", message, deadline_s))

    async def _ask(self, method: str, message: Any, deadline_s: float | None = None) -> Any:
        proof = WorkerProof(_OPERATOR, self._secret, system_random())

        async def ask_one(target: str) -> Any:
            call = getattr(AdminStub(self._targets.channel(target)), method)
            if metadata := self._targets.metadata:
                return await call(message, metadata=metadata, timeout=deadline_s or _ADMIT_S)
            return await (
                await open_proven(
                    lambda metadata: call(message, metadata=metadata, timeout=deadline_s),
                    proof,
                    target,
                    _ADMIT_S,
                )
            )

        return await self._targets.ask(ask_one)
