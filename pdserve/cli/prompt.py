"""What a user typed → a GenerateRequest."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from pdserve.errors import InvalidRequest
from pdserve.request import Chat, ChatMessage, GenerateRequest, Input
from pdserve.sampling import SamplingParams


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """How tokens are chosen and when the text ends. What isn't given is the router's default."""
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--max-tokens", type=int, metavar="N", help="most tokens to generate (default: what is left)"
    )
    group.add_argument("--temperature", type=float, default=1.0, metavar="F", help="0 = greedy (default 1)")
    group.add_argument(
        "--top-k", type=int, default=0, metavar="N", help="only the N most likely (default 0 = off)"
    )
    group.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="F",
        help="only the most likely of this sum (default 1 = off)",
    )
    group.add_argument("--seed", type=int, metavar="N", help="equal seeds give equal text (default: drawn)")
    group.add_argument(
        "--stop", action="append", default=[], metavar="S", help="end before this text; repeatable"
    )
    group.add_argument("--ignore-eos", action="store_true", help="go on behind the end-of-sequence token")


def sampling_of(arguments: argparse.Namespace) -> SamplingParams:
    """Values are checked by the router; here only what the wire can't carry."""
    for name in ("max_tokens", "top_k", "seed"):
        value = getattr(arguments, name)
        bits = 64 if name == "seed" else 32
        if value is not None and not 0 <= value < 1 << bits:
            raise InvalidRequest(
                f"--{name.replace('_', '-')} out of range", limit=f"0 to 2^{bits} - 1", value=value
            )
    return SamplingParams(
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        max_tokens=arguments.max_tokens,
        stop=tuple(unicode_of(text, "--stop") for text in arguments.stop),
        ignore_eos=arguments.ignore_eos,
    )


def request_of(arguments: argparse.Namespace) -> GenerateRequest:
    """The request of `pdserve generate`. Raises InvalidRequest; reads a file or standard input if asked to."""
    return GenerateRequest(input=_input_of(arguments), sampling=sampling_of(arguments), seed=arguments.seed)


def unicode_of(text: str, where: str) -> str:
    """Text of the command line that is not UTF-8 arrives with surrogates, which can't be sent."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(f"{where} is not valid UTF-8") from None
    return text


def _input_of(arguments: argparse.Namespace) -> Input:
    if (arguments.prompt is None) == (arguments.token_ids_file is None):
        raise InvalidRequest("give a PROMPT or --token-ids-file, one of them")
    if arguments.token_ids_file is not None:
        if arguments.chat or arguments.system is not None:
            raise InvalidRequest("--chat and --system go with a PROMPT, not with --token-ids-file")
        return read_token_ids(arguments.token_ids_file)
    text = unicode_of(sys.stdin.read() if arguments.prompt == "-" else arguments.prompt, "PROMPT")
    if not text:
        raise InvalidRequest("PROMPT must not be empty")
    if not arguments.chat:
        if arguments.system is not None:
            raise InvalidRequest("--system goes with --chat")
        return text
    messages = [ChatMessage("user", text)]
    if arguments.system is not None:
        messages.insert(0, ChatMessage("system", unicode_of(arguments.system, "--system")))
    return Chat(tuple(messages))


def read_token_ids(path: Path) -> tuple[int, ...]:
    """A JSON list of ids from a file, or from standard input for "-"."""
    try:
        content = sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"{path} can't be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{path} is not UTF-8") from error
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
