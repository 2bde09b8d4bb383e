"""Messages from worker to router, to protobuf and back; `pdserve.rpc.convert` is the entry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdserve import messages as m
from pdserve.errors import InvalidRequest
from pdserve.rpc import values as v
from pdserve.rpc.v1 import inference_pb2 as ipb
from pdserve.rpc.v1 import session_pb2 as pb


def to_proto(message: m.Up) -> pb.Up:
    """The protobuf form of any upward message; Step, the most frequent by far, is asked for first."""
    match message:
        case m.Step():
            return pb.Up(step=pb.Step(sequences=[_step_tokens_to(each) for each in message.sequences]))
        case m.Load():
            return pb.Up(load=_load_to(message))
        case m.Heartbeat():
            beat = pb.Heartbeat(num_steps=message.num_steps, has_work=message.has_work)
            return pb.Up(heartbeat=beat)
        case m.Progress():
            phase = v.PHASE_NUMBERS[message.phase]
            return pb.Up(progress=pb.Progress(handle=message.handle, phase=phase, amount=message.amount))
        case m.FirstToken():
            return pb.Up(first_token=_first_token_to(message))
        case m.Started():
            return pb.Up(started=_started_to(message))
        case m.Finished():
            return pb.Up(finished=_finished_to(message))
        case m.Granted():
            return pb.Up(
                granted=pb.Granted(
                    handle=message.handle,
                    lease_id=message.lease_id,
                    num_cached_blocks=message.num_cached_blocks,
                )
            )
        case m.Waiting():
            return pb.Up(waiting=pb.Waiting(handle=message.handle, place=message.place))
        case m.Refused():
            return pb.Up(refused=pb.Refused(handle=message.handle, failure=v.failure_to(message.failure)))
        case m.Failed():
            return pb.Up(failed=pb.Failed(handle=message.handle, failure=v.failure_to(message.failure)))
        case m.Credits():
            return pb.Up(credits=pb.Credits(balance=message.balance))
        case m.PairState():
            return pb.Up(pair_state=_pair_state_to(message))
        case m.PromptLogprobs():
            tokens = v.all_logprobs_to(message.tokens)
            first = message.first_position
            return pb.Up(
                prompt_logprobs=pb.PromptLogprobs(handle=message.handle, first_position=first, tokens=tokens)
            )
        case m.Hello():
            return pb.Up(hello=_hello_to(message))
        case m.TokenizerFile():
            file = pb.TokenizerFile(name=message.name, content=message.content, last=message.last)
            return pb.Up(tokenizer_file=file)
        case m.Unsound():
            return pb.Up(unsound=pb.Unsound(failure=v.failure_to(message.failure)))


def from_proto(msg: pb.Up) -> m.Up:
    """Raises InvalidRequest if the message is empty or must not exist."""
    name = msg.WhichOneof("message")
    if name is None:
        raise InvalidRequest("an empty message, or one of a later version, came from the worker")
    return _READERS[name](getattr(msg, name))


def _step_tokens_to(message: m.StepTokens) -> pb.StepTokens:
    return pb.StepTokens(
        handle=message.handle,
        first_position=message.first_position,
        token_ids=message.token_ids,
        logprobs=v.all_logprobs_to(message.logprobs),
        energy_j=message.energy_j,
    )


def _step_tokens_from(msg: pb.StepTokens) -> m.StepTokens:
    if not msg.token_ids or (msg.logprobs and len(msg.logprobs) != len(msg.token_ids)):
        raise InvalidRequest(
            "want at least one token and logprobs for none or each",
            num_tokens=len(msg.token_ids),
            num_logprobs=len(msg.logprobs),
        )
    return m.StepTokens(
        v.handle_from(msg.handle),
        msg.first_position,
        tuple(msg.token_ids),
        v.all_logprobs_from(msg.logprobs),
        msg.energy_j if msg.HasField("energy_j") else None,
    )


def _load_to(message: m.Load) -> pb.Load:
    return pb.Load(
        blocks=v.counts_to(message.blocks),
        num_running=message.num_running,
        num_waiting=message.num_waiting,
        num_queued_tokens=message.num_queued_tokens,
        num_cache_hit_tokens=message.num_cache_hit_tokens,
        num_cache_query_tokens=message.num_cache_query_tokens,
        prefill_tokens_per_s=message.prefill_tokens_per_s,
        step_s=message.step_s,
        slowest_step_s=message.slowest_step_s,
        num_queued_short_tokens=message.num_queued_short_tokens,
        chunk_tokens=message.chunk_tokens,
        draining=message.draining,
    )


def _load_from(msg: pb.Load) -> m.Load:
    return m.Load(
        blocks=v.counts_from(msg.blocks),
        num_running=msg.num_running,
        num_waiting=msg.num_waiting,
        num_queued_tokens=msg.num_queued_tokens,
        num_cache_hit_tokens=msg.num_cache_hit_tokens,
        num_cache_query_tokens=msg.num_cache_query_tokens,
        prefill_tokens_per_s=msg.prefill_tokens_per_s,
        step_s=msg.step_s,
        slowest_step_s=msg.slowest_step_s,
        num_queued_short_tokens=msg.num_queued_short_tokens,
        chunk_tokens=msg.chunk_tokens,
        draining=msg.draining,
    )


def _first_token_to(message: m.FirstToken) -> pb.FirstToken:
    return pb.FirstToken(
        handle=message.handle,
        token_id=message.token_id,
        logprobs=v.logprobs_to(message.logprobs),
        final=message.final,
        reason=ipb.FINISH_REASON_UNSPECIFIED if message.reason is None else v.REASON_NUMBERS[message.reason],
        num_cached_tokens=message.num_cached_tokens,
        queue_s=message.queue_s,
        prefill_s=message.prefill_s,
        energy_j=message.energy_j,
    )


def _first_token_from(msg: pb.FirstToken) -> m.FirstToken:
    if msg.final != bool(msg.reason):
        raise InvalidRequest("a first token has a reason exactly if it is final", reason=msg.reason)
    return m.FirstToken(
        handle=v.handle_from(msg.handle),
        token_id=msg.token_id,
        logprobs=v.logprobs_from(msg.logprobs) if msg.HasField("logprobs") else None,
        reason=v.reason_from(msg.reason) if msg.final else None,
        num_cached_tokens=msg.num_cached_tokens,
        queue_s=msg.queue_s,
        prefill_s=msg.prefill_s,
        energy_j=msg.energy_j if msg.HasField("energy_j") else None,
    )


def _started_to(message: m.Started) -> pb.DecodeStarted:
    return pb.DecodeStarted(
        handle=message.handle,
        first_token=message.first_token,
        logprobs=v.logprobs_to(message.logprobs),
        num_cached_tokens=message.num_cached_tokens,
        received_bytes=message.received_bytes,
        transport=message.transport,
        transfer_s=message.transfer_s,
        transfer_exposed_s=message.transfer_exposed_s,
        commit_s=message.commit_s,
        queue_s=message.queue_s,
        prefill_s=message.prefill_s,
        energy_j=message.energy_j,
    )


def _started_from(msg: pb.DecodeStarted) -> m.Started:
    return m.Started(
        handle=v.handle_from(msg.handle),
        first_token=msg.first_token,
        logprobs=v.logprobs_from(msg.logprobs) if msg.HasField("logprobs") else None,
        num_cached_tokens=msg.num_cached_tokens,
        received_bytes=msg.received_bytes,
        transport=msg.transport,
        transfer_s=msg.transfer_s,
        transfer_exposed_s=msg.transfer_exposed_s,
        commit_s=msg.commit_s,
        queue_s=msg.queue_s,
        prefill_s=msg.prefill_s,
        energy_j=msg.energy_j if msg.HasField("energy_j") else None,
    )


def _finished_to(message: m.Finished) -> pb.SequenceFinished:
    return pb.SequenceFinished(
        handle=message.handle,
        reason=v.REASON_NUMBERS[message.reason],
        num_tokens=message.num_tokens,
        decode_queue_s=message.decode_queue_s,
        decode_step_s=message.decode_step_s,
        energy_j=message.energy_j,
    )


def _finished_from(msg: pb.SequenceFinished) -> m.Finished:
    return m.Finished(
        handle=v.handle_from(msg.handle),
        reason=v.reason_from(msg.reason),
        num_tokens=msg.num_tokens,
        decode_queue_s=msg.decode_queue_s,
        decode_step_s=msg.decode_step_s,
        energy_j=msg.energy_j if msg.HasField("energy_j") else None,
    )


def _pair_state_to(message: m.PairState) -> pb.PairState:
    return pb.PairState(
        decode_worker=v.worker_to(message.decode_worker),
        up=message.up,
        transport=message.transport,
        reason=message.reason,
        generation=message.generation,
    )


def _pair_state_from(msg: pb.PairState) -> m.PairState:
    worker = v.worker_from(msg.decode_worker)
    return m.PairState(worker, msg.up, msg.transport, msg.reason, msg.generation)


_HELLO_PLAIN = (
    "role_generation", "model", "metrics_address", "kv_layout_json", "block_size", "num_blocks", "window_tokens",
    "tp_rank", "tp_size", "weights_fingerprint", "tokenizer_fingerprint", "numerics", "deterministic", "cache_seed",
    "vocab_size", "host_id", "draining",
)  # fmt: skip


def _hello_to(message: m.Hello) -> pb.Hello:
    return pb.Hello(
        worker=v.worker_to(message.worker),
        role=v.ROLE_NUMBERS[message.role],
        kv_addresses=message.kv_addresses,
        transports=message.transports,
        eos_token_ids=message.eos_token_ids,
        **{name: getattr(message, name) for name in _HELLO_PLAIN},
    )


def _hello_from(msg: pb.Hello) -> m.Hello:
    if msg.tp_size < 1 or msg.tp_rank >= msg.tp_size:
        raise InvalidRequest("want tp_rank < tp_size", tp_rank=msg.tp_rank, tp_size=msg.tp_size)
    return m.Hello(
        worker=v.worker_from(msg.worker),
        role=v.role_from(msg.role),
        kv_addresses=tuple(msg.kv_addresses),
        transports=tuple(msg.transports),
        eos_token_ids=tuple(msg.eos_token_ids),
        **{name: getattr(msg, name) for name in _HELLO_PLAIN},
    )


_READERS: dict[str, Callable[[Any], m.Up]] = {
    "step": lambda msg: m.Step(tuple(_step_tokens_from(each) for each in msg.sequences)),
    "hello": _hello_from,
    "load": _load_from,
    "heartbeat": lambda msg: m.Heartbeat(msg.num_steps, msg.has_work),
    "pair_state": _pair_state_from,
    "credits": lambda msg: m.Credits(msg.balance),
    "granted": lambda msg: m.Granted(v.handle_from(msg.handle), msg.lease_id, msg.num_cached_blocks),
    "waiting": lambda msg: m.Waiting(v.handle_from(msg.handle), msg.place),
    "refused": lambda msg: m.Refused(v.handle_from(msg.handle), v.failure_from(msg.failure)),
    "progress": lambda msg: m.Progress(v.handle_from(msg.handle), v.phase_from(msg.phase), msg.amount),
    "first_token": _first_token_from,
    "prompt_logprobs": lambda msg: m.PromptLogprobs(
        v.handle_from(msg.handle), msg.first_position, v.all_logprobs_from(msg.tokens)
    ),
    "started": _started_from,
    "finished": _finished_from,
    "failed": lambda msg: m.Failed(v.handle_from(msg.handle), v.failure_from(msg.failure)),
    "unsound": lambda msg: m.Unsound(v.failure_from(msg.failure)),
    "tokenizer_file": lambda msg: m.TokenizerFile(msg.name, msg.content, msg.last),
}
