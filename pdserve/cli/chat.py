"""`pdserve chat`: a conversation in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
from collections.abc import Callable
from contextlib import closing
from difflib import get_close_matches
from typing import TYPE_CHECKING

from pdserve.cli.prompt import add_chat, chat_of
from pdserve.cli.request_flags import add_sampling, request_with
from pdserve.cli.target import add_target, open_client
from pdserve.errors import InvalidRequest, PdserveError
from pdserve.request import Chat, ChatMessage

if TYPE_CHECKING:
    from pdserve.client import Client

DESCRIPTION = """\
A conversation with the model in the terminal, through its own chat template. Pasted text of several lines is one
message; a question may begin with a slash, too.
  /reset   forget the conversation        /quit, Ctrl-D   end
  /drop    forget its oldest turn         Ctrl-C          stop the answer, keep what has come
  /help    this list
"""
_HELP = "/reset forgets the conversation, /drop its oldest turn, /quit or Ctrl-D ends, Ctrl-C stops an answer"
_COMMANDS = ("/reset", "/drop", "/help", "/quit")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Target, system message, sampling."""
    add_target(parser)
    parser.add_argument("--system", metavar="S", help="system message at the head of the conversation")
    add_chat(parser)
    add_sampling(parser)


def run(arguments: argparse.Namespace) -> int:
    """Talk until the input ends."""
    request_with(arguments, "x")  # refuse bad values before the first question
    chat_of(arguments, ())
    with open_client(arguments) as client:
        model = client.model()
        if not model.has_chat_template:
            raise InvalidRequest("this model has no chat template: use pdserve generate")
        at_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        if at_terminal:
            _use_line_editor()
            _say(f"{model.model}, up to {model.window_tokens:,} tokens in a conversation ({_HELP})\n")
        Conversation(client, model.window_tokens, arguments, _ask, _say, shows_use=at_terminal).run()
    return 0


class Conversation:
    """Messages so far, and the loop of questions and answers.

    window_tokens  what fits into the model
    ask            the user's next text; raises EOFError at the end, KeyboardInterrupt on Ctrl-C
    say            writes text at once
    shows_use      say behind each answer how much of the window is used
    """

    def __init__(
        self,
        client: Client,
        window_tokens: int,
        arguments: argparse.Namespace,
        ask: Callable[[], str],
        say: Callable[[str], None],
        *,
        shows_use: bool = False,
    ) -> None:
        self._client = client
        self._window_tokens = window_tokens
        self._arguments = arguments
        self._ask = ask
        self._say = say
        self._shows_use = shows_use
        self._system = () if arguments.system is None else (ChatMessage("system", arguments.system),)
        self._turns: list[tuple[ChatMessage, ...]] = []  # question and answer
        self._too_long = ""  # a question that didn't fit, until it is asked again or another one is

    def run(self) -> None:
        """Until the input ends or /quit."""
        while True:
            try:
                text = self._ask().rstrip()
            except EOFError:
                self._say("\n")
                return
            except KeyboardInterrupt:
                self._say(f"\n({_HELP})\n")
                continue
            match text:
                case "":
                    pass
                case "/quit":
                    return
                case "/help":
                    self._say(f"({_HELP})\n")
                case "/reset":
                    self._turns, self._too_long = [], ""
                    self._say("(forgotten)\n")
                case "/drop":
                    self._drop()
                case _ if meant := _mistyped(text):
                    self._say(f"(did you mean {meant}? {_HELP})\n")
                case _:
                    self._answer(text)

    def _answer(self, question: str) -> None:
        """One turn. A turn that fails is taken back, so that the user can try again."""
        said: list[str] = []
        self._too_long = ""
        used = 0
        try:
            used = self._stream(question, said)
        except KeyboardInterrupt:
            self._say(" (stopped)")
        except InvalidRequest as error:
            if self._fits(question):
                self._say_error(error)
            else:
                self._too_long = question
                self._say(self._no_room())
        except PdserveError as error:
            self._say_error(error)
        self._say("\n")
        if said:
            self._turns.append((ChatMessage("user", question), ChatMessage("assistant", "".join(said))))
        if used >= self._window_tokens:
            self._say(f"{self._no_room()}\n")
        elif used and self._shows_use:
            self._say(f"({used:,} of {self._window_tokens:,} tokens)\n")

    def _stream(self, question: str, said: list[str]) -> int:
        """Show the answer as it comes, and gather it; the tokens of the conversation so far."""
        from pdserve.response import Finished, Tokens

        used = 0
        request = request_with(self._arguments, self._chat(question))
        # closing: a stopped answer is cancelled at the router before the next question
        with closing(iter(self._client.generate(request))) as events:  # type: ignore[type-var]
            for event in events:
                if isinstance(event, Tokens):
                    said.append(event.text)
                    self._say(event.text)
                elif isinstance(event, Finished):
                    used = event.usage.num_prompt_tokens + event.usage.num_completion_tokens
        return used

    def _drop(self) -> None:
        """Forget the oldest turn; with a question that didn't fit, so many that it does, and ask it."""
        if not self._turns:
            self._say("(there is no turn to forget)\n")
            return
        num_before = len(self._turns)
        question = self._too_long
        del self._turns[0]
        while question and self._turns and not self._fits(question):
            del self._turns[0]
        num_left = len(self._turns)
        self._say(f"({_turns(num_before - num_left)} forgotten, {num_left} left)\n")
        if question:
            self._answer(question)

    def _chat(self, question: str) -> Chat:
        turns = (message for turn in self._turns for message in turn)
        return chat_of(self._arguments, (*self._system, *turns, ChatMessage("user", question)))

    def _fits(self, question: str) -> bool:
        """Whether there is room for the answer: all that was asked for, or one token."""
        try:
            num_tokens = len(self._client.tokenize(self._chat(question)))
        except PdserveError:
            return True  # then that isn't what is wrong
        return num_tokens + (self._arguments.max_tokens or 1) <= self._window_tokens

    def _no_room(self) -> str:
        return (
            f"(the conversation fills the model's {self._window_tokens:,} tokens: /drop forgets its oldest turn"
            f"{' and asks again' if self._too_long else ''}, /reset all of it)"
        )

    def _say_error(self, error: PdserveError) -> None:
        self._say(f"\nerror: {' '.join(str(error).split())}")


def _mistyped(text: str) -> str:
    """The command that a text was meant to be, "" if it is a question, be it about a path."""
    word = text.strip()
    if not word.startswith("/") or len(word.split()) > 1 or "/" in word[1:]:
        return ""
    return next(iter(get_close_matches(word, _COMMANDS, 1)), "")


def _turns(count: int) -> str:
    return "1 turn" if count == 1 else f"{count} turns"


def _use_line_editor() -> None:
    """Line editing and history for input(), where Python has it; a paste comes in one piece where that is GNU's."""
    with contextlib.suppress(ImportError):
        readline = importlib.import_module("readline")
        readline.parse_and_bind("set enable-bracketed-paste on")


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
