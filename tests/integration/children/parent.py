"""A process with children, which prints their ids and then waits to be killed: python -m … [endless]"""

from __future__ import annotations

import asyncio
import sys

from tests.integration.children.proving import bench, endless


async def main() -> None:
    async with bench() as b, asyncio.TaskGroup() as tasks:
        if "endless" in sys.argv:
            tasks.create_task(b.outcome(endless()))
        pids = await b.warm()
        print("pids", b.server.pid, *pids, flush=True)
        await asyncio.Event().wait()


asyncio.run(main())
