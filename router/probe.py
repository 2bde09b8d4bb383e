"""Moves real blocks over one pair, for an operator: a drawn prompt that no cache knows, computed and handed over."""

from __future__ import annotations

from pdserve.errors import NoWorker
from pdserve.ids import Random, draw_id64
from pdserve.probe import PairProbe
from pdserve.request import GenerateRequest
from pdserve.sampling import SamplingParams
from router.app import RouterApp

_MAX_TOKENS = 2  # the second one needs the KV that was shipped


async def probe_pair(
    app: RouterApp,
    random: Random,
    prefill_id: str,
    decode_id: str,
    num_tokens: int,
    deadline_left_s: float | None,
) -> PairProbe:
    """A request as any other, but on this pair. Event-loop thread only.

    num_tokens  of the prompt; cut to the window
    Raises UnknownWorker; NoWorker if the pair takes no requests now, with the reason; what the request ends with.
    """
    _check_up(app, prefill_id, decode_id)
    identity = await app.fleet.get_identity(0.0)
    num_tokens = max(1, min(num_tokens, app.fleet.window_tokens - _MAX_TOKENS))
    request = GenerateRequest(
        input=tuple(int(random.random() * identity.vocab_size) for _ in range(num_tokens)),
        sampling=SamplingParams(max_tokens=_MAX_TOKENS, ignore_eos=True, temperature=0.0),
        cache_salt=f"probe-{draw_id64(random):016x}",
        user="probe",
    )
    conductor = app.begin(request, deadline_left_s=deadline_left_s, only=(prefill_id, decode_id))
    try:
        async for _ in conductor:
            pass
    finally:
        conductor.close()
    choice = conductor.runs[0].choice
    started = choice.times.started
    return PairProbe(
        num_prompt_tokens=num_tokens,
        num_kv_bytes=choice.kv_bytes,
        transfer_s=0.0 if started is None else started.transfer_s,
        ttft_s=choice.times.ttft_s or 0.0,
        transport=choice.transport,
    )


def _check_up(app: RouterApp, prefill_id: str, decode_id: str) -> None:
    prefill, decode = app.operators.find(prefill_id), app.operators.find(decode_id)
    if (prefill, decode) in app.fleet.topology.usable_pairs():
        return
    record = prefill.pairs.get(decode_id)
    if record is not None and not record.up:
        reason = record.reason or "its link is down"
    else:
        idle = [member.id for member in (prefill, decode) if not member.usable]
        reason = f"{', '.join(idle)} takes no work" if idle else "these two are no pair"
    raise NoWorker("this pair takes no requests now", prefill=prefill_id, decode=decode_id, reason=reason)
