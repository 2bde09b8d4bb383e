"""Routers by name and by file: what a file may hold, and what is refused with which words."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pdserve.errors import InvalidRequest, WorkerLost
from pdserve.service.address import file_of
from pdserve.service.config import load
from pdserve.service.settings import ConfigError
from pdserve.worker.resolver import RouterResolver


def replace(path: Path, text: str) -> None:
    """As an operator's tool should: in one step."""
    scratch = path.with_suffix(".new")
    scratch.write_text(text)
    scratch.replace(path)


async def test_a_file_names_one_router_a_line_and_is_read_again_each_time(tmp_path: Path) -> None:
    path, resolver = tmp_path / "routers 1", RouterResolver()
    name = path.as_uri()
    assert "%20" in name
    replace(path, "# of cluster a\n\n 10.0.0.1:50051  # the first\n[::1]:7\r\n10.0.0.1:50051\nrouter-b:1")
    assert await resolver.resolve(name) == ("10.0.0.1:50051", "[::1]:7", "router-b:1")
    replace(path, "\ufeff10.0.0.2:50051\n")
    assert await resolver.resolve(name) == ("10.0.0.2:50051",)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "No such file"),
        (b"", "is empty"),
        (b"# nobody yet\n\n", "is empty"),
        (b"10.0.0.1:50051\n10.0.0.2\n", "line=2"),
        (b"10.0.0.1:50051,10.0.0.2:50051\n", "line=1"),
        (b"10.0.0.1:99999\n", "line=1"),
        (b"\xff\xfe1\x000\x00", "isn't UTF-8"),
        (b"#" * ((1 << 20) + 1), "longer than 1048576 bytes"),
    ],
)
async def test_a_file_that_says_nothing_is_refused_with_its_name(
    content: bytes | None, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "routers"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(WorkerLost, match=reason) as refused:
        await RouterResolver().resolve(path.as_uri())
    assert str(path) in str(refused.value)


async def test_only_a_regular_file_is_read(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path in (tmp_path, fifo, Path("/dev/zero")):
        with pytest.raises(WorkerLost, match=r"regular file|Is a directory"):
            await RouterResolver().resolve(path.as_uri())


async def test_a_name_is_looked_up() -> None:
    assert list(await RouterResolver().resolve("127.0.0.1:50051")) == ["127.0.0.1:50051"]
    with pytest.raises(WorkerLost, match=r"unknown.*not a name"):
        await RouterResolver().resolve("a..b:50051")


def test_a_file_is_an_absolute_path_and_nothing_else() -> None:
    assert file_of("file:///etc/routers") == Path("/etc/routers")
    assert file_of("host:1") is None
    for text in ("file:", "file://", "file:///", "file://host/etc/routers", "file:/etc/routers", "file:etc/routers",
                 "file:///a?b", "file:///a#b"):  # fmt: skip
        with pytest.raises(InvalidRequest, match="file:///PATH"):
            file_of(text)


def test_the_configuration_takes_names_and_files_and_refuses_the_rest() -> None:
    routers = ("a:1", "file:///etc/pdserve/routers")
    assert load(flags={"worker.routers": ",".join(routers)}).worker.routers == routers
    for wrong in ("file://host/routers", "/etc/routers", "a", "a:1,file:b"):
        with pytest.raises(ConfigError, match=r"worker\.routers must be HOST:PORT or file:///PATH each"):
            load(flags={"worker.routers": wrong})
