"""What `pdserve up` makes of its command line."""

from __future__ import annotations

import argparse

import pytest

from deploy.scaling.targets import Range
from pdserve.cli.main import main
from pdserve.cli.settings import UP, given_settings
from pdserve.cli.up import add_arguments, ranges_of, run, scaled
from pdserve.errors import PdserveError
from pdserve.service.config import load
from pdserve.service.scaling_config import ScalingConfig


def parsed(*args: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(args)


def test_short_flags_stand_for_settings() -> None:
    line = "--model m --listen 0.0.0.0:1 --dtype float32 --deterministic --threads 3 --engine fake"
    config = load(flags=given_settings(parsed(*line.split()), UP))
    assert config.worker.model == "m"
    assert config.router.listen == "0.0.0.0:1"
    assert (config.engine.dtype, config.engine.threads, config.engine.kind) == ("float32", 3, "fake")
    assert config.engine.deterministic


def test_every_setting_is_a_flag_and_what_is_not_given_is_not_passed_on() -> None:
    assert given_settings(parsed("--timeouts.link-s", "4.5"), UP) == {"timeouts.link_s": "4.5"}
    assert given_settings(parsed(), UP) == {}


def test_one_pair_if_no_number_is_given_else_what_is_given() -> None:
    def counts_of(*line: str) -> tuple[int, int, int]:
        prefill, decode, both = ranges_of(parsed(*line))
        assert scaled(prefill, decode, both, ScalingConfig()) is None
        return prefill.least, decode.least, both

    assert counts_of() == (1, 1, 0)
    assert counts_of("--prefill", "2", "--decode", "3") == (2, 3, 0)
    assert counts_of("--both", "1") == (0, 0, 1)


def test_a_range_begins_with_its_least_and_is_scaled() -> None:
    prefill, decode, both = ranges_of(parsed("--prefill", "2", "--decode", "1..4"))
    assert (prefill, decode, both) == (Range(2, 2), Range(1, 4), 0)
    assert scaled(prefill, decode, both, ScalingConfig()) is not None


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("", "--model"),
        ("--model no-such-model", "no-such-model"),
        ("--engine fake --prefill 1", "decode"),
        ("--engine fake --listen nowhere", "HOST:PORT"),
        ("--engine fake --prefill 3..1 --decode 1", "--prefill: the range 3..1 ends below its start"),
        ("--engine fake --prefill 1 --decode 0..2", "--decode: the range 0..2 begins below 1"),
        (
            "--engine fake --prefill one --decode 1",
            "--prefill: want a number of workers or LEAST..MOST, got 'one'",
        ),
        ("--engine fake --prefill 1..2 --decode -1", "--decode: want a number"),
        ("--engine fake --prefill ١..٣ --decode 1", "--prefill: want a number of workers or LEAST..MOST"),
        ("--engine fake --prefill 1..1025 --decode 1", "the range 1..1025 is beyond 1024"),
        ("--engine fake --prefill 1 --decode 99999999", "the range 99999999 is beyond 1024"),
        ("--engine fake --both 2000", "--both: the range 2000 is beyond 1024"),
        ("--engine fake --both 1..2", "--both: want a number, got 1..2: workers that do both aren't scaled"),
        ("--engine fake --prefill= --decode 1", "--prefill: want a number of workers or LEAST..MOST, got ''"),
        (
            "--engine fake --listen 127.0.0.1:0 --metrics.listen 127.0.0.1:65534",
            "127.0.0.1:65536: 65535 is the last",
        ),
        ("--engine fake --prefill 1..2 --decode 1 --both 1", "--both can't stand beside a range"),
        ("--engine fake --prefill 1..2 --decode 1 --ttft-target 0", "scaling.ttft_target_s"),
        ("--engine wrong", "torch"),
        ("--threads 1 --engine.threads 2", "contradicts"),
        ("--engine fake --config /no/such/file.toml", "/no/such/file.toml"),
        ("--engine fake --ready-file /no/such/folder/ready.json", "no folder /no/such/folder"),
        ("--engine fake --ready-file /dev", "can't be written"),
    ],
)
def test_what_cannot_be_started_is_refused_in_one_line(line: str, wanted: str) -> None:
    with pytest.raises(PdserveError) as refused:
        run(parsed(*line.split()))
    assert wanted in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_log_folder_that_cant_be_made_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--engine", "fake", "--log-dir", "/dev/null/logs", "--listen", "127.0.0.1:0"]) != 0
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1 and "/dev/null/logs" in said
