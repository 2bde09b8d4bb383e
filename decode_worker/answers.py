"""The messages that say how an attempt stands, from the attempt's own figures."""

from __future__ import annotations

from decode_worker.attempt import DecodeAttempt
from kv_transfer.messages import HandedOff
from pdserve.engine.events import Sampled
from pdserve.messages import DecodeStarted, SequenceFinished, StepTokens
from pdserve.sampling import FinishReason


def started_by_hand_off(attempt: DecodeAttempt, handed_off: HandedOff) -> DecodeStarted:
    """The verdict on a hand-off that happened."""
    return DecodeStarted(
        handle=attempt.handle,
        first_token=handed_off.first_token,
        logprobs=handed_off.logprobs,
        num_cached_tokens=attempt.seq.num_cached_tokens,
        received_bytes=handed_off.received_bytes,
        transport=handed_off.transport,
        transfer_s=handed_off.transfer_s,
        transfer_exposed_s=handed_off.transfer_exposed_s,
        commit_s=handed_off.commit_s,
    )


def started_here(attempt: DecodeAttempt, sampled: Sampled) -> DecodeStarted:
    """A prompt that was prefilled on this worker has its first token."""
    return DecodeStarted(
        handle=attempt.handle,
        first_token=sampled.token_id,
        logprobs=sampled.logprobs,
        num_cached_tokens=attempt.seq.num_cached_tokens,
        queue_s=attempt.admitted_s - attempt.received_s,
        prefill_s=attempt.started_s - attempt.admitted_s,
        energy_j=attempt.seq.energy.prefill_j,
    )


def step_tokens(attempt: DecodeAttempt, sampled: Sampled) -> StepTokens:
    """A later token, at its index; the engine has appended it to the sequence's ids already."""
    logprobs = () if sampled.logprobs is None else (sampled.logprobs,)
    seq = sampled.seq
    return StepTokens(attempt.handle, len(seq.ids) - 1, (sampled.token_id,), logprobs, seq.energy.decode_j)


def finished(attempt: DecodeAttempt, reason: FinishReason) -> SequenceFinished:
    """The normal end."""
    return SequenceFinished(
        handle=attempt.handle,
        reason=reason,
        num_tokens=len(attempt.seq.ids),
        decode_queue_s=attempt.decode_queue_s or 0.0,
        decode_step_s=attempt.decode_step_s,
        energy_j=attempt.seq.energy.decode_j,
    )
