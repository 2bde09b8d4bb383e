"""Hypothesis strategies for every message of a session, as the wire can carry it."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from pdserve import messages as m
from pdserve.block_messages import BlockCounts, BlockEvents
from pdserve.errors import Failure
from pdserve.ids import Epoch, WorkerRef
from pdserve.sampling import FinishReason, SampleKey, SamplingParams, TokenLogprobs
from pdserve.structure import Structure

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
ids = st.integers(1, 2**64 - 1)
token_ids = st.lists(u32, max_size=8).map(tuple)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
field_names = texts.filter(lambda name: name not in ("message", "self"))  # reserved
f32 = st.floats(width=32, allow_nan=False)
seconds = st.floats(0, 1e6)
flags = st.booleans()
hashes = st.lists(st.binary(min_size=16, max_size=16), max_size=4).map(tuple)

workers = st.builds(WorkerRef, st.text("abc-0", min_size=1, max_size=8), st.builds(Epoch, u64, u64))
counts = st.builds(BlockCounts, u32, u32, u32, u32, u32)
failures = st.builds(
    Failure, st.text("abcXYZ", min_size=1), texts, st.dictionaries(field_names, texts, max_size=3)
)
logprobs = st.builds(TokenLogprobs, f32, st.lists(st.tuples(u32, f32), max_size=3).map(tuple))
maybe_logprobs = st.none() | logprobs


structures = st.one_of(
    st.just(Structure.json_object()),
    st.builds(Structure.json_schema, texts),
    st.builds(Structure.regex, texts),
    st.builds(Structure.grammar, texts),
    st.builds(Structure.choices, st.lists(texts, max_size=3)),
)


@st.composite
def sample_keys(draw: st.DrawFn) -> SampleKey:
    max_tokens = draw(u32)
    params = SamplingParams(
        temperature=draw(f32),
        top_k=draw(u32),
        top_p=draw(f32),
        min_p=draw(f32),
        typical_p=draw(f32),
        repetition_penalty=draw(f32),
        presence_penalty=draw(f32),
        frequency_penalty=draw(f32),
        logit_bias=tuple(sorted(draw(st.dictionaries(u32, f32, max_size=3)).items())),
        allowed_token_ids=draw(token_ids),
        banned_token_ids=draw(token_ids),
        bad_words=draw(st.lists(texts, max_size=2).map(tuple)),
        logprobs=draw(st.none() | u32),
        prompt_logprobs=draw(st.none() | u32),
        min_tokens=draw(u32),
        max_tokens=max_tokens,
        stop=draw(st.lists(texts, max_size=3).map(tuple)),
        include_stop=draw(flags),
        keep_special_tokens=draw(flags),
        stop_token_ids=draw(token_ids),
        ignore_eos=draw(flags),
        structure=draw(st.none() | structures),
    )
    return SampleKey(
        params=params,
        seed=draw(u64),
        choice=draw(u32),
        eos_token_ids=draw(token_ids),
        max_tokens=max_tokens,
        bad_word_ids=draw(st.lists(st.lists(u32, min_size=1, max_size=3).map(tuple), max_size=2).map(tuple)),
    )


@st.composite
def prompts(draw: st.DrawFn) -> dict[str, Any]:
    all_ids = draw(st.lists(u32, min_size=1, max_size=8).map(tuple))
    return {"token_ids": all_ids, "num_prompt_tokens": draw(st.integers(1, len(all_ids)))}


@st.composite
def start_prefills(draw: st.DrawFn) -> m.StartPrefill:
    return m.StartPrefill(
        handle=draw(ids),
        **draw(prompts()),
        key=draw(sample_keys()),
        deadline_left_s=draw(seconds),
        num_strikes=draw(u32),
        lease_id=draw(ids),
        decode_worker=draw(workers),
        num_skip_blocks=draw(u32),
        cache_salt=draw(texts),
    )


@st.composite
def start_decodes(draw: st.DrawFn) -> m.StartDecode:
    return m.StartDecode(
        handle=draw(ids),
        **draw(prompts()),
        key=draw(sample_keys()),
        deadline_left_s=draw(seconds),
        num_strikes=draw(u32),
        source=draw(st.none() | workers),
        priority=draw(st.integers(-(2**31), 2**31 - 1)),
        age_s=draw(seconds),
        cache_salt=draw(texts),
    )


@st.composite
def step_tokens(draw: st.DrawFn) -> m.StepTokens:
    tokens = draw(st.lists(u32, min_size=1, max_size=4).map(tuple))
    each = draw(st.just(()) | st.lists(logprobs, min_size=len(tokens), max_size=len(tokens)).map(tuple))
    return m.StepTokens(draw(ids), draw(u32), tokens, each, draw(st.none() | seconds))


hellos = st.builds(
    m.Hello,
    worker=workers,
    role=st.sampled_from(m.Role),
    role_generation=u32,
    model=texts,
    kv_addresses=st.lists(texts, max_size=3).map(tuple),
    transports=st.lists(texts, max_size=3).map(tuple),
    metrics_address=texts,
    kv_layout_json=texts,
    block_size=u32,
    num_blocks=u32,
    window_tokens=u32,
    weights_fingerprint=texts,
    tokenizer_fingerprint=texts,
    numerics=texts,
    deterministic=flags,
    cache_seed=st.binary(max_size=20),
    eos_token_ids=token_ids,
    vocab_size=u32,
    host_id=texts,
    draining=flags,
    tp_rank=st.integers(0, 3),
    tp_size=st.integers(4, 8),
)
loads = st.builds(
    m.Load,
    blocks=counts,
    num_running=u32,
    num_waiting=u32,
    num_queued_tokens=u64,
    num_cache_hit_tokens=u64,
    num_cache_query_tokens=u64,
    prefill_tokens_per_s=seconds,
    step_s=seconds,
    slowest_step_s=seconds,
    num_queued_short_tokens=u64,
    chunk_tokens=u32,
    draining=flags,
)
first_tokens = st.builds(
    m.FirstToken,
    handle=ids,
    token_id=u32,
    logprobs=maybe_logprobs,
    reason=st.none() | st.sampled_from(FinishReason),
    num_cached_tokens=u32,
    queue_s=seconds,
    prefill_s=seconds,
    energy_j=st.none() | seconds,
)
starteds = st.builds(
    m.DecodeStarted,
    handle=ids,
    first_token=u32,
    logprobs=maybe_logprobs,
    num_cached_tokens=u32,
    received_bytes=u64,
    transport=texts,
    transfer_s=seconds,
    transfer_exposed_s=seconds,
    commit_s=seconds,
    queue_s=seconds,
    prefill_s=seconds,
    energy_j=st.none() | seconds,
)
finisheds = st.builds(
    m.SequenceFinished,
    handle=ids,
    reason=st.sampled_from(FinishReason),
    num_tokens=u32,
    decode_queue_s=seconds,
    decode_step_s=seconds,
    energy_j=st.none() | seconds,
)

DOWN: dict[type, st.SearchStrategy[Any]] = {
    m.Welcome: st.builds(m.Welcome, texts, flags),
    m.StartPrefill: start_prefills(),
    m.StartDecode: start_decodes(),
    m.Abort: st.builds(m.Abort, ids),
    m.Pair: st.builds(m.Pair, workers, st.lists(texts, max_size=3).map(tuple)),
    m.Unpair: st.builds(m.Unpair, workers),
    m.Demand: st.builds(m.Demand, u64),
    m.Drain: st.just(m.Drain()),
    m.SetRole: st.builds(m.SetRole, st.sampled_from(m.Role)),
    m.Superseded: st.just(m.Superseded()),
    m.DownHeartbeat: st.just(m.DownHeartbeat()),
}
UP: dict[type, st.SearchStrategy[Any]] = {
    m.Hello: hellos,
    m.Load: loads,
    m.Heartbeat: st.builds(m.Heartbeat, u64, flags),
    m.PairState: st.builds(m.PairState, workers, flags, texts, texts, u64),
    m.Credits: st.builds(m.Credits, st.integers(-(2**63), 2**63 - 1)),
    m.Granted: st.builds(m.Granted, ids, st.just(0) | ids, u32),
    m.Waiting: st.builds(m.Waiting, ids, u32),
    m.Refused: st.builds(m.Refused, ids, failures),
    m.Progress: st.builds(m.Progress, ids, st.sampled_from(m.Phase), u64),
    m.FirstToken: first_tokens,
    m.PromptLogprobs: st.builds(m.PromptLogprobs, ids, u32, st.lists(logprobs, max_size=3).map(tuple)),
    m.DecodeStarted: starteds,
    m.Step: st.lists(step_tokens(), max_size=3).map(lambda parts: m.Step(tuple(parts))),
    m.SequenceFinished: finisheds,
    m.Failed: st.builds(m.Failed, ids, failures),
    m.Unsound: st.builds(m.Unsound, failures),
    BlockEvents: st.builds(BlockEvents, whole=flags, stored=hashes, removed=hashes),
    m.TokenizerFile: st.builds(m.TokenizerFile, texts, st.binary(max_size=64), flags),
}
