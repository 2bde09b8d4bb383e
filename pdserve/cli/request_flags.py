"""Flags for what a request asks of the sampler and of its answer: one for each field, made from its description."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pdserve.errors import InvalidRequest
from pdserve.fields import Field, fields_of
from pdserve.request import GenerateRequest, Input, Limits
from pdserve.sampling import SamplingParams
from pdserve.structure import Structure

_FIELDS = {field.name: field for cls in (SamplingParams, GenerateRequest) for field in fields_of(cls)}
_METAVARS: dict[type | None, str] = {int: "N", float: "F", str: "S", tuple: "ID=F"}
_ANSWER = ("n", "best_of", "logprobs", "prompt_logprobs", "echo", "truncate_prompt_tokens")
_SAMPLING = (*(each.name for each in fields_of(SamplingParams) if each.name not in _ANSWER), "seed")


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """How tokens are chosen and when the text ends. What isn't given is the router's default."""
    group = parser.add_argument_group("sampling")
    for name in _SAMPLING:
        _add(group, _FIELDS[name])
    group = parser.add_argument_group("structure", "what the text must be, one of:")
    one_of = group.add_mutually_exclusive_group()
    one_of.add_argument("--json-schema", metavar="FILE|JSON", help="JSON that satisfies this schema")
    one_of.add_argument("--json-object", action="store_true", help="any JSON object")
    one_of.add_argument(
        "--regex", metavar="RE", help="text that this regex matches as a whole (Rust's syntax)"
    )
    one_of.add_argument("--choice", action="append", metavar="S", help="this text; repeatable")
    one_of.add_argument("--grammar", type=Path, metavar="FILE", help="a text of this grammar (Lark or GBNF)")


def add_answer(parser: argparse.ArgumentParser) -> None:
    """What else the answer holds; beside `add_sampling`."""
    group = parser.add_argument_group("answer")
    for name in _ANSWER:
        _add(group, _FIELDS[name])


def request_with(arguments: argparse.Namespace, prompt: Input) -> GenerateRequest:
    """A checked request from these flags. Raises InvalidRequest, also for a file that can't be read."""
    sampling = SamplingParams(structure=_structure_of(arguments), **_given(arguments, SamplingParams))
    request = GenerateRequest(input=prompt, sampling=sampling, **_given(arguments, GenerateRequest))
    request.check(Limits())
    return request


def read_text(path: Path) -> str:
    """A file's text. Raises InvalidRequest."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"{path} can't be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{path} is not UTF-8") from error


def _add(group: argparse._ArgumentGroup, field: Field) -> None:
    text, item = field.spec.doc, field.item
    if field.kind is bool:
        group.add_argument(field.flag, dest=field.name, action="store_true", default=None, help=text)
        return
    read: Callable[[str], Any] = _bias if item is tuple else item or field.kind
    notes = (
        "" if item is None else "repeatable",
        field.spec.range if field.kind is float or item is tuple else "",
        "" if field.default_text == "none" else f"default: {field.default_text}",
    )
    group.add_argument(
        field.flag,
        dest=field.name,
        action="store" if item is None else "append",
        type=read,
        metavar="ID" if item is int else _METAVARS[item or field.kind],
        help=f"{text} ({'; '.join(note for note in notes if note)})" if any(notes) else text,
    )


def _given(arguments: argparse.Namespace, cls: Any) -> dict[str, Any]:
    """The fields of a dataclass that the command line sets."""
    given = {field: getattr(arguments, field.name, None) for field in fields_of(cls)}
    return {field.name: field.value_of(value) for field, value in given.items() if value is not None}


def _bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise argparse.ArgumentTypeError(f"want ID=F, got {text!r}") from None


def _structure_of(arguments: argparse.Namespace) -> Structure | None:
    if arguments.json_schema is not None:
        # A schema is an object, so what doesn't begin with a brace is a file's name.
        is_text = arguments.json_schema.lstrip().startswith("{")
        return Structure.json_schema(
            arguments.json_schema if is_text else read_text(Path(arguments.json_schema))
        )
    if arguments.json_object:
        return Structure.json_object()
    if arguments.regex is not None:
        return Structure.regex(arguments.regex)
    if arguments.choice:
        return Structure.choices(arguments.choice)
    if arguments.grammar is not None:
        return Structure.grammar(read_text(arguments.grammar))
    return None
