"""Traces of real services: when requests came, how long they were, and which prefixes they share. No text."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, cast

from pdserve.errors import InvalidRequest

BLOCK_TOKENS = 512
"""Tokens of a prefix block in Mooncake's traces."""
_MAX_LINE_BYTES = 1 << 20
_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace.

    at_s    since the first one
    blocks  ids of its prefix blocks of BLOCK_TOKENS each: equal ids are equal tokens; () = nothing is known
    """

    at_s: float
    num_prompt: int
    num_output: int
    blocks: tuple[int, ...] = ()


def read_trace(file: Path) -> tuple[TraceRow, ...]:
    """The rows of Mooncake's JSON lines or Azure's CSV, as they are or gzipped, in the order of their times.

    Raises InvalidRequest that names the line; OSError.
    """
    with file.open("rb") as plain:
        lines: IO[bytes] = cast(IO[bytes], gzip.GzipFile(fileobj=plain)) if file.suffix == ".gz" else plain
        try:
            rows = sorted(_rows(lines), key=lambda row: row.at_s)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise InvalidRequest(f"{file} is not a whole gzip file: {error}") from error
        except _LineError as error:
            raise InvalidRequest(f"{file}, line {error.number}: {error}") from error
    if not rows:
        raise InvalidRequest(f"{file} holds no requests")
    begin_s = rows[0].at_s
    return tuple(TraceRow(row.at_s - begin_s, row.num_prompt, row.num_output, row.blocks) for row in rows)


class _LineError(Exception):
    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.number = number


def _rows(lines: IO[bytes]) -> Iterator[TraceRow]:
    read: Callable[[str], TraceRow] | None = None
    for number, line in enumerate(iter(lambda: lines.readline(_MAX_LINE_BYTES), b""), 1):
        if not line.strip():
            continue
        try:
            text = line.decode()
            if read is None:
                if text.startswith(_AZURE[0]):
                    read = _azure_reader(text)
                    continue
                read = _mooncake_row
            row = read(text)
        except KeyError as error:
            raise _LineError(number, f"{error.args[0]} is missing") from error
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise _LineError(
                number, f"neither a request of Mooncake's traces nor of Azure's: {error}"
            ) from error
        if not (row.at_s >= 0 and row.num_prompt >= 1 and row.num_output >= 0):
            raise _LineError(number, "want a prompt of at least one token, and no number below 0")
        yield row


def _mooncake_row(line: str) -> TraceRow:
    """Raises ValueError, TypeError, KeyError, RecursionError for what is no request."""
    found = json.loads(line)
    if not isinstance(found, dict):
        raise ValueError("want an object a line")
    at_ms, blocks = found["timestamp"], found.get("hash_ids", [])
    numbers = (found["input_length"], found["output_length"], *blocks)
    if not all(type(number) is int for number in numbers) or type(at_ms) not in (int, float):
        raise ValueError("lengths and hash_ids are whole numbers, and timestamp is one of milliseconds")
    return TraceRow(at_ms / 1e3, numbers[0], numbers[1], tuple(blocks))


def _azure_reader(heading: str) -> Callable[[str], TraceRow]:
    columns = [name.strip() for name in heading.split(",")]
    if missing := [name for name in _AZURE if name not in columns]:
        raise KeyError(missing[0])
    at, num_prompt, num_output = (columns.index(name) for name in _AZURE)

    def read(line: str) -> TraceRow:
        values = line.strip().split(",")
        if len(values) != len(columns):
            raise ValueError(f"{len(values)} values for {len(columns)} columns")
        # datetime knows microseconds, the trace ten times finer ones
        whole, _, fraction = values[at].partition(".")
        moment = datetime.fromisoformat(whole).replace(tzinfo=UTC).timestamp()
        return TraceRow(
            moment + float(f"0.{fraction or 0}"), int(values[num_prompt]), int(values[num_output])
        )

    return read
