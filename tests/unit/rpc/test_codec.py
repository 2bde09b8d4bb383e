"""The codec knows classes and messages by their fields alone: a new field is a line in the .proto and in the class."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.message_factory import GetMessageClass

from pdserve.errors import InvalidRequest
from pdserve.rpc.codec import compile_converter

F = descriptor_pb2.FieldDescriptorProto


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


def _even(name: str, value: int) -> None:
    if value % 2:
        raise InvalidRequest("want an even number", field=name, value=value)


@dataclass(frozen=True, slots=True)
class Point:
    x: float
    y: float = 2.0


@dataclass(frozen=True, slots=True)
class Shape:
    name: str
    sides: Annotated[int, _even]
    colour: Colour
    edge: Colour | None
    corners: tuple[Point, ...]
    weight: float | None = None
    centre: Point = Point(1.0)
    label: tuple[str, int] = ("none", 0)

    @property
    def heavy(self) -> bool:
        return self.weight is not None

    def check(self) -> None:
        if len(self.corners) > self.sides:
            raise InvalidRequest("more corners than sides", field="corners")


FIELDS: list[dict[str, Any]] = [
    {"name": "name", "type": F.TYPE_STRING},
    {"name": "sides", "type": F.TYPE_UINT32},
    {"name": "colour", "type": F.TYPE_ENUM, "type_name": ".t.Colour"},
    {"name": "edge", "type": F.TYPE_ENUM, "type_name": ".t.Colour"},
    {"name": "corners", "type": F.TYPE_MESSAGE, "type_name": ".t.Point", "label": F.LABEL_REPEATED},
    {"name": "weight", "type": F.TYPE_DOUBLE, "proto3_optional": True, "oneof_index": 0},
    {"name": "centre", "type": F.TYPE_MESSAGE, "type_name": ".t.Point"},
    {"name": "label", "type": F.TYPE_MESSAGE, "type_name": ".t.Label"},
    {"name": "heavy", "type": F.TYPE_BOOL},
]


def kind(fields: list[dict[str, Any]]) -> Any:
    """A message of these fields, as protoc would make it from a .proto."""
    file = descriptor_pb2.FileDescriptorProto(name="t.proto", package="t", syntax="proto3")
    colours = file.enum_type.add(name="Colour")
    for number, name in enumerate(("UNSPECIFIED", "RED", "BLUE")):
        colours.value.add(name=f"COLOUR_{name}", number=number)
    point = file.message_type.add(name="Point")
    for number, name in enumerate("xy", 1):
        point.field.add(name=name, number=number, type=F.TYPE_DOUBLE, label=F.LABEL_OPTIONAL)
    label = file.message_type.add(name="Label")
    label.field.add(name="text", number=1, type=F.TYPE_STRING, label=F.LABEL_OPTIONAL)
    label.field.add(name="size", number=2, type=F.TYPE_UINT32, label=F.LABEL_OPTIONAL)
    shape = file.message_type.add(name="Shape")
    if any("oneof_index" in field for field in fields):
        shape.oneof_decl.add(name="_weight")
    for number, field in enumerate(fields, 1):
        shape.field.add(number=number, **{"label": F.LABEL_OPTIONAL, **field})
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return GetMessageClass(pool.FindMessageTypeByName("t.Shape"))


SHAPE = kind(FIELDS)
FULL = Shape("a", 4, Colour.RED, Colour.BLUE, (Point(0.0), Point(1.0, 3.0)), 0.0, Point(5.0, 6.0), ("big", 7))


@pytest.mark.parametrize("shape", [FULL, Shape("", 0, Colour.BLUE, None, ())], ids=["full", "empty"])
def test_every_rule_of_the_table(shape: Shape) -> None:
    converter = compile_converter(Shape, SHAPE)
    octets = converter.write(shape).SerializeToString()
    assert converter.read(SHAPE.FromString(octets)) == shape


def test_a_new_field_is_a_line_in_the_proto_and_one_in_the_class() -> None:
    """And nothing else; the older reader doesn't see it, the newer one reads the older message by its default."""
    later_kind = kind([*FIELDS, {"name": "depth", "type": F.TYPE_UINT32}])
    later_class: Any = dataclasses.make_dataclass("Shape", [("depth", int, 0)], bases=(Shape,), frozen=True)
    now, later = compile_converter(Shape, SHAPE), compile_converter(later_class, later_kind)
    message: Any = later_class(**{f.name: getattr(FULL, f.name) for f in dataclasses.fields(FULL)}, depth=9)
    octets = later.write(message).SerializeToString()
    assert later.read(later_kind.FromString(octets)) == message
    assert now.read(SHAPE.FromString(octets)) == FULL
    assert later.read(later_kind.FromString(now.write(FULL).SerializeToString())).depth == 0


@pytest.mark.parametrize(
    "fields", [FIELDS[1:], [*FIELDS, {"name": "depth", "type": F.TYPE_UINT32}]], ids=["fewer", "more"]
)
def test_a_class_and_a_message_of_different_fields_do_not_compile(fields: list[dict[str, Any]]) -> None:
    with pytest.raises(TypeError, match="different fields"):
        compile_converter(Shape, kind(fields))


@pytest.mark.parametrize(
    ("octets", "field"),
    [
        (SHAPE(sides=2).SerializeToString(), "colour"),
        (SHAPE(sides=2, colour=1, edge=7).SerializeToString(), "edge"),
        (SHAPE(sides=3, colour=1).SerializeToString(), "sides"),
        (SHAPE(sides=2, colour=1, heavy=True).SerializeToString(), "heavy"),
        (SHAPE(colour=1, corners=[{"x": 1.0}]).SerializeToString(), "corners"),
    ],
)
def test_what_must_not_be_said_is_refused_by_its_field(octets: bytes, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        compile_converter(Shape, SHAPE).read(SHAPE.FromString(octets))
    assert refused.value.fields["field"] == field


def test_a_part_that_is_the_default_is_left_out() -> None:
    """So what is added as a message costs nothing where it isn't used, and changes no bytes that were sent before."""
    converter = compile_converter(Shape, SHAPE)
    assert not converter.write(Shape("", 0, Colour.BLUE, None, ())).HasField("centre")
    assert converter.write(FULL).HasField("centre")


@dataclass(frozen=True, slots=True)
class Framed:
    centre: Point


def test_a_missing_part_without_a_default_is_refused() -> None:
    framed = kind([FIELDS[6]])
    converter = compile_converter(Framed, framed)
    assert converter.read(converter.write(Framed(Point(1.0)))) == Framed(Point(1.0))
    with pytest.raises(InvalidRequest, match=r"missing.*centre"):
        converter.read(framed())
