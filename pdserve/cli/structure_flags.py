"""Flags that say what the text must be; docs/sampling.md, "Structure"."""

from __future__ import annotations

import argparse
from pathlib import Path

from pdserve.cli.unicode import unicode_of
from pdserve.errors import InvalidRequest
from pdserve.structure import Structure


def add_structure(parser: argparse.ArgumentParser) -> None:
    """One of them, or none."""
    group = parser.add_argument_group(
        "structure", "what the text must be, one of:"
    ).add_mutually_exclusive_group()
    group.add_argument("--json-schema", metavar="FILE|JSON", help="JSON that satisfies this schema")
    group.add_argument("--json-object", action="store_true", help="any JSON object")
    group.add_argument(
        "--regex", metavar="RE", help="text that this regex matches as a whole (Rust's syntax)"
    )
    group.add_argument("--choice", action="append", default=[], metavar="S", help="this text; repeatable")
    group.add_argument("--grammar", type=Path, metavar="FILE", help="a word of this grammar (Lark or GBNF)")


def structure_of(arguments: argparse.Namespace) -> Structure | None:
    """Looked at by the router. Raises InvalidRequest for a file that can't be read."""
    if arguments.json_schema is not None:
        return Structure.json_schema(_text_or_file(arguments.json_schema))
    if arguments.json_object:
        return Structure.json_object()
    if arguments.regex is not None:
        return Structure.regex(unicode_of(arguments.regex, "--regex"))
    if arguments.choice:
        return Structure.choices(unicode_of(text, "--choice") for text in arguments.choice)
    if arguments.grammar is not None:
        return Structure.grammar(_read(arguments.grammar))
    return None


def _text_or_file(argument: str) -> str:
    """A schema is an object, so what doesn't begin with a brace is a file's name."""
    if argument.lstrip().startswith("{"):
        return unicode_of(argument, "--json-schema")
    return _read(Path(argument))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"{path} can't be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{path} is not UTF-8") from error
