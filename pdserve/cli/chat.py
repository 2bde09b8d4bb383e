"""`pdserve chat`: a conversation in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING

from pdserve.cli.request_flags import add_sampling, request_with
from pdserve.cli.target import add_target, open_client
from pdserve.errors import InvalidRequest, PdserveError
from pdserve.request import Chat, ChatMessage

if TYPE_CHECKING:
    from pdserve.client import Client

DESCRIPTION = """\
A conversation with the model in the terminal, through its own chat template.
  /reset   forget the conversation        /quit, Ctrl-D   end
  /help    this list                      Ctrl-C          stop the answer, keep what has come
"""
_HELP = "/reset forgets the conversation, /quit or Ctrl-D ends, Ctrl-C stops an answer"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Target, system message, sampling."""
    add_target(parser)
    parser.add_argument("--system", metavar="S", help="system message at the head of the conversation")
    add_sampling(parser)


def run(arguments: argparse.Namespace) -> int:
    """Talk until the input ends."""
    request_with(arguments, "x")  # refuse bad values before the first question
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")  # line editing and history for input(), where Python has it
    with open_client(arguments) as client:
        if not client.model().has_chat_template:
            raise InvalidRequest("this model has no chat template: use pdserve generate")
        Conversation(client, arguments, _ask, _say).run()
    return 0


class Conversation:
    """Messages so far, and the loop of questions and answers.

    ask  the next line of the user; raises EOFError at the end, KeyboardInterrupt on Ctrl-C
    say  writes text at once
    """

    def __init__(
        self,
        client: Client,
        arguments: argparse.Namespace,
        ask: Callable[[], str],
        say: Callable[[str], None],
    ) -> None:
        self._client = client
        self._arguments = arguments
        self._ask = ask
        self._say = say
        self._messages: list[ChatMessage] = []
        self._reset()

    def run(self) -> None:
        """Until the input ends or /quit."""
        while True:
            try:
                line = self._ask().strip()
            except EOFError:
                self._say("\n")
                return
            except KeyboardInterrupt:
                self._say(f"\n({_HELP})\n")
                continue
            if line == "/quit":
                return
            if line == "/reset":
                self._reset()
                self._say("(forgotten)\n")
            elif line.startswith("/"):
                self._say(f"({_HELP})\n")
            elif line:
                self._answer(line)

    def _answer(self, line: str) -> None:
        """One turn. A turn that fails is taken back, so that the user can try again."""
        said: list[str] = []
        try:
            self._messages.append(ChatMessage("user", line))
            self._stream(said)
        except KeyboardInterrupt:
            self._say(" (stopped)")
        except PdserveError as error:
            self._say(f"\nerror: {' '.join(str(error).split())}")
        self._say("\n")
        if said:
            self._messages.append(ChatMessage("assistant", "".join(said)))
        elif self._messages and self._messages[-1].role == "user":
            self._messages.pop()

    def _stream(self, said: list[str]) -> None:
        from pdserve.response import Tokens

        request = request_with(self._arguments, Chat(tuple(self._messages)))
        # closing: a stopped answer is cancelled at the router before the next question
        with closing(iter(self._client.generate(request))) as events:  # type: ignore[type-var]
            for event in events:
                if isinstance(event, Tokens):
                    said.append(event.text)
                    self._say(event.text)

    def _reset(self) -> None:
        system = self._arguments.system
        self._messages = [] if system is None else [ChatMessage("system", system)]


def _ask() -> str:
    if sys.stdin.isatty():
        return input("> ")
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
