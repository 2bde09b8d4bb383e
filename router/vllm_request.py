"""A request as gateways of the field make it for vLLM, as one of ours: docs/api.md, "vLLM's engine service"."""

from __future__ import annotations

from typing import Any

from pdserve.errors import InvalidRequest
from pdserve.fields import fields_of
from pdserve.request import GenerateRequest, Input, Limits
from pdserve.rpc.params import read
from pdserve.rpc.v1 import vllm_engine_pb2 as pb
from pdserve.sampling import SamplingParams
from pdserve.structure import CHOICES, Structure, StructureKind

_LISTS = [
    field
    for field in fields_of(SamplingParams)
    if field.item is not None and field.name in pb.SamplingParams.DESCRIPTOR.fields_by_name
]
_REFUSED = ("kv_transfer_params", "mm_inputs", "kv_transfer_params_json")
_ALL_SEEDS = (1 << 64) - 1
_UNSET = -1  # as vLLM has it, of seeds and of what a prompt is cut to


def request_from(msg: pb.GenerateRequest, limits: Limits) -> GenerateRequest:
    """Checked as far as it can be without the model. Raises InvalidRequest, for what would change the answer, too."""
    for name in _REFUSED:
        if _is_set(msg, name):
            raise InvalidRequest(f"{name} isn't supported: this is a whole cluster, of one text model")
    if msg.data_parallel_rank:
        raise InvalidRequest("data_parallel_rank must be 0", value=msg.data_parallel_rank)
    params = msg.sampling_params
    for field in _LISTS:
        field.check_count(len(getattr(params, field.name)))
    CHOICES.check_count(len(params.choice.choices))
    keep = _kept_of(params, limits)
    request = GenerateRequest(
        request_id=msg.request_id,
        input=_input_of(msg, keep, limits),
        sampling=SamplingParams(
            **read(SamplingParams, params),
            include_stop=params.include_stop_str_in_output,
            structure=_structure_of(params),
        ),
        seed=params.seed & _ALL_SEEDS if _is_set(params, "seed") and params.seed != _UNSET else None,
        n=params.n or 1,
        truncate_prompt_tokens=keep,
    )
    request.check(limits)
    return request


def _is_set(msg: Any, name: str) -> bool:
    """By a name that isn't a literal."""
    return bool(msg.HasField(name))


def _kept_of(params: pb.SamplingParams, limits: Limits) -> int | None:
    """How many of the prompt's last tokens; None = all."""
    if not _is_set(params, "truncate_prompt_tokens"):
        return None
    if params.truncate_prompt_tokens != _UNSET:
        return params.truncate_prompt_tokens
    room = limits.window_tokens
    return None if room is None else max(1, room - max(1, params.max_tokens))


def _input_of(msg: pb.GenerateRequest, keep: int | None, limits: Limits) -> Input:
    match msg.WhichOneof("input"):
        case "text":
            return msg.text
        case "tokenized":
            ids = msg.tokenized.input_ids
            count = len(ids) if keep is None or keep < 1 else min(len(ids), keep)
            limits.check_fits(count, None)
            return tuple(ids[len(ids) - count :])
        case _:
            raise InvalidRequest("a request needs exactly one of tokenized, text")


def _structure_of(params: pb.SamplingParams) -> Structure | None:
    match params.WhichOneof("constraint"):
        case None:
            return None
        case "json_object":
            return Structure(StructureKind.JSON_OBJECT) if params.json_object else None
        case "choice":
            return Structure(StructureKind.CHOICES, tuple(params.choice.choices))
        case "structural_tag":
            raise InvalidRequest("structural_tag isn't supported")
        case name:
            return Structure(StructureKind(name), (getattr(params, name),))
