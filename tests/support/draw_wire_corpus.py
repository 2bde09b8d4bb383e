"""`python -m tests.support.draw_wire_corpus`: add messages to the corpus, of kinds that it doesn't hold yet.

Each message is what Hypothesis draws from every field of its class under a fixed seed: edge values, empty ones, text
of many scripts, every enum, parts that are absent.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from pdserve import response, status
from pdserve.sampling import FinishReason
from tests.contract.sessions import message_strategies as s
from tests.property.kv_transfer.test_framing_properties import FRAMES
from tests.support.wire_corpus import PATH, WIRES, lines, plain

_SEED = 20261130
_PER_KIND = 20

_answers: dict[type, st.SearchStrategy[Any]] = {
    response.Started: st.builds(
        response.Started,
        request_id=s.texts,
        seed=s.u64,
        num_prompt_tokens=s.u32,
        num_cached_tokens=s.u32,
        prompt_token_ids=s.token_ids,
        model=s.texts,
    ),
    response.Prompt: st.builds(
        response.Prompt,
        first_index=s.u32,
        token_ids=s.token_ids,
        text=s.texts,
        logprobs=st.lists(s.logprobs, max_size=3).map(tuple),
    ),
    response.Tokens: st.builds(
        response.Tokens,
        choice=s.u32,
        first_index=s.u32,
        token_ids=s.token_ids,
        text=s.texts,
        logprobs=st.lists(s.logprobs, max_size=3).map(tuple),
    ),
    response.Finished: st.builds(
        response.Finished,
        choice=s.u32,
        reason=st.sampled_from(FinishReason),
        usage=st.builds(
            response.Usage, num_prompt_tokens=s.u32, num_cached_tokens=s.u32, num_completion_tokens=s.u32
        ),
        timings=st.builds(
            response.Timings, **dict.fromkeys(response.Timings.__dataclass_fields__, s.seconds)
        ),
        num_attempts=s.u32,
        prefill_worker=s.texts,
        decode_worker=s.texts,
        kv_bytes=s.u64,
        transport=s.texts,
        energy=st.none() | st.builds(response.Energy, st.none() | s.seconds, st.none() | s.seconds),
    ),
}
_worker_status = st.builds(
    status.WorkerStatus,
    id=s.texts,
    role=s.texts,
    epoch=s.texts,
    role_generation=s.u32,
    state=s.texts,
    blocks=s.counts,
    num_running=s.u32,
    num_waiting=s.u32,
    num_queued_tokens=s.u64,
    num_cache_hit_tokens=s.u64,
    num_cache_query_tokens=s.u64,
    metrics_address=s.texts,
    numerics=s.texts,
    num_steps=s.u64,
)
_candidates = st.builds(
    status.CandidateStatus,
    prefill_worker=s.texts,
    decode_worker=s.texts,
    chosen=s.flags,
    reason=s.texts,
    cost=st.lists(st.tuples(s.texts, s.seconds), max_size=3).map(tuple),
)
_statuses = st.builds(
    status.ClusterStatus,
    router_id=s.texts,
    draining=s.flags,
    workers=st.lists(_worker_status, max_size=2).map(tuple),
    pairs=st.lists(
        st.builds(
            status.PairStatus,
            prefill_worker=s.texts,
            decode_worker=s.texts,
            up=s.flags,
            transport=s.texts,
            reason=s.texts,
        ),
        max_size=2,
    ).map(tuple),
    queue=st.builds(
        status.QueueStatus, num_waiting=s.u32, num_waiting_tokens=s.u64, num_running=s.u32, limit=s.u32
    ),
    placements=st.lists(
        st.builds(
            status.PlacementStatus,
            request_id=s.texts,
            choice=s.u32,
            attempt=s.u32,
            age_s=s.seconds,
            candidates=st.lists(_candidates, max_size=2).map(tuple),
        ),
        max_size=2,
    ).map(tuple),
)
_models = st.builds(
    status.ModelInfo,
    model=s.texts,
    window_tokens=s.u32,
    vocab_size=s.u32,
    eos_token_ids=s.token_ids,
    has_chat_template=s.flags,
    weights_fingerprint=s.texts,
    tokenizer_fingerprint=s.texts,
)

KINDS: list[tuple[str, type, st.SearchStrategy[Any]]] = [
    *(("up", kind, drawn) for kind, drawn in s.UP.items()),
    *(("down", kind, drawn) for kind, drawn in s.DOWN.items()),
    *(("answer", kind, drawn) for kind, drawn in _answers.items()),
    ("model", status.ModelInfo, _models),
    ("status", status.ClusterStatus, _statuses),
    *(("link", kind, drawn) for kind, drawn in FRAMES.items()),
]


def _drawn(strategy: st.SearchStrategy[Any]) -> list[Any]:
    """So many different messages, without those that only repeat."""
    found: dict[str, Any] = {}

    @seed(_SEED)
    @settings(
        max_examples=_PER_KIND,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        deadline=None,
    )
    @given(strategy)
    def collect(message: Any) -> None:
        found.setdefault(json.dumps(plain(message)), message)

    collect()
    return list(found.values())


def main() -> None:
    """Append to the file."""
    held = {(line.wire, line.kind) for line in lines()} if PATH.exists() else set()
    with PATH.open("a", encoding="utf-8") as file:
        for wire, kind, strategy in KINDS:
            if (wire, kind.__name__) in held:
                continue
            for message in _drawn(strategy):
                octets = WIRES[wire].write(message).hex()
                line = {"wire": wire, "kind": kind.__name__, "octets": octets, "says": plain(message)}
                file.write(json.dumps(line, separators=(",", ":")) + "\n")
            sys.stdout.write(f"{wire} {kind.__name__}\n")


if __name__ == "__main__":
    main()
