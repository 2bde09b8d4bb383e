"""The programs of Prometheus, where Debian's package, or somebody, has put them; queries of one that runs."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.local.ports import PortReservations
from deploy.local.probe import fetch
from tests.support.readme import ROOT
from tools.k8s_tools import tools_dir

RULES = ROOT / "deploy" / "prometheus" / "rules.yml"
BOARD = ROOT / "deploy" / "grafana" / "pdserve.json"
JOB = "pdserve"


def program(name: str) -> str:
    """`prometheus` or `promtool`; skips the test if it isn't there."""
    folder = tools_dir() / "prometheus"
    found = shutil.which(name) or shutil.which(name, path=str(folder))
    if found is None:
        pytest.skip(f"no {name}: `apt-get install prometheus`, or put its programs into {folder}")
    return found


def alerts() -> list[dict[str, Any]]:
    """Those of rules.yml."""
    [group] = yaml.safe_load(RULES.read_text())["groups"]
    return list(group["rules"])


def promtool(*arguments: str, said: str = "") -> subprocess.CompletedProcess[str]:
    """One call."""
    command = [program("promtool"), *arguments]
    return subprocess.run(command, input=said, capture_output=True, text=True, check=False)


class Prometheus:
    """One that runs at this address."""

    def __init__(self, address: str) -> None:
        self.address = address

    async def query(self, expression: str) -> list[tuple[Mapping[str, str], float]]:
        """Labels and values of now."""
        data = await self._get("query", query=expression)
        return [(each["metric"], float(each["value"][1])) for each in data["result"]]

    async def rules(self) -> list[dict[str, Any]]:
        """With their health and state."""
        [group] = (await self._get("rules"))["groups"]
        return list(group["rules"])

    async def _get(self, path: str, **parameters: str) -> Any:
        answer = await fetch(self.address, f"/api/v1/{path}?{urllib.parse.urlencode(parameters)}")
        if answer is None:
            return {"result": [], "groups": [{"rules": []}]}
        said = json.loads(answer[1])
        assert said["status"] == "success", said
        return said["data"]


@contextmanager
def running_prometheus(folder: Path, targets: Sequence[str], every_ms: int) -> Iterator[Prometheus]:
    """Scrapes these addresses and evaluates our rules. Ended by pid."""
    config = {
        "global": {"scrape_interval": f"{every_ms}ms", "evaluation_interval": f"{every_ms}ms"},
        "rule_files": [str(RULES)],
        "scrape_configs": [{"job_name": JOB, "static_configs": [{"targets": list(targets)}]}],
    }
    file = folder / "prometheus.yml"
    file.write_text(yaml.safe_dump(config))
    ports = PortReservations()
    address = f"127.0.0.1:{ports.reserve('127.0.0.1', 0)}"
    ports.close()
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                program("prometheus"),
                f"--config.file={file}",
                f"--storage.tsdb.path={folder / 'tsdb'}",
                f"--web.listen-address={address}",
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            yield Prometheus(address)
        finally:
            process.kill()
            process.wait()
