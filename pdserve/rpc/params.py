"""Sampling parameters to protobuf and back, for the public request and between router and worker alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from google.protobuf.message import Message

from pdserve.fields import fields_of
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.sampling import SamplingParams
from pdserve.structure import CHOICES, Structure, StructureKind

# Always written: workers want these resolved. Any other field is written only where it differs from its default.
_ALWAYS = ("temperature", "top_k", "top_p", "min_tokens")
_FIELDS = fields_of(SamplingParams)


def params_to(params: SamplingParams, **others: Any) -> pb.SamplingParams:
    """All fields of SamplingParams, and others that the message has. Of parameters that were checked."""
    fields = written(params, pb.SamplingParams, _ALWAYS)
    if params.structure is not None:
        fields[params.structure.kind.value] = _structure_to(params.structure)
    return pb.SamplingParams(**fields, **others)


def params_from(msg: pb.SamplingParams) -> SamplingParams:
    """As it stands: what is unset gets its default, nothing is checked."""
    return SamplingParams(structure=_structure_from(msg), **read(SamplingParams, msg))


def written(record: Any, kind: type[Message], always: Sequence[str] = ()) -> dict[str, Any]:
    """The described fields that this message has and that aren't at their default, or are in `always`."""
    known = kind.DESCRIPTOR.fields_by_name
    fields = [each for each in fields_of(record.__class__) if each.name in known]
    values = [(each, getattr(record, each.name)) for each in fields]
    return {
        field.name: dict(value) if field.item is tuple else value
        for field, value in values
        if field.name in always or value != field.default
    }


def read(cls: Any, *msgs: Message) -> dict[str, Any]:
    """The described fields of a dataclass that these messages set."""
    given = {descriptor.name: value for msg in msgs for descriptor, value in msg.ListFields()}
    return {each.name: each.value_of(given[each.name]) for each in fields_of(cls) if each.name in given}


def check_counts(msg: pb.SamplingParams) -> None:
    """Raises InvalidRequest for a list with more entries than allowed: before `params_from` reads them."""
    for field in _FIELDS:
        if field.item is not None:
            field.check_count(len(getattr(msg, field.name)))
    CHOICES.check_count(len(msg.choices.texts))


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
