"""A parent that is killed leaves no process behind."""

from __future__ import annotations

import asyncio
import sys

import pytest

from tests.support.pids import wait_gone


@pytest.mark.parametrize("busy", [(), ("endless",)], ids=["idle", "busy"])
async def test_children_end_with_their_parent(busy: tuple[str, ...]) -> None:
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.integration.children.parent", *busy, stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    async for line in parent.stdout:  # its log comes before
        if line.startswith(b"pids "):
            break
    pids = [int(pid) for pid in line.split()[1:]]
    assert len(pids) == 4
    parent.kill()
    await parent.wait()
    for pid in pids:
        await wait_gone(pid)
