"""Images run as Kubernetes would run them: the entry point is PID 1, without root, above a root it can't write."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from tests.support.dockerfile import MOUNT, Image, copy_tree

DEBIAN_PYTHON = "/usr/bin/python3"
_BASE_ENVIRON = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
}  # as every base image has it
_LIMIT_S = 60.0
# A shell, if anything asked for one, isn't there.
_SHELLS = ("/bin/sh", "/bin/bash", "/bin/dash")


def needs_namespaces() -> None:
    """Skip where this machine can't lay out a container."""
    if os.getuid() != 0:
        pytest.skip("needs root, to mount a root file system")
    tried = subprocess.run(
        ["unshare", "--mount", "--pid", "--fork", "true"], capture_output=True, check=False
    )
    if tried.returncode != 0:
        pytest.skip(f"needs namespaces: {tried.stderr.decode().strip()}")
    script = "import sys; print(sys.version_info[:2] == (3, 11))"
    if not Path(DEBIAN_PYTHON).exists() or b"True" not in subprocess.check_output(
        [DEBIAN_PYTHON, "-c", script]
    ):
        pytest.skip(f"needs Python 3.11 at {DEBIAN_PYTHON}, as the runtime image has it")


class Network:
    """A network of its own, with loopback only: addresses 127.x.y.z, and every port free. A context manager.

    hosts  lines of /etc/hosts, which stand for DNS
    """

    def __init__(self, hosts: str) -> None:
        self.hosts = hosts
        # It says that the interface is up, and stays until its input is closed.
        script = "ip link set lo up && echo up && exec cat"
        command = ["unshare", "--net", "/bin/sh", "-c", script]
        self._holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == b"up\n"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._holder.communicate()

    @property
    def enter(self) -> list[str]:
        """What a command begins with to run in it."""
        return ["nsenter", f"--net=/proc/{self._holder.pid}/ns/net"]

    def answers(self, url: str) -> bool:
        """Whether an HTTP server in it says 200."""
        script = "import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=5)"
        command = [*self.enter, sys.executable, "-c", script, url]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0


class PidOne:
    """A program as PID 1 of a namespace: this machine's processes see it under another number.

    A context manager; kills it at the end if it still runs.
    """

    def __init__(
        self,
        command: list[str],
        log: Path,
        environ: Mapping[str, str],
        *unshare: str,
        network: Network | None = None,
    ) -> None:
        self._log = log
        namespaces = ["unshare", "--pid", "--fork", "--kill-child=KILL", *unshare]
        if network is not None:
            namespaces = [*network.enter, *namespaces]
        with log.open("wb") as output:
            self._unshare = subprocess.Popen(
                [*namespaces, *command], env=dict(environ), stdout=output, stderr=subprocess.STDOUT
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._unshare.poll() is None:
            self._unshare.kill()
            self._unshare.wait(_LIMIT_S)

    @property
    def pid(self) -> int:
        """As this machine's processes see it."""
        unshare = self._unshare.pid
        [found] = Path(f"/proc/{unshare}/task/{unshare}/children").read_text().split()
        return int(found)

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)

    def wait(self) -> int:
        """Its exit code. AssertionError with the end of its log if it doesn't end."""
        try:
            return self._unshare.wait(_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still runs; log:\n{self.tail()}") from None

    def is_running(self) -> bool:
        return self._unshare.poll() is None

    def tail(self) -> str:
        return self._log.read_text(errors="replace")[-4000:]


def container(
    image: Image,
    folder: Path,
    *arguments: str,
    settings: Path,
    environ: Mapping[str, str] | None = None,
    network: Network | None = None,
) -> PidOne:
    """Start it; its output goes to folder/log.

    settings  a folder that it sees as /etc/pdserve
    environ   beside the image's
    """
    for name in ("upper", "work", "mounted"):
        (folder / name).mkdir(parents=True)
    copy_tree(image.root, folder / "upper", "--link")
    (folder / "upper/etc/pdserve").mkdir(parents=True)
    if network is not None:
        (folder / "upper/etc/hosts").write_text(network.hosts)
    inside = {**_BASE_ENVIRON, **image.environ, **(environ or {})}
    variables_inside = " ".join(f'"{name}={value}"' for name, value in inside.items())
    hidden = "\n".join(f'mount --bind /dev/null "$ROOT{shell}"' for shell in _SHELLS)
    script = f"""{MOUNT}
mount --bind "$SETTINGS" "$ROOT/etc/pdserve"
mount -t tmpfs -o mode=1777 tmpfs "$ROOT/tmp"
{hidden}
mount -o remount,ro "$ROOT"
cd /
exec env -i {variables_inside} \
    "$(command -v chroot)" --userspec={image.user} "$ROOT" "$@"
"""
    variables = {
        "UPPER": str(folder / "upper"),
        "WORK": str(folder / "work"),
        "ROOT": str(folder / "mounted"),
        "SETTINGS": str(settings),
        "PATH": "/usr/bin:/bin:/usr/sbin",
    }
    command = ["/bin/sh", "-c", script, "container", *image.entrypoint, *arguments]
    return PidOne(command, folder / "log", variables, "--mount", network=network)


def python_as_pid_one(log: Path, *arguments: str) -> PidOne:
    """This Python, with all rights that the tests have. Skips where there are no namespaces."""
    namespaces = ["--user", "--map-root-user"] if os.getuid() else []
    tried = subprocess.run(
        ["unshare", *namespaces, "--pid", "--fork", "true"], capture_output=True, check=False
    )
    if tried.returncode != 0:
        pytest.skip(f"needs PID namespaces: {tried.stderr.decode().strip()}")
    return PidOne([sys.executable, *arguments], log, os.environ, *namespaces)
