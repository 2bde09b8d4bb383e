"""Who asks: the tenant and the rights behind a call's API key. A router without keys knows one caller, who may all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pdserve.clock import Clock
from pdserve.errors import PermissionDenied, Unauthenticated
from pdserve.service.api_keys import ApiKey, recognise
from router.key_limits import KeyLimits

_AUTHORIZATION = "authorization"
_SCHEME = "bearer "


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """tenant: "" where there are no keys. sees_all: it is told of all tenants' requests. has_own_cache: no other
    tenant's requests hit its prefix cache entries."""

    tenant: str
    has_own_cache: bool
    sees_all: bool
    may_change_workers: bool
    max_priority: int
    limits: KeyLimits

    def salt(self, asked: str) -> str:
        """The cache salt of a request that asked for this one."""
        return f"{self.tenant}/{asked}" if self.has_own_cache else asked

    def check_priority(self, priority: int) -> None:
        """Raises PermissionDenied."""
        if priority > self.max_priority:
            raise PermissionDenied("this API key may not ask for so high a priority", limit=self.max_priority)


class Callers:
    """Event-loop thread only.

    keys          by id; None = callers are not asked for any
    on_refused    told (tenant, limit) of each call over one of its key's limits
    shares_cache  whether tenants hit each other's prefix cache entries
    """

    def __init__(
        self,
        keys: Mapping[str, ApiKey] | None,
        clock: Clock,
        on_refused: Callable[[str, str], None],
        *,
        shares_cache: bool = False,
    ) -> None:
        self._clock = clock
        self._shares_cache = shares_cache
        self._on_refused = on_refused
        self._keys: Mapping[str, ApiKey] | None = None
        self._callers: dict[str, Caller] = {}
        self.everybody = self._make(ApiKey(max_priority=1000), sees_all=True)
        if keys is not None:
            self.replace(keys)

    def replace(self, keys: Mapping[str, ApiKey]) -> None:
        """The file has changed. What a key has used up, and runs, stays counted; a revoked one's calls run to their
        ends."""
        callers = {}
        for key_id, key in keys.items():
            before = self._callers.get(key_id)
            if before is not None:
                before.limits.change(key)
            callers[key_id] = self._make(key, limits=None if before is None else before.limits)
        self._keys, self._callers = keys, callers

    def admit(self, metadata: Iterable[Any] | None) -> Caller:
        """Whose call this is. Raises Unauthenticated, in the same words for every reason."""
        if self._keys is None:
            return self.everybody
        key_id = recognise(_bearer(metadata), self._keys)
        if key_id is None:
            raise Unauthenticated("no valid API key")
        return self._callers[key_id]

    def admit_operator(self, metadata: Iterable[Any] | None) -> bool:
        """Whether the call has an admin's key; False if it has none. Raises Unauthenticated, PermissionDenied."""
        if not _bearer(metadata):
            return False
        if self._keys is None:
            raise Unauthenticated("no valid API key")
        if not self.admit(metadata).may_change_workers:
            raise PermissionDenied("this API key is no admin's")
        return True

    def _make(self, key: ApiKey, *, sees_all: bool = False, limits: KeyLimits | None = None) -> Caller:
        tenant = key.tenant
        return Caller(
            tenant=tenant,
            has_own_cache=bool(tenant) and not self._shares_cache,
            sees_all=sees_all or key.admin,
            may_change_workers=key.admin,
            max_priority=key.max_priority,
            limits=limits or KeyLimits(key, self._clock, lambda limit: self._on_refused(tenant, limit)),
        )


def _bearer(metadata: Iterable[Any] | None) -> str:
    for name, value in metadata or ():
        if name == _AUTHORIZATION and isinstance(value, str) and value[: len(_SCHEME)].lower() == _SCHEME:
            return value[len(_SCHEME) :].strip()
    return ""
