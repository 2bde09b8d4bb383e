"""What a request's stream says: started, prompt, tokens, finished. The same classes in the router and in the client."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.rpc.codec import OneOf
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.sampling import FinishReason, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The request was accepted; `seed` is the one in use, also if the router drew it."""

    request_id: str
    seed: int
    num_prompt_tokens: int
    num_cached_tokens: int
    prompt_token_ids: tuple[int, ...]
    model: str


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

    @property
    def ttft_parts_ms(self) -> dict[str, float]:
        """What ttft_ms is the sum of, in order."""
        names = ("queue", "reserve", "dispatch", "prefill_queue", "prefill", "relay", "rest")
        return {name: getattr(self, f"{name}_ms") for name in names}


@dataclass(frozen=True, slots=True)
class Energy:
    """Joules of one choice; None where the machine can't tell, and no Energy at all if it can tell neither."""

    prefill_j: float | None = None
    decode_j: float | None = None


def known_energy(prefill_j: float | None, decode_j: float | None) -> Energy | None:
    """Of what is known."""
    return None if prefill_j is None and decode_j is None else Energy(prefill_j, decode_j)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The normal end of one choice."""

    choice: int
    reason: FinishReason
    usage: Usage
    timings: Timings
    num_attempts: int
    prefill_worker: str = ""
    decode_worker: str = ""
    kv_bytes: int = 0
    transport: str = ""
    energy: Energy | None = None


Event = Started | Prompt | Tokens | Finished

_events: OneOf[Event] = OneOf(Event, pb.GenerateResponse)
event_to_proto = _events.write
event_from_proto = _events.read
"""None for an event of a later version. Raises InvalidRequest."""
