"""Dataclasses to protobuf and back, field by field of the same name; compiled once for each class.

    field of the dataclass        field of the message
    int, float, str, bytes, bool  the same; `| None`: optional
    an enum                       an enum, whose names have a prefix; `| None`: 0, which is refused otherwise
    a dataclass                   a message; `| None`: absent. Without it: refused if absent, or the field's default
    tuple[X, ...]                 repeated X
    tuple[A, B]                   a message of these two fields, in their order
    tuple[tuple[X, ...], ...]     repeated: a message of one repeated field
    tuple[bytes, ...]             bytes: block hashes, one behind the other
    Mapping                       a map

A message's field that the dataclass has as a property is written, and must agree when it is read. So a new field is
a line in the .proto and one in the dataclass; a class and a message of different fields don't compile.

What a message must not say is refused by InvalidRequest that names the field: by a function in the field's
`Annotated[…]`, called with name and value, or by the class's method `check`. Both see only what came from outside.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from operator import attrgetter
from types import NoneType, UnionType
from typing import Annotated, Any, Generic, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from pdserve.blockhash import HASH_BYTES
from pdserve.errors import InvalidRequest

T = TypeVar("T")
M = TypeVar("M", bound=Message)

Convert = Callable[[Any], Any]
Check = Callable[[str, Any], None]
Shape = Any
"""A descriptor of protobuf's: its stubs know several kinds of them."""
_PLAIN = (int, float, str, bytes, bool)


@dataclass(frozen=True, slots=True)
class Plan(Generic[T, M]):
    """How one class is written to its message and read from it; `read` raises InvalidRequest."""

    write: Callable[[T], M]
    read: Callable[..., T]


Plans = Mapping[type[Any], Plan[Any, Any]]
"""Classes that are converted by other rules than this module's."""


@dataclass(frozen=True, slots=True)
class _Value:
    """How one value is converted. write None: the message takes it as it stands."""

    write: Convert | None
    read: Convert


def compile_plan(
    cls: type[T], kind: type[M], own: Plans | None = None, beside: tuple[str, ...] = ()
) -> Plan[T, M]:
    """The plan of a dataclass. beside: fields that its message doesn't hold, for the caller to give to `read`.

    Raises TypeError if the two have different fields.
    """
    return _compile(cls, kind.DESCRIPTOR, own or {}, beside)


class OneOf(Generic[T]):
    """A message that holds one of several in a `oneof`, as a union of our classes.

    Each class goes by the name of its field, or of its message. Fields of the envelope itself belong to every class
    that has them.
    """

    def __init__(self, union: Any, envelope: type[Message], own: Plans | None = None) -> None:
        [oneof] = envelope.DESCRIPTOR.oneofs
        inside: dict[str, Shape] = {field.name: field.message_type for field in oneof.fields}
        outside = [field.name for field in envelope.DESCRIPTOR.fields if field.name not in inside]
        classes = {cls.__name__: cls for cls in get_args(union)}
        self._envelope = envelope
        self._name = oneof.name
        self._by_class: dict[type, tuple[str, Plan[T, Any], tuple[str, ...]]] = {}
        self._by_field: dict[str, tuple[Plan[T, Any], tuple[str, ...]]] = {}
        for field, message in inside.items():
            cls = classes.get(message.name) or classes[field.title().replace("_", "")]
            beside = tuple(name for name in outside if name in cls.__dataclass_fields__)
            plan = _compile(cls, message, own or {}, beside)
            self._by_class[cls] = field, plan, beside
            self._by_field[field] = plan, beside
        if len(self._by_class) != len(classes):
            raise TypeError(f"{envelope.DESCRIPTOR.full_name} doesn't hold all of {sorted(classes)}")

    def write(self, message: T) -> Any:
        """Our message in its envelope."""
        name, plan, beside = self._by_class[type(message)]
        inner = plan.write(message)
        if not beside:
            return self._envelope(**{name: inner})
        return self._envelope(**{name: inner}, **{each: getattr(message, each) for each in beside})

    def read(self, msg: Any) -> T | None:
        """None: nothing that this version knows. Raises InvalidRequest."""
        name = msg.WhichOneof(self._name)
        if name is None:
            return None
        plan, beside = self._by_field[name]
        return plan.read(getattr(msg, name), **{each: getattr(msg, each) for each in beside})


class Numbers(Generic[T]):
    """An enum's members and their numbers: each value's name in the .proto is a prefix and the member's name."""

    def __init__(self, members: type[T], descriptor: Shape, field: str) -> None:
        named: dict[str, T] = {member.name: member for member in cast(Iterable[Any], members)}
        prefix = descriptor.values_by_number[0].name.removesuffix("UNSPECIFIED")
        self._field = field
        self._members = {
            value.number: named[value.name.removeprefix(prefix)]
            for value in descriptor.values
            if value.number
        }
        self._numbers = {member: number for number, member in self._members.items()}
        if len(self._numbers) != len(named):
            raise TypeError(f"{descriptor.full_name} doesn't name all of {members.__name__}")

    def write(self, member: T) -> Any:
        """The number of a member."""
        return self._numbers[member]

    def read(self, number: int) -> T:
        """Raises InvalidRequest for unspecified and unknown numbers."""
        member = self._members.get(number)
        if member is None:
            raise InvalidRequest("unspecified or unknown enum value", field=self._field, value=number)
        return member


def _compile(cls: type[Any], descriptor: Shape, own: Plans, beside: tuple[str, ...]) -> Plan[Any, Any]:
    if cls in own:
        return own[cls]
    hints = get_type_hints(cls, include_extras=True)
    fields = {field.name: field for field in dataclasses.fields(cls) if field.name not in beside}
    there = dict(descriptor.fields_by_name)
    derived = tuple(name for name in there if name not in fields)
    if not fields.keys() <= there.keys() or not all(
        isinstance(getattr(cls, n, None), property) for n in derived
    ):
        raise TypeError(f"{cls.__name__} and {descriptor.full_name} have different fields")

    plain: list[str] = []
    writers: list[tuple[str, Convert]] = []
    readers: list[tuple[str, Convert]] = []
    checks: list[tuple[str, Check]] = []
    for name, field in fields.items():
        hint = hints[name]
        if get_origin(hint) is Annotated:
            hint, *found = get_args(hint)
            checks += [(name, check) for check in found]
        hint, is_optional = _without_none(hint)
        value = _value(hint, there[name], own)
        if value is None and not is_optional:
            plain.append(name)
            continue
        readers.append(
            (name, _optional(there[name], value) if is_optional else _required(field, there[name], value))
        )
        if value is not None and value.write is not None:
            writers.append((name, _unless_none(value.write) if is_optional else value.write))

    write = _writer(GetMessageClass(descriptor), (*fields, *derived), writers)
    return Plan(write, _reader(cls, tuple(plain), readers, checks, derived))


def _writer(kind: Any, names: tuple[str, ...], writers: list[tuple[str, Convert]]) -> Convert:
    take = _taker(names)

    def write(message: Any) -> Any:
        values = dict(zip(names, take(message)))
        for name, convert in writers:
            values[name] = convert(values[name])
        return kind(**values)

    return write


def _reader(
    cls: type[Any],
    plain: tuple[str, ...],
    readers: list[tuple[str, Convert]],
    checks: list[tuple[str, Check]],
    derived: tuple[str, ...],
) -> Callable[..., Any]:
    """readers: of the fields that aren't plain, each from the whole message."""
    take = _taker(plain)
    check_whole = getattr(cls, "check", None)

    def read(msg: Any, **beside: Any) -> Any:
        values = dict(zip(plain, take(msg)))
        for name, convert in readers:
            values[name] = convert(msg)
        for name, check in checks:
            check(name, values[name])
        message = cls(**values, **beside)
        for name in derived:
            if getattr(msg, name) != getattr(message, name):
                raise InvalidRequest("a field contradicts the others", field=name, value=getattr(msg, name))
        if check_whole is not None:
            check_whole(message)
        return message

    return read


def _taker(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    """Gives the values of these attributes."""
    if len(names) > 1:
        return attrgetter(*names)
    return lambda each: tuple([getattr(each, name) for name in names])


def _without_none(hint: Any) -> tuple[Any, bool]:
    """The type, and whether it may be None instead."""
    if get_origin(hint) in (Union, UnionType):
        [inner] = (each for each in get_args(hint) if each is not NoneType)
        return inner, True
    return hint, False


def _unless_none(convert: Convert) -> Convert:
    return lambda value: None if value is None else convert(value)


def _optional(field: Shape, value: _Value | None) -> Convert:
    name = field.name
    read = None if value is None else value.read
    if not field.has_presence:  # an enum
        assert read is not None
        return lambda msg: read(getattr(msg, name)) if getattr(msg, name) else None
    if read is None:
        return lambda msg: getattr(msg, name) if msg.HasField(name) else None
    return lambda msg: read(getattr(msg, name)) if msg.HasField(name) else None


def _required(ours: dataclasses.Field[Any], field: Shape, value: _Value | None) -> Convert:
    assert value is not None
    name, default, read = field.name, ours.default, value.read
    if not field.has_presence:
        return lambda msg: read(getattr(msg, name))

    def read_message(msg: Any) -> Any:
        if msg.HasField(name):
            return read(getattr(msg, name))
        if default is dataclasses.MISSING:
            raise InvalidRequest("a part of the message is missing", field=name)
        return default

    return read_message


def _value(hint: Any, field: Shape, own: Plans) -> _Value | None:
    """None: taken and given as it stands."""
    if hint in _PLAIN:
        return None
    if isinstance(hint, type) and issubclass(hint, Enum):
        numbers: Numbers[Any] = Numbers(hint, field.enum_type, field.name)
        return _Value(numbers.write, numbers.read)
    if dataclasses.is_dataclass(hint):
        plan = _compile(hint, field.message_type, own, ())  # type: ignore[arg-type]
        return _Value(plan.write, plan.read)
    if get_origin(hint) is not tuple:
        return _Value(dict, dict)
    item, *rest = get_args(hint)
    if rest != [...]:
        return _row(field.message_type)
    if item is bytes:
        return _Value(b"".join, lambda joined: _hashes(field.name, joined))
    if get_origin(item) is tuple and get_args(item)[-1] is ...:
        return _each(_run(field.message_type))
    return _each(_value(item, field, own))


def _row(descriptor: Shape) -> _Value:
    kind: Any = GetMessageClass(descriptor)
    names = tuple(field.name for field in descriptor.fields)
    return _Value(lambda row: kind(**dict(zip(names, row))), _taker(names))


def _run(descriptor: Shape) -> _Value:
    kind: Any = GetMessageClass(descriptor)
    [name] = (field.name for field in descriptor.fields)
    return _Value(lambda run: kind(**{name: run}), lambda msg: tuple(getattr(msg, name)))


def _each(value: _Value | None) -> _Value:
    if value is None:
        return _Value(None, tuple)
    write, read = value.write, value.read
    assert write is not None
    return _Value(
        lambda items: [write(item) for item in items], lambda items: tuple([read(item) for item in items])
    )


def _hashes(name: str, joined: bytes) -> tuple[bytes, ...]:
    if len(joined) % HASH_BYTES:
        raise InvalidRequest("block hashes must be 16 bytes each", field=name, num_bytes=len(joined))
    return tuple([joined[at : at + HASH_BYTES] for at in range(0, len(joined), HASH_BYTES)])
