"""Dataclasses to protobuf and back, field by field of the same name; compiled once for each class.

    field of the dataclass        field of the message
    int, float, str, bytes, bool  the same; `| None`: optional
    an enum                       an enum, whose names have a prefix; `| None`: 0, which is refused otherwise
    a dataclass                   a message; absent: None, or the field's default; refused where there is neither
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
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Generic,
    NoReturn,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from pdserve.blockhash import HASH_BYTES
from pdserve.errors import InvalidRequest

T = TypeVar("T")
M = TypeVar("M", bound=Message)

Shape = Any
"""A descriptor of protobuf's: its stubs know several kinds of them."""


@dataclass(frozen=True, slots=True)
class Converter(Generic[T, M]):
    """How one class is written to its message and read from it; `read` raises InvalidRequest."""

    write: Callable[[T], M]
    read: Callable[..., T]


Converters = Mapping[type[Any], Converter[Any, Any]]
"""Classes that are converted by other rules than this module's."""


def compile_converter(
    cls: type[T], kind: type[M], own: Converters | None = None, beside: tuple[str, ...] = ()
) -> Converter[T, M]:
    """The converter of a dataclass. beside: fields that its message doesn't hold, for the caller to give to `read`.

    Raises TypeError if the two have different fields.
    """
    return _compile(cls, kind.DESCRIPTOR, own or {}, beside)


class OneOf(Generic[T]):
    """A message that holds one of several in a `oneof`, as a union of our classes.

    Each class goes by the name of its field, or of its message. Fields of the envelope itself belong to every class
    that has them.
    """

    def __init__(self, union: Any, envelope: type[Message], own: Converters | None = None) -> None:
        [oneof] = envelope.DESCRIPTOR.oneofs
        inside: dict[str, Shape] = {field.name: field.message_type for field in oneof.fields}
        outside = [field.name for field in envelope.DESCRIPTOR.fields if field.name not in inside]
        classes = {cls.__name__: cls for cls in get_args(union)}
        self._envelope = envelope
        self._name = oneof.name
        self._by_class: dict[type, tuple[str, Converter[T, Any], tuple[str, ...]]] = {}
        self._by_field: dict[str, tuple[Converter[T, Any], tuple[str, ...]]] = {}
        for field, message in inside.items():
            cls = classes.get(message.name) or classes[field.title().replace("_", "")]
            beside = tuple(name for name in outside if name in cls.__dataclass_fields__)
            converter = _compile(cls, message, own or {}, beside)
            self._by_class[cls] = field, converter, beside
            self._by_field[field] = converter, beside
        if len(self._by_class) != len(classes):
            raise TypeError(f"{envelope.DESCRIPTOR.full_name} doesn't hold all of {sorted(classes)}")

    def write(self, message: T) -> Any:
        """Our message in its envelope."""
        name, converter, beside = self._by_class[type(message)]
        inner = converter.write(message)
        if not beside:
            return self._envelope(**{name: inner})
        return self._envelope(**{name: inner}, **{each: getattr(message, each) for each in beside})

    def read(self, msg: Any) -> T | None:
        """None: nothing that this version knows. Raises InvalidRequest."""
        name = msg.WhichOneof(self._name)
        if name is None:
            return None
        converter, beside = self._by_field[name]
        inner = getattr(msg, name)
        if not beside:
            return converter.read(inner)
        return converter.read(inner, **{each: getattr(msg, each) for each in beside})


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


def _compile(
    cls: type[Any], descriptor: Shape, own: Converters, beside: tuple[str, ...]
) -> Converter[Any, Any]:
    if cls in own:
        return own[cls]
    fields = {field.name: field for field in dataclasses.fields(cls) if field.name not in beside}
    there = dict(descriptor.fields_by_name)
    derived = [name for name in there if name not in fields]
    if not fields.keys() <= there.keys() or not all(
        isinstance(getattr(cls, n, None), property) for n in derived
    ):
        raise TypeError(f"{cls.__name__} and {descriptor.full_name} have different fields")

    source = _Source(own)
    hints = get_type_hints(cls, include_extras=True)
    written = {name: f"message.{name}" for name in derived}
    read = {name: name for name in beside}
    checks: list[str] = []
    for name, field in fields.items():
        hint = hints[name]
        if get_origin(hint) is Annotated:
            hint, *found = get_args(hint)
            checks += [f"{source.name(check)}({name!r}, message.{name})" for check in found]
        form = source.field(hint, there[name], field.default)
        written[name] = form.write.format(f"message.{name}")
        read[name] = form.read.format(f"msg.{name}")
    checks += [f"{source.name(_agree)}({n!r}, msg.{n}, message.{n})" for n in derived]
    if hasattr(cls, "check"):
        checks.append("message.check()")
    return source.converter(cls, GetMessageClass(descriptor), written, read, checks, beside)


@dataclass(frozen=True, slots=True)
class _Form:
    """How a value is converted: an expression each way, with {0} for the value."""

    write: str = "{0}"
    read: str = "{0}"


_PLAIN = _Form()


class _Source:
    """Source of a converter's two functions, as `dataclasses` writes an __init__: faster than a loop over fields."""

    def __init__(self, own: Converters) -> None:
        self._own = own
        self._scope: dict[str, Any] = {}

    def name(self, thing: Any) -> str:
        """By which the source calls this object."""
        name = f"_{len(self._scope)}"
        self._scope[name] = thing
        return name

    def converter(
        self,
        cls: type[Any],
        kind: Any,
        written: Mapping[str, str],
        read: Mapping[str, str],
        checks: list[str],
        beside: tuple[str, ...],
    ) -> Converter[Any, Any]:
        """Compile what write and read give to the message and to the class."""
        lines = (
            "def write(message):",
            f"    return {self.name(kind)}({', '.join(f'{name}={value}' for name, value in written.items())})",
            f"def read({', '.join(('msg', *beside))}):",
            f"    message = {self.name(cls)}({', '.join(f'{name}={value}' for name, value in read.items())})",
            *(f"    {check}" for check in checks),
            "    return message",
        )
        exec("\n".join(lines), self._scope)
        return Converter(self._scope["write"], self._scope["read"])

    def field(self, hint: Any, field: Shape, default: Any) -> _Form:
        """How a field of this type is converted, which may be absent in one of the two."""
        if get_origin(hint) in (Union, UnionType):
            [hint] = (each for each in get_args(hint) if each is not NoneType)
            form = self.value(hint, field)
            is_there = f"msg.HasField({field.name!r})" if field.has_presence else "{0}"
            write = form.write if form.write == "{0}" else f"None if {{0}} is None else {form.write}"
            return _Form(write, f"{form.read} if {is_there} else None")
        form = self.value(hint, field)
        if not field.has_presence:
            return form
        is_there = f"msg.HasField({field.name!r})"
        if default is dataclasses.MISSING:
            return _Form(form.write, f"{form.read} if {is_there} else {self.name(_missing)}({field.name!r})")
        absent = self.name(default)
        return _Form(
            f"None if {{0}} == {absent} else {form.write}", f"{form.read} if {is_there} else {absent}"
        )

    def value(self, hint: Any, field: Shape) -> _Form:
        """How a value of this type is converted."""
        if hint in (int, float, str, bytes, bool):
            return _PLAIN
        if isinstance(hint, type) and issubclass(hint, Enum):
            numbers: Numbers[Any] = Numbers(hint, field.enum_type, field.name)
            return self._calls(numbers.write, numbers.read)
        if dataclasses.is_dataclass(hint):
            converter = _compile(hint, field.message_type, self._own, ())  # type: ignore[arg-type]
            return self._calls(converter.write, converter.read)
        if get_origin(hint) is not tuple:
            return self._calls(dict, dict)
        item, *rest = get_args(hint)
        if rest != [...]:
            return self._row(field.message_type)
        if item is bytes:
            return _Form("b''.join({0})", f"{self.name(_hashes)}({field.name!r}, {{0}})")
        is_run = get_origin(item) is tuple and get_args(item)[-1] is ...
        form = self._run(field.message_type) if is_run else self.value(item, field)
        if form is _PLAIN:
            return _Form(read="tuple({0})")
        write, read = form.write.format("each"), form.read.format("each")
        # Most are empty, and a loop that has nothing to do takes time as well.
        write, read = f"[{write} for each in {{0}}]", f"tuple([{read} for each in {{0}}])"
        return _Form(f"({write} if {{0}} else ())", f"({read} if {{0}} else ())")

    def _calls(self, write: Callable[[Any], Any], read: Callable[[Any], Any]) -> _Form:
        return _Form(f"{self.name(write)}({{0}})", f"{self.name(read)}({{0}})")

    def _row(self, descriptor: Shape) -> _Form:
        names = [field.name for field in descriptor.fields]
        values = ", ".join(f"{name}={{0}}[{index}]" for index, name in enumerate(names))
        kind = self.name(GetMessageClass(descriptor))
        return _Form(f"{kind}({values})", f"({', '.join(f'{{0}}.{name}' for name in names)})")

    def _run(self, descriptor: Shape) -> _Form:
        [field] = descriptor.fields
        return _Form(
            f"{self.name(GetMessageClass(descriptor))}({field.name}={{0}})", f"tuple({{0}}.{field.name})"
        )


def _missing(name: str) -> NoReturn:
    raise InvalidRequest("a part of the message is missing", field=name)


def _agree(name: str, told: Any, derived: Any) -> None:
    if told != derived:
        raise InvalidRequest("a field contradicts the others", field=name, value=told)


def _hashes(name: str, joined: bytes) -> tuple[bytes, ...]:
    if len(joined) % HASH_BYTES:
        raise InvalidRequest("block hashes must be 16 bytes each", field=name, num_bytes=len(joined))
    return tuple([joined[at : at + HASH_BYTES] for at in range(0, len(joined), HASH_BYTES)])
