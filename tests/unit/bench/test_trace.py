"""Traces of both kinds as rows; what isn't one is named by its line."""

from __future__ import annotations

import gzip
import itertools
from pathlib import Path

import pytest

from pdserve.bench.trace import BLOCK_TOKENS, TraceRow, read_trace
from pdserve.errors import InvalidRequest

TRACES = Path(__file__).resolve().parents[3] / "benchmarks" / "traces"
MOONCAKE = '{"timestamp": 27000, "input_length": 600, "output_length": 5, "hash_ids": [46, 47]}\n'
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n"


@pytest.mark.parametrize(
    ("name", "num_rows", "num_prompt_mean", "has_blocks"),
    [
        ("azure_llm_2023_code.csv.gz", 8_819, 2_048, False),
        ("azure_llm_2023_conv.csv.gz", 19_366, 1_155, False),
        ("mooncake_fast25_synthetic.jsonl.gz", 3_993, 15_325, True),
    ],
)
def test_the_traces_that_come_along(name: str, num_rows: int, num_prompt_mean: int, has_blocks: bool) -> None:
    rows = read_trace(TRACES / name)
    assert len(rows) == num_rows
    assert round(sum(row.num_prompt for row in rows) / num_rows) == num_prompt_mean
    assert rows[0].at_s == 0 and all(a.at_s <= b.at_s for a, b in itertools.pairwise(rows))
    for row in rows[:100]:
        assert len(row.blocks) == (-(-row.num_prompt // BLOCK_TOKENS) if has_blocks else 0)


def test_rows_count_from_the_first_one_in_the_order_of_time(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text(MOONCAKE + "\n" + MOONCAKE.replace("27000", "26500"))
    assert read_trace(file) == (TraceRow(0.0, 600, 5, (46, 47)), TraceRow(0.5, 600, 5, (46, 47)))


def test_azure_times_have_a_digit_more_than_datetime_reads(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_text(AZURE + "2023-11-16 18:17:04.0319609,110,27\n")
    first, second = read_trace(file)
    assert (first.num_prompt, first.num_output) == (4808, 10)
    assert second.at_s == pytest.approx(0.0520009, abs=1e-6)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "holds no requests"),
        ("hello\n", "line 1: neither a request"),
        (MOONCAKE + "[1]\n", "line 2"),
        (MOONCAKE.replace("600", "0"), "at least one token"),
        (MOONCAKE.replace("600", "true"), "whole numbers"),
        (MOONCAKE.replace("27000", "-1"), "no number below 0"),
        (MOONCAKE.replace("27000", "NaN"), "no number below 0"),
        (MOONCAKE.replace("[46, 47]", "7"), "line 1"),
        ('{"timestamp": 1, "input_length": 2}\n', "output_length is missing"),
        ("[" * 100_000, "line 1"),
        (AZURE + "2023-11-16 18:17:04.0319609,110\n", "line 3: neither a request .* 2 values for 3 columns"),
        (AZURE.replace(",GeneratedTokens", ""), "line 1: GeneratedTokens is missing"),
        (AZURE.replace("2023-11-16", "yesterday"), "line 2"),
    ],
)
def test_what_is_no_trace_is_named_by_its_line(tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text(content)
    with pytest.raises(InvalidRequest, match=said):
        read_trace(file)


@pytest.mark.parametrize(
    "content", [b"no gzip", gzip.compress(MOONCAKE.encode(), mtime=0)[:-9]], ids=["no gzip", "cut short"]
)
def test_a_broken_gzip_file_is_said_to_be_one(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "t.jsonl.gz"
    file.write_bytes(content)
    with pytest.raises(InvalidRequest, match="not a whole gzip file"):
        read_trace(file)
