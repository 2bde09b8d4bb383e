"""The roles a worker can take: the one place that knows every kind of worker."""

from __future__ import annotations

from decode_worker.core import DecodeCore
from pdserve.messages import Role
from pdserve.worker.role import Roles
from prefill_worker.core import PrefillCore

ROLES: Roles = {Role.PREFILL: PrefillCore, Role.DECODE: DecodeCore, Role.BOTH: DecodeCore}
