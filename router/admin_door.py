"""The admin service of a router: for those who know the cluster's secret, if it has one, or have an admin's key."""

from __future__ import annotations

from typing import Any

from pdserve.ids import Random
from pdserve.probe import PAIR_PROBE
from pdserve.rpc.v1 import admin_pb2 as pb
from pdserve.rpc.v1 import admin_pb2_grpc
from pdserve.rpc.v1.inference_pb2 import GetStatusRequest, GetStatusResponse
from pdserve.rpc.values import ROLES
from pdserve.service.peer_proof import RouterGuard
from pdserve.status import CLUSTER_STATUS, SCALING_NOTE
from router.app import RouterApp
from router.probe import probe_pair


class AdminServicer(admin_pb2_grpc.AdminServicer):
    """Event-loop thread only."""

    def __init__(self, app: RouterApp, guard: RouterGuard, random: Random) -> None:
        self._app = app
        self._operators = app.operators
        self._guard = guard
        self._random = random

    async def SetRole(self, request: pb.SetRoleRequest, context: Any) -> pb.SetRoleResponse:  # noqa: N802
        await self._admit(context)
        self._operators.set_role(request.worker_id, ROLES.read(request.role), force=request.force)
        return pb.SetRoleResponse()

    async def DrainWorker(self, request: pb.DrainWorkerRequest, context: Any) -> pb.DrainWorkerResponse:  # noqa: N802
        await self._admit(context)
        self._operators.drain(request.worker_id, force=request.force)
        return pb.DrainWorkerResponse()

    async def GetStatus(self, request: GetStatusRequest, context: Any) -> GetStatusResponse:  # noqa: N802
        await self._admit(context)
        return CLUSTER_STATUS.write(self._app.status(explain=request.explain))

    async def ProbePair(self, request: pb.ProbePairRequest, context: Any) -> pb.ProbePairResponse:  # noqa: N802
        await self._admit(context)
        probe = await probe_pair(
            self._app,
            self._random,
            request.prefill_worker,
            request.decode_worker,
            request.num_tokens,
            context.time_remaining(),
        )
        return PAIR_PROBE.write(probe)

    async def NoteScaling(self, request: pb.ScalingNote, context: Any) -> pb.NoteScalingResponse:  # noqa: N802
        await self._admit(context)
        self._operators.scaling.note(SCALING_NOTE.read(request))
        return pb.NoteScalingResponse()

    async def _admit(self, context: Any) -> None:
        """Who has an admin's API key, or knows the secret."""
        if not self._app.callers.admit_operator(context.invocation_metadata()):
            await self._guard.admit(context)
