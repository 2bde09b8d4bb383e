"""`pdserve generate`: one answer."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from pdserve.cli.prompt import add_chat, request_of
from pdserve.cli.request_flags import add_answer, add_sampling
from pdserve.cli.target import add_target, open_client

DESCRIPTION = """\
Sends one prompt to a running cluster and prints the text as it comes; with --json one object at the end: request_id,
prompt_token_ids, token_ids, text, finish_reason, usage, timings (ms), attempts, and the workers that did it; of several
answers the first one's, and all of them under `choices`.
PROMPT is continued as it stands; with --chat it is a user's message, put through the model's own chat template.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Target, prompt, sampling."""
    add_target(parser)
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="the text; - reads standard input")
    parser.add_argument(
        "--token-ids-file", type=Path, metavar="F", help="token ids instead: a JSON list; - = stdin"
    )
    parser.add_argument("--chat", action="store_true", help="PROMPT is a user's message in a chat")
    parser.add_argument("--system", metavar="S", help="system message before it, with --chat")
    add_chat(parser)
    parser.add_argument("--deadline-s", type=float, metavar="S", help="give up after so many seconds")
    parser.add_argument(
        "--json", action="store_true", help="one JSON object at the end, no text while it is made"
    )
    add_sampling(parser)
    add_answer(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the answer. Ctrl-C cancels the request."""
    request = request_of(arguments)
    from pdserve.cli.answer import Answer

    answer = Answer(request.n)
    with open_client(arguments) as client:
        for event in client.generate(request, deadline_s=arguments.deadline_s):
            text = answer.add(event)
            if text and not arguments.json:
                sys.stdout.write(text)
                sys.stdout.flush()
    if arguments.json:
        print(json.dumps(answer.to_json(), ensure_ascii=False))
    elif not answer.ends_line:
        print()
    return 0
