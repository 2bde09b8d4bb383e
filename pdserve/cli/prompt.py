"""What a user typed → a GenerateRequest."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from pdserve.cli.request_flags import read_text, request_with
from pdserve.errors import InvalidRequest
from pdserve.request import Chat, ChatMessage, GenerateRequest, Input


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
        return text
    messages = [ChatMessage("user", text)]
    if arguments.system is not None:
        messages.insert(0, ChatMessage("system", arguments.system))
    return Chat(tuple(messages))


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
