"""What a request's stream says: started, prompt, tokens, finished. The same classes in the router and in the client."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Self

from pdserve.errors import InvalidRequest
from pdserve.messages import TokenLogprobs
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.rpc.values import REASON_NUMBERS, all_logprobs_from, all_logprobs_to, reason_from
from pdserve.sampling import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The request was accepted; `seed` is the one in use, also if the router drew it."""

    request_id: str
    seed: int
    num_prompt_tokens: int
    num_cached_tokens: int
    prompt_token_ids: tuple[int, ...]
    model: str

    @classmethod
    def from_proto(cls, msg: pb.Started) -> Self:
        """The client's side."""
        return cls(
            request_id=msg.request_id,
            seed=msg.seed,
            num_prompt_tokens=msg.num_prompt_tokens,
            num_cached_tokens=msg.num_cached_tokens,
            prompt_token_ids=tuple(msg.prompt_token_ids),
            model=msg.model,
        )

    def to_proto(self) -> pb.Started:
        """The router's side."""
        return pb.Started(
            request_id=self.request_id,
            seed=self.seed,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            prompt_token_ids=self.prompt_token_ids,
            model=self.model,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A part of the prompt, before the first tokens: only with echo or prompt logprobs. The parts make up the whole.

    text      with echo: the whole prompt's, in the part that begins at index 0
    logprobs  with prompt logprobs: one a token, but none for the token of index 0
    """

    first_index: int
    token_ids: tuple[int, ...]
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()

    @classmethod
    def from_proto(cls, msg: pb.Prompt) -> Self:
        """The client's side."""
        return cls(
            first_index=msg.first_index,
            token_ids=tuple(msg.token_ids),
            text=msg.text,
            logprobs=all_logprobs_from(msg.logprobs),
        )

    def to_proto(self) -> pb.Prompt:
        """The router's side."""
        return pb.Prompt(
            first_index=self.first_index,
            token_ids=self.token_ids,
            text=self.text,
            logprobs=all_logprobs_to(self.logprobs),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Tokens of one choice; token_ids[0] has index `first_index` in its output, from 0.

    text is what is certain so far: it may lag behind the ids while a character or a stop string is incomplete.
    logprobs: one a token if they were asked for, else none.
    """

    choice: int
    first_index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()

    @classmethod
    def from_proto(cls, msg: pb.Tokens) -> Self:
        """The client's side."""
        return cls(
            choice=msg.choice,
            first_index=msg.first_index,
            token_ids=tuple(msg.token_ids),
            text=msg.text,
            logprobs=all_logprobs_from(msg.logprobs),
        )

    def to_proto(self) -> pb.Tokens:
        """The router's side."""
        return pb.Tokens(
            choice=self.choice,
            first_index=self.first_index,
            token_ids=self.token_ids,
            text=self.text,
            logprobs=all_logprobs_to(self.logprobs),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Counts of one choice; cached = prompt tokens that weren't computed for it."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_completion_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Where the time went, in milliseconds: ttft = queue + reserve + dispatch + prefill queue + prefill + relay +
    rest. inference.proto says from when to when each of them runs."""

    ttft_ms: float = 0.0
    queue_ms: float = 0.0
    reserve_ms: float = 0.0
    dispatch_ms: float = 0.0
    prefill_queue_ms: float = 0.0
    prefill_ms: float = 0.0
    relay_ms: float = 0.0
    rest_ms: float = 0.0
    first_gap_ms: float = 0.0
    transfer_exposed_ms: float = 0.0
    commit_ms: float = 0.0
    decode_queue_ms: float = 0.0
    decode_step_ms: float = 0.0
    itl_p50_ms: float = 0.0
    itl_p99_ms: float = 0.0
    total_ms: float = 0.0


_TIMINGS = tuple(field.name for field in dataclasses.fields(Timings))


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The normal end of one choice. `energy_j` values are None where the machine can't tell."""

    choice: int
    reason: FinishReason
    usage: Usage
    timings: Timings
    num_attempts: int
    prefill_worker: str = ""
    decode_worker: str = ""
    kv_bytes: int = 0
    transport: str = ""
    prefill_energy_j: float | None = None
    decode_energy_j: float | None = None

    @classmethod
    def from_proto(cls, msg: pb.Finished) -> Self:
        """The client's side. Raises InvalidRequest for an unspecified reason."""
        energy = msg.energy
        return cls(
            choice=msg.choice,
            reason=reason_from(msg.reason),
            usage=Usage(
                num_prompt_tokens=msg.usage.num_prompt_tokens,
                num_cached_tokens=msg.usage.num_cached_tokens,
                num_completion_tokens=msg.usage.num_completion_tokens,
            ),
            timings=Timings(**{name: getattr(msg.timings, name) for name in _TIMINGS}),
            num_attempts=msg.num_attempts,
            prefill_worker=msg.prefill_worker,
            decode_worker=msg.decode_worker,
            kv_bytes=msg.kv_bytes,
            transport=msg.transport,
            prefill_energy_j=energy.prefill_j if energy.HasField("prefill_j") else None,
            decode_energy_j=energy.decode_j if energy.HasField("decode_j") else None,
        )

    def to_proto(self) -> pb.Finished:
        """The router's side; energy is absent if neither part is known."""
        known = self.prefill_energy_j is not None or self.decode_energy_j is not None
        energy = pb.Energy(prefill_j=self.prefill_energy_j, decode_j=self.decode_energy_j) if known else None
        return pb.Finished(
            choice=self.choice,
            reason=REASON_NUMBERS[self.reason],
            usage=pb.Usage(
                num_prompt_tokens=self.usage.num_prompt_tokens,
                num_cached_tokens=self.usage.num_cached_tokens,
                num_completion_tokens=self.usage.num_completion_tokens,
            ),
            timings=pb.Timings(**{name: getattr(self.timings, name) for name in _TIMINGS}),
            num_attempts=self.num_attempts,
            prefill_worker=self.prefill_worker,
            decode_worker=self.decode_worker,
            kv_bytes=self.kv_bytes,
            transport=self.transport,
            energy=energy,
        )


Event = Started | Prompt | Tokens | Finished


def event_to_proto(event: Event) -> pb.GenerateResponse:
    """One message of the stream."""
    match event:
        case Tokens():
            return pb.GenerateResponse(tokens=event.to_proto())
        case Started():
            return pb.GenerateResponse(started=event.to_proto())
        case Finished():
            return pb.GenerateResponse(finished=event.to_proto())
        case Prompt():
            return pb.GenerateResponse(prompt=event.to_proto())


def event_from_proto(msg: pb.GenerateResponse) -> Event:
    """Raises InvalidRequest for an empty message, or one of a later version."""
    match msg.WhichOneof("event"):
        case "tokens":
            return Tokens.from_proto(msg.tokens)
        case "started":
            return Started.from_proto(msg.started)
        case "finished":
            return Finished.from_proto(msg.finished)
        case "prompt":
            return Prompt.from_proto(msg.prompt)
        case _:
            raise InvalidRequest("an empty event, or one of a later version, came from the router")
