"""What `pdserve up` makes of its command line."""

from __future__ import annotations

import argparse

import pytest

from pdserve.cli.up import add_arguments, counts_of, run, settings_of
from pdserve.errors import PdserveError
from pdserve.service.config import load
from pdserve.service.settings import ConfigError


def parsed(*args: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(args)


def test_short_flags_stand_for_settings() -> None:
    line = "--model m --listen 0.0.0.0:1 --dtype float32 --deterministic --threads 3 --engine fake"
    config = load(flags=settings_of(parsed(*line.split())))
    assert config.worker.model == "m"
    assert config.router.listen == "0.0.0.0:1"
    assert (config.engine.dtype, config.engine.threads, config.engine.kind) == ("float32", 3, "fake")
    assert config.engine.deterministic


def test_every_setting_is_a_flag_and_what_is_not_given_is_not_passed_on() -> None:
    assert settings_of(parsed("--timeouts.link-s", "4.5")) == {"timeouts.link_s": "4.5"}
    assert settings_of(parsed()) == {}


def test_contradicting_forms_of_one_setting_are_an_error() -> None:
    with pytest.raises(ConfigError, match="contradict"):
        settings_of(parsed("--threads", "1", "--engine.threads", "2"))


def test_one_pair_if_no_number_is_given_else_what_is_given() -> None:
    assert counts_of(parsed()) == (1, 1, 0)
    assert counts_of(parsed("--prefill", "2", "--decode", "3")) == (2, 3, 0)
    assert counts_of(parsed("--both", "1")) == (0, 0, 1)


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("", "--model"),
        ("--model no-such-model", "no-such-model"),
        ("--engine fake --prefill 1", "decode"),
        ("--engine fake --listen nowhere", "HOST:PORT"),
        ("--engine wrong", "torch"),
        ("--engine fake --config /no/such/file.toml", "/no/such/file.toml"),
        ("--engine fake --log-dir /dev/null/logs --listen 127.0.0.1:0", "/dev/null"),
    ],
)
def test_what_cannot_be_started_is_refused_in_one_line(line: str, wanted: str) -> None:
    with pytest.raises(PdserveError) as refused:
        run(parsed(*line.split()))
    assert wanted in str(refused.value)
    assert "\n" not in str(refused.value)
