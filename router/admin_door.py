"""The admin service at the router's door: what only somebody who knows the cluster's secret may ask, if it has one."""

from __future__ import annotations

from typing import Any

from pdserve.rpc.v1 import admin_pb2 as pb
from pdserve.rpc.v1 import admin_pb2_grpc
from pdserve.rpc.values import ROLES
from pdserve.service.peer_proof import RouterGuard
from router.operators import Operators


class AdminServicer(admin_pb2_grpc.AdminServicer):
    """Event-loop thread only."""

    def __init__(self, operators: Operators, guard: RouterGuard) -> None:
        self._operators = operators
        self._guard = guard

    async def SetRole(self, request: pb.SetRoleRequest, context: Any) -> pb.SetRoleResponse:  # noqa: N802
        await self._guard.admit(context)
        self._operators.set_role(request.worker_id, ROLES.read(request.role), force=request.force)
        return pb.SetRoleResponse()

    async def DrainWorker(self, request: pb.DrainWorkerRequest, context: Any) -> pb.DrainWorkerResponse:  # noqa: N802
        await self._guard.admit(context)
        self._operators.drain(request.worker_id, force=request.force)
        return pb.DrainWorkerResponse()
