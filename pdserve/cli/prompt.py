"""What a user typed → a GenerateRequest."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from pdserve.cli.request_flags import read_text, request_with
from pdserve.errors import InvalidRequest
from pdserve.request import Chat, ChatMessage, GenerateRequest, Input


def add_chat(parser: argparse.ArgumentParser) -> None:
    """How a conversation becomes a prompt."""
    parser.add_argument(
        "--template-var",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a variable for the chat template, VALUE as JSON or else a text: enable_thinking=false; repeatable",
    )
    parser.add_argument(
        "--parse-special-tokens",
        action="store_true",
        help="special tokens written in a user's message count as such, e.g. <|im_end|>; without it they are text",
    )


def chat_of(arguments: argparse.Namespace, messages: Sequence[ChatMessage]) -> Chat:
    """A conversation with what these flags say. Raises InvalidRequest."""
    return Chat(
        tuple(messages),
        template_kwargs_json=_template_kwargs_of(arguments),
        parse_special_tokens=arguments.parse_special_tokens,
    )


def _template_kwargs_of(arguments: argparse.Namespace) -> str:
    """All variables as one JSON object, "" if there are none. Raises InvalidRequest."""
    found: dict[str, object] = {}
    for given in arguments.template_var:
        name, equals, value = given.partition("=")
        if not equals:
            raise InvalidRequest("--template-var takes NAME=VALUE", value=given[:80])
        try:
            found[name] = json.loads(value)
        except (ValueError, RecursionError):
            found[name] = value
    return json.dumps(found) if found else ""


def request_of(arguments: argparse.Namespace) -> GenerateRequest:
    """The request of `pdserve generate`. Raises InvalidRequest; reads a file or standard input if asked to."""
    return request_with(arguments, _input_of(arguments))


def _input_of(arguments: argparse.Namespace) -> Input:
    if (arguments.prompt is None) == (arguments.token_ids_file is None):
        raise InvalidRequest("give a PROMPT or --token-ids-file, one of them")
    if arguments.token_ids_file is not None:
        if arguments.chat or arguments.system is not None:
            raise InvalidRequest("--chat and --system go with a PROMPT, not with --token-ids-file")
        return read_token_ids(arguments.token_ids_file)
    text = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    if not text:
        raise InvalidRequest("PROMPT must not be empty")
    if not arguments.chat:
        if arguments.system is not None:
            raise InvalidRequest("--system goes with --chat")
        if arguments.template_var:
            raise InvalidRequest("--template-var goes with --chat")
        if arguments.parse_special_tokens:
            raise InvalidRequest(
                "--parse-special-tokens goes with --chat: in a plain PROMPT they always count"
            )
        return text
    messages = [ChatMessage("user", text)]
    if arguments.system is not None:
        messages.insert(0, ChatMessage("system", arguments.system))
    return chat_of(arguments, messages)


def read_token_ids(path: Path) -> tuple[int, ...]:
    """A JSON list of ids from a file, or from standard input for "-"."""
    content = sys.stdin.read() if str(path) == "-" else read_text(path)
    try:
        ids = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{path} is not JSON: {error}") from error
    if (
        not isinstance(ids, list)
        or not ids
        or not all(type(each) is int and 0 <= each < 1 << 32 for each in ids)
    ):
        raise InvalidRequest(f"{path} must hold a JSON list of token ids, e.g. [1, 9690, 198]")
    return tuple(ids)
