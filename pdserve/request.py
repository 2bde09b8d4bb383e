"""Requests of the public service, validated where they enter; events of their streams are in response.py.

Whatever is refused is refused before any reservation, with InvalidRequest naming the field, the limit and the value.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

from pdserve.chat import Chat, ChatMessage, chat_from_proto, chat_to_proto
from pdserve.errors import InvalidRequest
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
from pdserve.rpc.made import made
from pdserve.rpc.params import params_to
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.rpc.values import REASONS
from pdserve.sampling import FinishReason, SamplingParams
from pdserve.sampling_checks import checked_ids, checked_params

__all__ = [
    "Chat", "ChatMessage", "Event", "Finished", "GenerateRequest", "Input", "Prompt", "Resume", "ResumeChoice",
    "Started", "Timings", "Tokens", "Usage", "chat_from_proto", "chat_to_proto", "event_from_proto", "event_to_proto",
]  # fmt: skip

MAX_PRIORITY = 1000
MAX_LABEL_CHARACTERS = 128
_ID = re.compile(r"[A-Za-z0-9._:-]{0,64}")

_DEFAULTS = SamplingParams()


Input = str | Chat | tuple[int, ...]
"""Text, a conversation, or token ids."""


@dataclass(frozen=True, slots=True)
class ResumeChoice:
    """What a client holds of one choice already."""

    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Resume:
    """What a client holds of a request whose router was lost; choices[i] is choice i."""

    seed: int
    choices: tuple[ResumeChoice, ...]

    @property
    def holds_tokens(self) -> bool:
        """Whether the client was given any token, hence all that comes before the first one."""
        return any(choice.token_ids or choice.finish_reason is not None for choice in self.choices)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One generation, valid but for what only the model can tell (window, vocabulary, template).

    seed None = the router draws one; n = choices; the higher priority goes first.
    best_of                 choices that are generated, the n most likely ones delivered; None = n
    echo                    the stream begins with the prompt
    truncate_prompt_tokens  keep only so many of the prompt's last tokens
    """

    input: Input
    request_id: str = ""
    model: str = ""
    sampling: SamplingParams = _DEFAULTS
    seed: int | None = None
    n: int = 1
    best_of: int | None = None
    echo: bool = False
    truncate_prompt_tokens: int | None = None
    priority: int = 0
    user: str = ""
    resume: Resume | None = None
    cache_salt: str = ""

    @property
    def num_generated_choices(self) -> int:
        """Choices that are run; n of them are delivered."""
        return self.n if self.best_of is None else self.best_of

    @property
    def prompt_logprobs(self) -> int | None:
        """Those to be made: asked for by name, or the logprobs of an echoed prompt. None = none."""
        asked = self.sampling.prompt_logprobs
        return self.sampling.logprobs if asked is None and self.echo else asked

    @classmethod
    def from_proto(cls, msg: pb.GenerateRequest, *, max_n: int = 1, vocab_size: int | None = None) -> Self:
        """Validate and take over.

        max_n       choices that this router can make of one request
        vocab_size  token ids must be below it, if given
        Raises InvalidRequest.
        """
        if not _ID.fullmatch(msg.request_id):
            raise InvalidRequest(
                "request_id must be 1 to 64 characters of [A-Za-z0-9._:-]", request_id=msg.request_id[:80]
            )
        truncate = msg.truncate_prompt_tokens if msg.HasField("truncate_prompt_tokens") else None
        if truncate == 0:
            raise InvalidRequest("truncate_prompt_tokens must be at least 1", value=0)
        if abs(msg.priority) > MAX_PRIORITY:
            raise InvalidRequest("priority out of range", limit=f"±{MAX_PRIORITY}", value=msg.priority)
        for name, label in (("user", msg.user), ("cache_salt", msg.cache_salt)):
            if len(label) > MAX_LABEL_CHARACTERS:
                raise InvalidRequest(f"{name} is too long", limit=MAX_LABEL_CHARACTERS, value=len(label))
        n = _n_from(msg.sampling, max_n)
        sampling = checked_params(msg.sampling, vocab_size)
        best_of = _best_of_from(msg.sampling, n, max_n)
        seed = msg.sampling.seed if msg.sampling.HasField("seed") else None
        resume = _resume_from(msg.resume, seed, n, sampling, vocab_size) if msg.HasField("resume") else None
        if best_of is not None and best_of > n and resume is not None and resume.holds_tokens:
            raise InvalidRequest(
                "best_of above n delivers nothing before its end: send it again with the seed, not to resume",
                limit=n,
                value=best_of,
            )
        return cls(
            input=_input_from(msg, vocab_size),
            request_id=msg.request_id,
            model=msg.model,
            sampling=sampling,
            seed=seed if resume is None else resume.seed,
            n=n,
            best_of=best_of,
            echo=msg.sampling.echo,
            truncate_prompt_tokens=truncate,
            priority=msg.priority,
            user=msg.user,
            resume=resume,
            cache_salt=msg.cache_salt,
        )

    def to_proto(self) -> pb.GenerateRequest:
        """The client's side: the router checks. Raises InvalidRequest by name for what no message can hold."""
        sampling = params_to(self.sampling)
        sampling.MergeFrom(
            made(
                pb.SamplingParams,
                echo=self.echo,
                seed=self.seed,
                n=None if self.n == 1 else self.n,
                best_of=self.best_of,
            )
        )
        return made(
            pb.GenerateRequest,
            request_id=self.request_id,
            model=self.model,
            sampling=sampling,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            priority=self.priority,
            user=self.user,
            cache_salt=self.cache_salt,
            text=self.input if isinstance(self.input, str) else None,
            chat=chat_to_proto(self.input) if isinstance(self.input, Chat) else None,
            token_ids=made(pb.TokenIds, ids=self.input) if isinstance(self.input, tuple) else None,
            resume=None if self.resume is None else _resume_to(self.resume),
        )


def _input_from(msg: pb.GenerateRequest, vocab_size: int | None) -> Input:
    match msg.WhichOneof("input"):
        case "text":
            if not msg.text:
                raise InvalidRequest("text must not be empty")
            return msg.text
        case "chat":
            return chat_from_proto(msg.chat)
        case "token_ids":
            if not msg.token_ids.ids:
                raise InvalidRequest("token_ids must not be empty")
            return checked_ids(msg.token_ids.ids, "token_ids", vocab_size)
        case _:
            raise InvalidRequest("a request needs exactly one of text, chat, token_ids")


def _n_from(msg: pb.SamplingParams, max_n: int) -> int:
    n = msg.n if msg.HasField("n") else 1
    if not 1 <= n <= max_n:
        raise InvalidRequest("n out of range", limit=f"1 to {max_n}", value=n)
    return n


def _best_of_from(msg: pb.SamplingParams, n: int, max_n: int) -> int | None:
    if not msg.HasField("best_of"):
        return None
    if not n <= msg.best_of <= max_n:
        raise InvalidRequest("best_of out of range", limit=f"{n} (n) to {max_n}", value=msg.best_of)
    if msg.best_of > n and msg.HasField("temperature") and msg.temperature == 0:
        raise InvalidRequest("best_of above n needs a temperature above 0", limit=n, value=msg.best_of)
    return msg.best_of


def _resume_from(
    msg: pb.Resume, seed: int | None, n: int, sampling: SamplingParams, vocab_size: int | None
) -> Resume:
    # Routers never draw 0, so 0 without the same seed in `sampling` can only mean that it was left out.
    if msg.seed == 0 and seed is None:
        raise InvalidRequest("resume needs the seed that `started` told")
    if seed is not None and seed != msg.seed:
        raise InvalidRequest("resume has another seed than sampling", limit=seed, value=msg.seed)
    if len(msg.choices) > n:
        raise InvalidRequest("resume has more choices than the request", limit=n, value=len(msg.choices))
    choices = []
    for each in msg.choices:
        if sampling.max_tokens is not None and len(each.token_ids) > sampling.max_tokens:
            raise InvalidRequest(
                "resume holds more tokens than max_tokens",
                limit=sampling.max_tokens,
                value=len(each.token_ids),
            )
        reason = REASONS.read(each.finish_reason) if each.HasField("finish_reason") else None
        choices.append(ResumeChoice(checked_ids(each.token_ids, "resume.token_ids", vocab_size), reason))
    choices += [ResumeChoice()] * (n - len(choices))
    return Resume(msg.seed, tuple(choices))


def _resume_to(resume: Resume) -> pb.Resume:
    choices = [
        made(
            pb.ResumeChoice,
            token_ids=each.token_ids,
            finish_reason=None if each.finish_reason is None else REASONS.write(each.finish_reason),
        )
        for each in resume.choices
    ]
    return made(pb.Resume, seed=resume.seed, choices=choices)
