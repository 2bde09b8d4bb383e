"""Command line and environment of a process: what was meant arrives."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import pytest

from deploy.command import PROGRAM, arguments_of, environ_of
from pdserve.cli.main import build_parser
from pdserve.cli.settings import ROUTER, WORKER, read_settings
from pdserve.service.config import SETTINGS, Config, EngineConfig, load


def parsed(arguments: tuple[str, ...]) -> argparse.Namespace:
    return build_parser(arguments).parse_args(arguments)


# One that isn't the default for each kind of value.
OTHERS: dict[str, object] = {
    "worker.routers": ("a:1", "[::1]:2"),
    "worker.model": "a folder/with = and spaces",
    "engine.deterministic": True,
    "engine.prefix_cache": False,
    "engine.threads": 3,
    "timeouts.link_s": 4.25,
    "engine.kind": "fake",
}


@pytest.mark.parametrize("role", ["router", "prefill", "decode", "both"])
def test_every_setting_arrives_as_it_was_meant(role: str) -> None:
    values = {key.name: key.default for key in SETTINGS if key.name != "worker.role"} | OTHERS
    arguments = parsed(arguments_of(role, values))
    config = read_settings(arguments, ROUTER if role == "router" else WORKER, environ={})
    assert config == load(flags=OTHERS) != Config()
    assert arguments.command == ("worker" if role == "both" else role)


def test_a_file_is_named_before_the_settings_that_stand_above_it(tmp_path: Path) -> None:
    file = tmp_path / "a b.toml"
    file.write_text('[log]\nlevel = "error"\nformat = "json"\n')
    config = read_settings(parsed(arguments_of("decode", {"log.level": "debug"}, file)), WORKER, environ={})
    assert (config.log.level, config.log.format) == ("debug", "json")


def test_processes_use_the_same_copy_of_the_package_and_keep_the_users_environment() -> None:
    given = {"PYTHONPATH": f"/a{os.pathsep}/b", "HOME": "/h", "GLIBC_TUNABLES": "mine"}
    made = environ_of("decode", EngineConfig(), given)
    root = str(Path(__file__).resolve().parents[3])
    assert made["PYTHONPATH"].split(os.pathsep) == [root, "/a", "/b"]
    assert (made["HOME"], made["GLIBC_TUNABLES"]) == ("/h", "mine")


def test_the_users_folder_is_not_searched_for_our_packages() -> None:
    assert "-P" in PROGRAM
