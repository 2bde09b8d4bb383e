"""Turns router names into addresses by the system's resolver."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

from pdserve.errors import WorkerLost
from pdserve.service.address import join_address, split_address


class DnsResolver:
    """A name may stand for several routers; the addresses of one family only, so that no router is dialled twice."""

    async def resolve(self, name: str) -> Sequence[str]:
        """Addresses of "host:port", IPv4 ones if there are any. Raises WorkerLost when the name is unknown."""
        host, port = split_address(name)
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise WorkerLost("the router's name is unknown", name=name, error=error.strerror) from error
        of_family = [entry for entry in found if entry[0] == socket.AF_INET] or found
        return sorted({join_address(str(entry[4][0]), port): None for entry in of_family})
