"""A message's fields are counted before the library makes objects of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import InvalidRequest
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.rpc.wire_parts import MAX_PARTS, check_parts, message_fields
from pdserve.steps import finish

FIELDS = message_fields(pb.GenerateRequest.DESCRIPTOR)


def check(raw: bytes) -> None:
    finish(check_parts(raw, FIELDS))


@pytest.mark.parametrize(
    "message",
    [
        pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage()] * MAX_PARTS)),
        pb.GenerateRequest(sampling=pb.SamplingParams(logit_bias=dict.fromkeys(range(MAX_PARTS), 1.0))),
        pb.GenerateRequest(sampling=pb.SamplingParams(stop=["a"] * MAX_PARTS)),
        pb.GenerateRequest(resume=pb.Resume(choices=[pb.ResumeChoice()] * MAX_PARTS)),
    ],
    ids=["messages", "biases", "stops", "choices"],
)
def test_a_message_of_too_many_fields_is_refused(message: pb.GenerateRequest) -> None:
    with pytest.raises(InvalidRequest, match="too many fields") as refused:
        check(message.SerializeToString())
    assert refused.value.too_large == "fields"


def test_all_that_a_request_may_hold_is_let_through() -> None:
    turn = pb.ChatMessage(role="user", content="hi", extra_json='{"name": "x"}')
    params = pb.SamplingParams(
        logit_bias=dict.fromkeys(range(1024), 1.0),
        allowed_token_ids=range(16384),
        banned_token_ids=range(16384),
        stop=["a"] * 16,
        bad_words=["b"] * 128,
    )
    check(pb.GenerateRequest(chat=pb.Chat(messages=[turn] * 16384), sampling=params).SerializeToString())
    check(pb.GenerateRequest(token_ids=pb.TokenIds(ids=range(1 << 20))).SerializeToString())
    # As a client may write them that doesn't pack lists.
    unpacked = b"\x08\x81\x01" * 131_072
    size = len(unpacked)
    check(b"\x2a" + bytes([size & 127 | 128, size >> 7 & 127 | 128, size >> 14]) + unpacked)


@given(st.binary(max_size=200))
def test_what_is_no_message_is_left_to_the_library(raw: bytes) -> None:
    check(raw)


def test_numbers_that_never_end_are_no_message() -> None:
    check(b"\xff" * (64 << 20))  # would take hours, if they were read
