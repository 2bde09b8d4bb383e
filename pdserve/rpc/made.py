"""Messages made of a caller's values: one that no message can hold is refused by the name of its field."""

from __future__ import annotations

from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from pdserve.errors import InvalidRequest

M = TypeVar("M", bound=Message)

_LIMITS = {
    FieldDescriptor.CPPTYPE_UINT32: "0 to 2^32 - 1",
    FieldDescriptor.CPPTYPE_UINT64: "0 to 2^64 - 1",
    FieldDescriptor.CPPTYPE_INT32: "-2^31 to 2^31 - 1",
    FieldDescriptor.CPPTYPE_STRING: "valid Unicode",
}
_REFUSALS = (ValueError, TypeError)  # UnicodeError is a ValueError


def made(kind: type[M], **fields: Any) -> M:
    """kind(**fields); None leaves a field unset. Raises InvalidRequest for the first field that can't be written."""
    try:
        return kind(**fields)
    except _REFUSALS as error:
        for name, value in fields.items():
            _check(kind, name, value)
        raise InvalidRequest("the request can't be written", why=error) from error


def _check(kind: type[Message], name: str, value: Any) -> None:
    try:
        kind(**{name: value})
    except _REFUSALS as error:
        field = kind.DESCRIPTOR.fields_by_name[name]
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            field = field.message_type.fields_by_name["key"]
        raise InvalidRequest(
            f"{name} can't be written", limit=_LIMITS.get(field.cpp_type, str(error)), value=repr(value)[:80]
        ) from error
