"""Enums of the messages that are made by hand."""

from __future__ import annotations

from pdserve.messages import Role
from pdserve.rpc.codec import Numbers
from pdserve.rpc.v1 import inference_pb2 as ipb
from pdserve.rpc.v1 import session_pb2 as spb
from pdserve.sampling import FinishReason

REASONS = Numbers(FinishReason, ipb.FinishReason.DESCRIPTOR, "finish_reason")
ROLES = Numbers(Role, spb.Role.DESCRIPTOR, "role")
