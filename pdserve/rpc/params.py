"""Sampling parameters to protobuf and back, for the public request and between router and worker alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdserve.rpc.made import made
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.sampling import SamplingParams
from pdserve.structure import Structure, StructureKind

# Sent only where they differ from the default: few requests set them.
_RARE = (
    "min_p", "typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logprobs",
    "prompt_logprobs",
)  # fmt: skip
_LISTS = ("allowed_token_ids", "banned_token_ids", "bad_words", "stop", "stop_token_ids")
_ALWAYS = ("temperature", "top_k", "top_p", "min_tokens", "max_tokens", "include_stop", "ignore_eos")

_DEFAULTS = SamplingParams()


def params_to(params: SamplingParams) -> pb.SamplingParams:
    """All fields that SamplingParams has; the message's others are the caller's. Raises InvalidRequest as `made`."""
    fields: dict[str, Any] = {name: getattr(params, name) for name in (*_ALWAYS, *_LISTS)}
    for name in _RARE:
        value = getattr(params, name)
        if value != getattr(_DEFAULTS, name):
            fields[name] = value
    if params.structure is not None:
        fields[params.structure.kind.value] = _structure_to(params.structure)
    return made(pb.SamplingParams, logit_bias=dict(params.logit_bias), **fields)


def params_from(msg: pb.SamplingParams) -> SamplingParams:
    """As it stands: what is unset gets its default, nothing is checked."""
    fields: dict[str, Any] = {name: tuple(getattr(msg, name)) for name in _LISTS}
    is_set: Callable[[Any], bool] = msg.HasField  # by a name that isn't a literal
    for name in ("temperature", "top_k", "top_p", "max_tokens", *_RARE):
        if is_set(name):
            fields[name] = getattr(msg, name)
    return SamplingParams(
        min_tokens=msg.min_tokens,
        include_stop=msg.include_stop,
        ignore_eos=msg.ignore_eos,
        logit_bias=tuple(sorted(msg.logit_bias.items())),
        structure=_structure_from(msg),
        **fields,
    )


def _structure_to(structure: Structure) -> str | bool | pb.Choices:
    match structure.kind:
        case StructureKind.JSON_OBJECT:
            return True
        case StructureKind.CHOICES:
            return pb.Choices(texts=structure.texts)
        case _:
            return structure.text


def _structure_from(msg: pb.SamplingParams) -> Structure | None:
    """json_object = false asks for nothing."""
    match msg.WhichOneof("structure"):
        case None:
            return None
        case "json_object":
            return Structure(StructureKind.JSON_OBJECT) if msg.json_object else None
        case "choices":
            return Structure(StructureKind.CHOICES, tuple(msg.choices.texts))
        case name:
            return Structure(StructureKind(name), (getattr(msg, name),))
