"""Every message of a session goes through protobuf unchanged, and what must not exist is refused."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdserve import messages as m
from pdserve.errors import InvalidRequest
from pdserve.rpc import convert
from pdserve.rpc.v1 import inference_pb2 as ipb
from pdserve.rpc.v1 import session_pb2 as pb
from tests.contract.sessions import message_strategies as strategies

quick = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def test_the_strategies_cover_every_message() -> None:
    assert set(strategies.UP) == set(get_args(m.Up))
    assert set(strategies.DOWN) == set(get_args(m.Down))
    assert len(strategies.UP) == len(pb.Up.DESCRIPTOR.oneofs[0].fields)
    assert len(strategies.DOWN) == len(pb.Down.DESCRIPTOR.oneofs[0].fields)


@pytest.mark.parametrize("kind", strategies.UP, ids=lambda kind: kind.__name__)
@quick
@given(data=st.data())
def test_up_round_trip(kind: type, data: st.DataObject) -> None:
    message = data.draw(strategies.UP[kind])
    octets = convert.up_to_proto(message).SerializeToString()
    assert convert.up_from_proto(pb.Up.FromString(octets)) == message


@pytest.mark.parametrize("kind", strategies.DOWN, ids=lambda kind: kind.__name__)
@quick
@given(data=st.data())
def test_down_round_trip(kind: type, data: st.DataObject) -> None:
    message = data.draw(strategies.DOWN[kind])
    octets = convert.down_to_proto(message).SerializeToString()
    assert convert.down_from_proto(pb.Down.FromString(octets)) == message


GOOD_REF = pb.WorkerRef(id="d", epoch=pb.Epoch(start_ns=1, nonce=2))

BAD: list[tuple[Any, str]] = [
    (pb.Up(block_events=pb.BlockEvents(stored=b"short")), "16 bytes.*stored"),
    (pb.Up(hello=pb.Hello(worker=GOOD_REF, tp_size=1)), "role"),
    (pb.Up(hello=pb.Hello(worker=GOOD_REF, role=pb.ROLE_BOTH)), "tp_rank"),
    (pb.Up(pair_state=pb.PairState(up=True)), "missing.*decode_worker"),
    (pb.Up(pair_state=pb.PairState(decode_worker=pb.WorkerRef(id="d"))), "missing.*epoch"),
    (pb.Down(unpair=pb.Unpair(decode_worker=pb.WorkerRef(epoch=pb.Epoch()))), "id and epoch"),
    (pb.Up(load=pb.Load()), "missing.*blocks"),
    (pb.Up(progress=pb.Progress(handle=1)), "phase"),
    (pb.Up(finished=pb.SequenceFinished(handle=1)), "field=reason, value=0"),
    (pb.Up(first_token=pb.FirstToken(handle=1, final=True)), "contradicts.*final"),
    (pb.Up(granted=pb.Granted(lease_id=1)), "must not be 0"),
    (pb.Up(refused=pb.Refused(handle=1)), "missing.*failure"),
    (pb.Up(unsound=pb.Unsound(failure=pb.Failure())), "name its class"),
    (
        pb.Up(failed=pb.Failed(handle=1, failure=pb.Failure(error="Stale", fields={"message": "x"}))),
        "reserved",
    ),
    (
        pb.Up(
            failed=pb.Failed(handle=1, failure=pb.Failure(error="Overloaded", fields={"retry_after_s": "x"}))
        ),
        "finite seconds",
    ),
    (pb.Up(step=pb.Step(sequences=[pb.StepTokens(handle=1)])), "at least one token"),
    (pb.Down(set_role=pb.SetRole()), "role"),
    (pb.Down(abort=pb.AbortAttempt()), "must not be 0"),
    (pb.Down(start_decode=pb.StartDecode(handle=1)), "missing.*key"),
    (pb.Down(start_decode=pb.StartDecode(handle=1, key=pb.Sampling())), "must be resolved"),
]


@pytest.mark.parametrize(("msg", "said"), BAD, ids=[str(n) for n in range(len(BAD))])
def test_what_must_not_exist_is_refused(msg: Any, said: str) -> None:
    readers: dict[type, Any] = {
        pb.Up: convert.up_from_proto,
        pb.Down: convert.down_from_proto,
    }
    with pytest.raises(InvalidRequest, match=said):
        readers[type(msg)](msg)


RESOLVED = pb.Sampling(params=ipb.SamplingParams(temperature=0.0, top_k=0, top_p=1.0, max_tokens=1))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"deadline_left_s": float("nan")}, "finite seconds.*deadline_left_s"),
        ({"age_s": -1.0}, "finite seconds.*age_s"),
        ({"num_prompt_tokens": 2}, "num_prompt_tokens"),
        ({"token_ids": []}, "num_prompt_tokens"),
        ({"handle": 0}, "must not be 0.*handle"),
        ({"key": pb.Sampling(params=RESOLVED.params, bad_word_ids=[ipb.TokenIds()])}, "bad_word_ids"),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
def test_a_start_that_must_not_exist_is_refused(changed: dict[str, Any], said: str) -> None:
    good: dict[str, Any] = {"handle": 1, "token_ids": [5], "num_prompt_tokens": 1, "key": RESOLVED}
    assert convert.down_from_proto(pb.Down(start_decode=pb.StartDecode(**good))) is not None
    with pytest.raises(InvalidRequest, match=said):
        convert.down_from_proto(pb.Down(start_decode=pb.StartDecode(**{**good, **changed})))


def test_a_message_of_a_later_version_is_none() -> None:
    """A kind that this version doesn't know; as an empty one it is nothing to it."""
    later = b"\xc2\x3e\x02\x08\x01"  # field 1000, a message
    assert convert.up_from_proto(pb.Up.FromString(later)) is None
    assert convert.down_from_proto(pb.Down.FromString(later)) is None
