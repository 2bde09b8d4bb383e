"""Requests as clients send them, for the tests of what becomes of them."""

from __future__ import annotations

from typing import Any

from pdserve.request import (
    GenerateRequest,
    Limits,
)
from pdserve.rpc.v1 import inference_pb2 as pb


def message(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(**({"text": "hi"} | fields))


def sampling(**fields: Any) -> pb.GenerateRequest:
    return message(sampling=pb.SamplingParams(**fields))


def chat(*messages: tuple[str, str], **fields: Any) -> pb.GenerateRequest:
    turns = [pb.ChatMessage(role=role, content=content) for role, content in messages]
    return pb.GenerateRequest(chat=pb.Chat(messages=turns, **fields))


def said_with(extra_json: str) -> pb.GenerateRequest:
    turns = [
        pb.ChatMessage(role="user", content="hi"),
        pb.ChatMessage(role="assistant", content="a", extra_json=extra_json),
    ]
    return pb.GenerateRequest(chat=pb.Chat(messages=turns))


def resume(seed: int, *ids: list[int], **fields: Any) -> pb.GenerateRequest:
    choices = [pb.ResumeChoice(token_ids=each) for each in ids]
    return message(resume=pb.Resume(seed=seed, choices=choices), **fields)


UNKNOWN = Limits()


def checked(msg: pb.GenerateRequest, limits: Limits = UNKNOWN) -> GenerateRequest:
    """As the router takes a message in."""
    request = GenerateRequest.from_proto(msg, limits)
    request.check(limits)
    return request
