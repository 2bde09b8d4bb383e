"""Values inside session messages, to protobuf and back.

Everything here that reads raises InvalidRequest for what must not be built: an unspecified enum, a missing part,
a length that doesn't fit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, TypeVar

from pdserve.errors import Failure, InvalidRequest
from pdserve.ids import Epoch, WorkerRef
from pdserve.messages import BlockCounts, Phase, Role, TokenLogprobs
from pdserve.rpc.params import params_from, params_to
from pdserve.rpc.v1 import inference_pb2 as ipb
from pdserve.rpc.v1 import session_pb2 as spb
from pdserve.sampling import FinishReason, SampleKey

E = TypeVar("E", bound=Enum)

HASH_BYTES = 16

ROLES = {spb.ROLE_PREFILL: Role.PREFILL, spb.ROLE_DECODE: Role.DECODE, spb.ROLE_BOTH: Role.BOTH}
PHASES = {
    spb.PHASE_QUEUED: Phase.QUEUED,
    spb.PHASE_PREFILLING: Phase.PREFILLING,
    spb.PHASE_PULLING: Phase.PULLING,
    spb.PHASE_RUNNING: Phase.RUNNING,
    spb.PHASE_PREEMPTED: Phase.PREEMPTED,
}
REASONS = {
    ipb.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    ipb.FINISH_REASON_EOS: FinishReason.EOS,
    ipb.FINISH_REASON_STOP_TOKEN: FinishReason.STOP_TOKEN,
    ipb.FINISH_REASON_STOP_TEXT: FinishReason.STOP_TEXT,
    ipb.FINISH_REASON_STRUCTURE: FinishReason.STRUCTURE,
}
ROLE_NUMBERS = {role: number for number, role in ROLES.items()}
PHASE_NUMBERS = {phase: number for number, phase in PHASES.items()}
REASON_NUMBERS = {reason: number for number, reason in REASONS.items()}


def role_from(number: int) -> Role:
    """Raises InvalidRequest for unspecified and unknown numbers."""
    return _enum(ROLES, number, "role")


def phase_from(number: int) -> Phase:
    """Raises InvalidRequest for unspecified and unknown numbers."""
    return _enum(PHASES, number, "phase")


def reason_from(number: int) -> FinishReason:
    """Raises InvalidRequest for unspecified and unknown numbers."""
    return _enum(REASONS, number, "finish_reason")


def _enum(known: Mapping[Any, E], number: int, name: str) -> E:
    value = known.get(number)
    if value is None:
        raise InvalidRequest("unspecified or unknown enum value", field=name, value=number)
    return value


def handle_from(handle: int) -> int:
    """A handle or lease id; 0 means none and is refused."""
    if handle == 0:
        raise InvalidRequest("a handle or lease id must not be 0")
    return handle


def seconds_from(value: float, name: str) -> float:
    """A finite number of seconds, 0 or more."""
    if not math.isfinite(value) or value < 0:
        raise InvalidRequest("want finite seconds, 0 or more", field=name, value=value)
    return value


def worker_to(worker: WorkerRef) -> spb.WorkerRef:
    return spb.WorkerRef(
        id=worker.id, epoch=spb.Epoch(start_ns=worker.epoch.start_ns, nonce=worker.epoch.nonce)
    )


def worker_from(msg: spb.WorkerRef) -> WorkerRef:
    """Raises InvalidRequest if the id is empty or the epoch missing."""
    if not msg.id or not msg.HasField("epoch"):
        raise InvalidRequest("a worker must be named by id and epoch", id=msg.id)
    return WorkerRef(msg.id, Epoch(msg.epoch.start_ns, msg.epoch.nonce))


def counts_to(counts: BlockCounts) -> ipb.BlockCounts:
    return ipb.BlockCounts(
        free=counts.free,
        granted=counts.granted,
        owned=counts.owned,
        cached=counts.cached,
        quarantined=counts.quarantined,
        promised=counts.promised,
    )


def counts_from(msg: ipb.BlockCounts) -> BlockCounts:
    return BlockCounts(msg.free, msg.granted, msg.owned, msg.cached, msg.quarantined, msg.promised)


def failure_to(failure: Failure) -> spb.Failure:
    return spb.Failure(error=failure.error, message=failure.message, fields=failure.fields)


def failure_from(msg: spb.Failure) -> Failure:
    """Raises InvalidRequest if it names no class, or has fields that no error of ours can have."""
    if not msg.error:
        raise InvalidRequest("a failure must name its class", text=msg.message)
    if "message" in msg.fields or "self" in msg.fields:
        raise InvalidRequest("a failure's field has a reserved name", error=msg.error)
    if "retry_after_s" in msg.fields:
        try:
            seconds_from(float(msg.fields["retry_after_s"]), "retry_after_s")
        except ValueError:
            raise InvalidRequest(
                "want finite seconds, 0 or more", field="retry_after_s", value=msg.fields["retry_after_s"]
            ) from None
    return Failure(msg.error, msg.message, dict(msg.fields))


def logprobs_to(logprobs: TokenLogprobs | None) -> ipb.TokenLogprobs | None:
    if logprobs is None:
        return None
    top = [ipb.Logprob(token_id=token_id, logprob=value) for token_id, value in logprobs.top]
    return ipb.TokenLogprobs(logprob=logprobs.logprob, top=top)


def logprobs_from(msg: ipb.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(msg.logprob, tuple((each.token_id, each.logprob) for each in msg.top))


def all_logprobs_to(logprobs: Sequence[TokenLogprobs]) -> list[ipb.TokenLogprobs]:
    return [each for each in map(logprobs_to, logprobs) if each is not None]


def all_logprobs_from(msgs: Iterable[ipb.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    return tuple(logprobs_from(msg) for msg in msgs)


def key_to(key: SampleKey) -> spb.Sampling:
    """`max_tokens` travels resolved; it is set even where the request left it open."""
    params = params_to(key.params)
    params.max_tokens = key.max_tokens
    return spb.Sampling(
        params=params,
        seed=key.seed,
        choice=key.choice,
        eos_token_ids=key.eos_token_ids,
        bad_word_ids=[ipb.TokenIds(ids=word) for word in key.bad_word_ids],
    )


def key_from(msg: spb.Sampling) -> SampleKey:
    """Raises InvalidRequest if max_tokens, temperature, top_k or top_p is missing: a router always resolves them."""
    params = msg.params
    for name in ("temperature", "top_k", "top_p", "max_tokens"):
        if not params.HasField(name):
            raise InvalidRequest("sampling between router and worker must be resolved", missing=name)
    return SampleKey(
        params=params_from(params),
        seed=msg.seed,
        choice=msg.choice,
        eos_token_ids=tuple(msg.eos_token_ids),
        max_tokens=params.max_tokens,
        bad_word_ids=tuple(_bad_word_from(word.ids) for word in msg.bad_word_ids),
    )


def _bad_word_from(ids: Sequence[int]) -> tuple[int, ...]:
    if not ids:
        raise InvalidRequest("a bad word without ids forbids nothing")
    return tuple(ids)


def hashes_from(joined: bytes) -> tuple[bytes, ...]:
    """Block hashes out of one run of bytes."""
    if len(joined) % HASH_BYTES:
        raise InvalidRequest("block hashes must be 16 bytes each", num_bytes=len(joined))
    return tuple(joined[at : at + HASH_BYTES] for at in range(0, len(joined), HASH_BYTES))
