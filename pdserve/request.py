"""Requests of the public service and their rules; events of their streams are in response.py.

Protobuf, HTTP and Python clients make a GenerateRequest, which is then checked: what is refused is refused before any
reservation, with InvalidRequest naming the field, the limit and the value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from pdserve.chat import Chat, ChatMessage, chat_from_proto, chat_to_proto, check_chat
from pdserve.errors import InvalidRequest, too_large
from pdserve.fields import UINT32, UINT64, check_fields, check_unicode, fields_of, plain_id, setting
from pdserve.response import (
    Event,
    Finished,
    Prompt,
    Started,
    Timings,
    Tokens,
    Usage,
    event_from_proto,
    event_to_proto,
)
from pdserve.rpc.codec import compile_converter
from pdserve.rpc.params import check_counts, params_from, params_to, read, written
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.sampling import FinishReason, SamplingParams

__all__ = [
    "Chat", "ChatMessage", "Event", "Finished", "GenerateRequest", "Input", "Limits", "Prompt", "Resume",
    "ResumeChoice", "Started", "Timings", "Tokens", "Usage", "chat_from_proto", "chat_to_proto", "event_from_proto",
    "event_to_proto",
]  # fmt: skip

MAX_CHOICES = 64  # of one request

_DEFAULTS = SamplingParams()


Input = str | Chat | tuple[int, ...]
"""Text, a conversation, or token ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What only the model can tell. None = not known here: whoever knows checks it later."""

    vocab_size: int | None = None
    window_tokens: int | None = None

    def check_fits(self, num_prompt_tokens: int, max_tokens: int | None) -> None:
        """Raises InvalidRequest if a prompt and its output don't fit the window."""
        needed = num_prompt_tokens + (max_tokens or 1)
        if self.window_tokens is not None and needed > self.window_tokens:
            raise InvalidRequest(
                "prompt and max_tokens don't fit the window",
                limit=self.window_tokens,
                value=needed,
                num_prompt_tokens=num_prompt_tokens,
                max_tokens="unset" if max_tokens is None else max_tokens,
            )

    def check_messages(self, num_messages: int) -> None:
        """Raises InvalidRequest for a chat of more messages than the window holds tokens, whatever they say."""
        if self.window_tokens is not None and num_messages > self.window_tokens:
            raise too_large(
                "messages",
                "more chat messages than the window holds tokens",
                limit=self.window_tokens,
                value=num_messages,
            )

    def check_held(self, num_tokens: int, max_tokens: int | None) -> None:
        """Raises InvalidRequest if a client holds more output than its request may have."""
        bounds = [bound for bound in (max_tokens, self.window_tokens) if bound is not None]
        if bounds and num_tokens > min(bounds):
            raise InvalidRequest(
                "resume holds more tokens than the request may have", limit=min(bounds), value=num_tokens
            )

    def check_ids(self, name: str, ids: Sequence[int]) -> None:
        """Raises InvalidRequest for an id outside the vocabulary."""
        most = UINT32 if self.vocab_size is None else self.vocab_size - 1
        for worst in (min(ids, default=0), max(ids, default=0)):
            if not 0 <= worst <= most:
                raise InvalidRequest(f"{name} holds an id outside the vocabulary", limit=most, value=worst)


@dataclass(frozen=True, slots=True)
class ResumeChoice:
    """What a client holds of one choice already."""

    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Resume:
    """What a client holds of a request whose router was lost.

    choices  [i] is choice i; of those left out it holds nothing
    """

    seed: int
    choices: tuple[ResumeChoice, ...]

    @property
    def holds_tokens(self) -> bool:
        """Whether the client was given any token, hence all that comes before the first one."""
        return any(choice.token_ids or choice.finish_reason is not None for choice in self.choices)

    def choice(self, index: int) -> ResumeChoice:
        """What is held of that choice."""
        return self.choices[index] if index < len(self.choices) else ResumeChoice()


_RESUME = compile_converter(Resume, pb.Resume)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One generation.

    seed None = the router draws one; n = choices; the higher priority goes first.
    best_of                 choices that are generated, the n most likely ones delivered; None = n
    echo                    the stream begins with the prompt
    truncate_prompt_tokens  keep only so many of the prompt's last tokens
    """

    input: Input
    request_id: str = setting("", "name of the request", verify=plain_id, means="drawn by the router")
    model: str = setting("", "the model it asks for", means="the one that is served")
    sampling: SamplingParams = _DEFAULTS
    seed: int | None = setting(None, "equal seeds give equal text", least=0, most=UINT64, means="drawn")
    n: int = setting(1, "so many answers", least=1, most=MAX_CHOICES)
    best_of: int | None = setting(
        None, "generate so many, give the n most likely ones at the end", least=1, most=MAX_CHOICES, means="n"
    )
    echo: bool = setting(False, "begin with the prompt")
    truncate_prompt_tokens: int | None = setting(
        None, "use only the prompt's last N tokens", least=1, most=UINT32, means="all of them"
    )
    priority: int = setting(0, "the higher goes first", least=-1000, most=1000)
    user: str = setting("", "who asks", characters=(0, 128))
    resume: Resume | None = None
    cache_salt: str = setting("", "prefix cache entries are shared between equal salts", characters=(0, 128))

    @property
    def num_generated_choices(self) -> int:
        """Choices that are run; n of them are delivered."""
        return self.n if self.best_of is None else self.best_of

    @property
    def prompt_logprobs(self) -> int | None:
        """Those to be made: asked for by name, or the logprobs of an echoed prompt. None = none."""
        asked = self.sampling.prompt_logprobs
        return self.sampling.logprobs if asked is None and self.echo else asked

    def check(self, limits: Limits) -> None:
        """Every rule but those that need the prompt's tokens, or a compiled structure.

        Raises InvalidRequest naming the field, the limit and the value.
        """
        check_fields(self)
        self.sampling.check()
        self._check_input(limits)
        if self.best_of is not None and self.best_of != self.n:
            self._check_best_of(self.best_of)
        if self.resume is not None:
            self._check_resume(self.resume, limits)
        self.check_ids(limits)

    def check_ids(self, limits: Limits) -> None:
        """The part of `check` that needs the vocabulary."""
        if isinstance(self.input, tuple):
            limits.check_ids("token_ids", self.input)
        for field in fields_of(SamplingParams):
            if field.item in (int, tuple):
                given = getattr(self.sampling, field.name)
                limits.check_ids(field.name, [each for each, _ in given] if field.item is tuple else given)
        for choice in () if self.resume is None else self.resume.choices:
            limits.check_ids("resume.token_ids", choice.token_ids)

    def _check_input(self, limits: Limits) -> None:
        if isinstance(self.input, Chat):
            if self.truncate_prompt_tokens is None:
                limits.check_messages(len(self.input.messages))
            check_chat(self.input)
        elif not isinstance(self.input, str | tuple):
            raise InvalidRequest(
                "input must be a text, a Chat or a tuple of token ids", value=type(self.input)
            )
        elif not self.input:
            name = "text" if isinstance(self.input, str) else "token_ids"
            raise InvalidRequest(f"{name} must not be empty")
        elif isinstance(self.input, str):
            check_unicode("text", self.input)
        elif self.truncate_prompt_tokens is None:
            limits.check_fits(len(self.input), self.sampling.max_tokens)

    def _check_best_of(self, best_of: int) -> None:
        if best_of < self.n:
            raise InvalidRequest("best_of must not be below n", limit=self.n, value=best_of)
        if self.sampling.temperature == 0:
            raise InvalidRequest("best_of above n needs a temperature above 0", limit=self.n, value=best_of)
        if self.resume is not None and self.resume.holds_tokens:
            raise InvalidRequest(
                "best_of above n can't be resumed: send the request again with the seed",
                limit=self.n,
                value=best_of,
            )

    def _check_resume(self, resume: Resume, limits: Limits) -> None:
        # Routers never draw 0, so 0 without the same seed beside it can only mean that it was left out.
        if resume.seed == 0 and self.seed is None:
            raise InvalidRequest("resume needs the seed from `started`")
        if self.seed not in (None, resume.seed):
            raise InvalidRequest(
                "resume's seed is not the one in sampling", limit=self.seed, value=resume.seed
            )
        if not 0 <= resume.seed <= UINT64:
            raise InvalidRequest("resume.seed out of range", limit="0 to 2^64 - 1", value=resume.seed)
        _check_num_held(len(resume.choices), self.n)
        for choice in resume.choices:
            limits.check_held(len(choice.token_ids), self.sampling.max_tokens)

    @classmethod
    def from_proto(cls, msg: pb.GenerateRequest, limits: Limits) -> Self:
        """As it stands; the rules are `check`'s, which must follow.

        Raises InvalidRequest for what this class can't hold, and for lists that are too long, before they are read.
        """
        check_counts(msg.sampling)
        return cls(
            input=_input_from(msg, limits),
            sampling=params_from(msg.sampling),
            resume=_resume_from(msg, limits) if msg.HasField("resume") else None,
            **read(cls, msg, msg.sampling),
        )

    def to_proto(self) -> pb.GenerateRequest:
        """Of a request that was checked."""
        fields = written(self, pb.GenerateRequest)
        match self.input:
            case str():
                fields["text"] = self.input
            case Chat():
                fields["chat"] = chat_to_proto(self.input)
            case _:
                fields["token_ids"] = pb.TokenIds(ids=self.input)
        return pb.GenerateRequest(
            sampling=params_to(self.sampling, **written(self, pb.SamplingParams)),
            resume=None if self.resume is None else _RESUME.write(self.resume),
            **fields,
        )


def _check_num_held(num_choices: int, n: int) -> None:
    if num_choices > n:
        raise InvalidRequest("resume has more choices than the request", limit=n, value=num_choices)


def _input_from(msg: pb.GenerateRequest, limits: Limits) -> Input:
    match msg.WhichOneof("input"):
        case "text":
            return msg.text
        case "chat":
            if not msg.HasField("truncate_prompt_tokens"):
                limits.check_messages(len(msg.chat.messages))
            return chat_from_proto(msg.chat)
        case "token_ids":
            ids = msg.token_ids.ids
            keep = len(ids)
            if msg.HasField("truncate_prompt_tokens"):
                keep = min(keep, msg.truncate_prompt_tokens)
            limits.check_fits(keep, None)
            return tuple(ids[-keep:]) if keep else ()
        case _:
            raise InvalidRequest("a request needs exactly one of text, chat, token_ids")


def _resume_from(msg: pb.GenerateRequest, limits: Limits) -> Resume:
    held = msg.resume.choices
    _check_num_held(len(held), min(msg.sampling.n or 1, MAX_CHOICES))
    for each in held:
        limits.check_held(len(each.token_ids), None)
    return _RESUME.read(msg.resume)
