"""Leader election by a Lease: of several operators one acts, and another when that one is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Protocol

import aiohttp
import structlog

from deploy.k8s.operator.api import ApiError
from deploy.k8s.operator.manifests import Manifest
from pdserve.clock import Clock

DURATION_S = 15.0
RENEW_S = 5.0
RETRY_S = 2.0
_API, _KIND = "coordination.k8s.io/v1", "Lease"

log = structlog.get_logger()


class Leases(Protocol):
    """Where the Lease is kept. Methods raise ApiError, aiohttp.ClientError or TimeoutError."""

    async def get(self, api: str, kind: str, namespace: str, name: str) -> Manifest | None:
        """None = there is none."""
        ...

    async def create(self, manifest: Manifest) -> Manifest:
        """ApiError 409: it exists."""
        ...

    async def replace(self, manifest: Manifest) -> Manifest:
        """ApiError 409: it has changed since it was read."""
        ...


class Leadership:
    """One event loop.

    identity  of this process; no other has it
    pause     waits so many seconds, or less when everything stops
    The clocks of two machines are never compared: a holder counts as gone when its Lease has not changed for as long
    as it lasts, on this machine's clock. A holder that can't renew stops acting RENEW_S before others may take over.
    """

    def __init__(
        self,
        api: Leases,
        namespace: str,
        name: str,
        identity: str,
        clock: Clock,
        pause: Callable[[float], Awaitable[None]],
    ) -> None:
        self._api = api
        self._namespace, self._name = namespace, name
        self._identity = identity
        self._clock = clock
        self._pause = pause
        self._seen: tuple[str, float] = ("", 0.0)  # the Lease's version, and when it was first seen
        self.held = False

    async def acquire(self, stopped: Callable[[], bool]) -> bool:
        """Wait until this process leads; False: it was stopped before."""
        told = ""
        while not stopped():
            holder = await self._take()
            if holder == self._identity:
                self.held = True
                log.info("leader.acquired", identity=self._identity)
                return True
            if holder and holder != told:
                log.info("leader.waiting", holder=holder)
                told = holder
            await self._pause(RETRY_S)
        return False

    async def keep(self, stopped: Callable[[], bool]) -> None:
        """Renew until stopped, or until leadership is lost: then `held` is False and nothing may be done any more."""
        renewed_s = self._clock.now_s()
        while not stopped():
            await self._pause(RENEW_S if self._clock.now_s() - renewed_s < RENEW_S else RETRY_S)
            if stopped():
                return
            asked_s = self._clock.now_s()
            try:
                async with asyncio.timeout(RENEW_S):
                    holder = await self._take()
            except TimeoutError:
                holder = ""
            if holder == self._identity:
                renewed_s = asked_s
            elif holder or self._clock.now_s() - renewed_s > DURATION_S - RENEW_S:
                self.held = False
                log.error("leader.lost", identity=self._identity, holder=holder)
                return

    async def release(self) -> None:
        """Let the next one lead at once; what can't be told in time is found out when the Lease ends."""
        if not self.held:
            return
        self.held = False
        try:
            async with asyncio.timeout(RETRY_S):
                lease = await self._api.get(_API, _KIND, self._namespace, self._name)
                if lease is not None and lease["spec"].get("holderIdentity") == self._identity:
                    lease["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1}
                    await self._api.replace(lease)
        except (ApiError, aiohttp.ClientError, TimeoutError) as error:
            log.warning("leader.not_released", error=str(error))

    async def _take(self) -> str:
        """Who holds it after an attempt to take or renew it; "" = nobody knows."""
        try:
            lease = await self._api.get(_API, _KIND, self._namespace, self._name)
            if lease is None:
                await self._api.create(self._made(None))
                return self._identity
            holder = str(lease["spec"].get("holderIdentity") or "")
            if holder not in ("", self._identity) and not self._has_ended(lease):
                return holder
            await self._api.replace(self._made(lease))
        except ApiError as error:
            if error.status != 409:  # 409: another one was faster
                log.warning("leader.unknown", error=str(error))
            return ""
        except (aiohttp.ClientError, TimeoutError) as error:
            log.warning("leader.unknown", error=str(error) or "no answer in time")
            return ""
        return self._identity

    def _has_ended(self, lease: Manifest) -> bool:
        version, now_s = str(lease["metadata"]["resourceVersion"]), self._clock.now_s()
        if version != self._seen[0]:
            self._seen = (version, now_s)
        return now_s - self._seen[1] > float(lease["spec"].get("leaseDurationSeconds") or DURATION_S)

    def _made(self, lease: Manifest | None) -> Manifest:
        now = datetime.fromtimestamp(self._clock.wall_ns() / 1e9, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        before = {} if lease is None else lease["spec"]
        is_new = before.get("holderIdentity") != self._identity
        spec = {
            **before,
            "holderIdentity": self._identity,
            "leaseDurationSeconds": int(DURATION_S),
            "renewTime": now,
        }
        if is_new:
            spec |= {
                "acquireTime": now,
                "leaseTransitions": before.get("leaseTransitions", 0) + (lease is not None),
            }
        metadata = {"name": self._name, "namespace": self._namespace} if lease is None else lease["metadata"]
        return {"apiVersion": _API, "kind": _KIND, "metadata": metadata, "spec": spec}
