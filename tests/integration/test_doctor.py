"""`pdserve doctor` over real processes: real blocks over every pair, and a worker that is gone."""

from __future__ import annotations

import asyncio
from pathlib import Path

from pdserve.client import AsyncClient
from tests.support.asking import at_rest
from tests.support.processes import run_cli
from tests.support.singles import Singles

HEARTBEAT_S = 0.1
FAKE = ("--engine", "fake", "--engine.num-blocks", "512")


async def test_every_pair_moves_blocks_until_one_worker_has_gone(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("one that only this cluster knows\n")
    secret.chmod(0o600)
    flags = ("--timeouts.heartbeat-s", f"{HEARTBEAT_S}", "--cluster.secret-file", f"{secret}")
    with Singles(tmp_path, *flags) as cluster:
        router = cluster.router("r0")
        for role, name in (("prefill", "p0"), ("prefill", "p1"), ("decode", "d0"), ("decode", "d1")):
            cluster.worker(role, name, *FAKE)
        cluster.start()
        async with AsyncClient(router.address) as client:
            await at_rest(client, ["d0", "d1", "p0", "p1"], heartbeat_s=HEARTBEAT_S)
        line = ("doctor", "--target", router.operators, "--tokens", "200")

        without = await asyncio.to_thread(run_cli, *line)
        assert without.returncode == 1 and "secret" in without.stderr and not without.stdout

        sound = await asyncio.to_thread(run_cli, *line, "--secret-file", f"{secret}")
        assert sound.returncode == 0, sound.stdout + sound.stderr
        pairs = [each for each in sound.stdout.splitlines() if " > " in each]
        assert len(pairs) == 4 and all(each.startswith("ok ") and "over memfd" in each for each in pairs)

        await asyncio.to_thread(cluster.all["d1"].kill)
        async with AsyncClient(router.address) as client:
            await at_rest(client, ["d0", "p0", "p1"], heartbeat_s=HEARTBEAT_S)
        cluster.all["d0"].kill()
        gone = await asyncio.to_thread(run_cli, *line, "--secret-file", f"{secret}")
        assert gone.returncode == 1
        assert "FAIL" in gone.stdout
