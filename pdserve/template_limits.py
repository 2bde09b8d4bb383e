"""What one rendering of a chat template may do: turns, time, text, and the size of every value on its way.

Templates are not trusted. A loop is cut at its next turn; a single operation that could make a huge value out of small
ones (padding, repeating, replacing, joining, powers, lists inside lists) is measured before it runs, so nothing has to
be stopped in the middle.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from typing import Any

from jinja2 import pass_context
from jinja2.runtime import Context
from jinja2.utils import _PassArg

from pdserve.clock import Clock

BUDGET = "_pdserve_budget"  # among the variables of a rendering
MAX_TEXT_CHARS = 16 << 20  # of one value, and of the whole answer
MAX_WRITTEN_CHARS = 4 * MAX_TEXT_CHARS  # by all expressions, what ends in variables included
MAX_PRODUCED_CHARS = 16 * MAX_TEXT_CHARS  # by filters that are applied item by item
MAX_TURNS = 100_000  # of all loops and macros together: some seconds
MAX_ITEMS = 200_000  # of one value, the items of its items included
MAX_RENDER_S = 5.0
_MAX_NUMBER = 1_000_000  # width, count or indentation
_MAX_BITS = 8_192  # of a whole number
_MAX_POWER = 64

STR_METHODS = frozenset(
    (
        "capitalize casefold center count endswith expandtabs find format format_map index isalnum isalpha isascii "
        "isdecimal isdigit isidentifier islower isnumeric isprintable isspace istitle isupper join ljust lower lstrip "
        "partition removeprefix removesuffix replace rfind rindex rjust rpartition rsplit rstrip split splitlines "
        "startswith strip swapcase title upper zfill"
    ).split()
)
_WIDTH_METHODS = ("center", "ljust", "rjust", "zfill")
# Filters whose numbers say how much they make.
_SIZED_FILTERS = ("batch", "center", "indent", "round", "slice", "tojson", "truncate", "wordwrap")
_HUGE_WIDTH = re.compile(r"\d{7,}")


class OverLimit(Exception):
    """A template would do too much of something."""

    def __init__(self, what: str, limit: float) -> None:
        super().__init__(what)
        self.what = what
        self.limit = limit


class Budget:
    """What one rendering may still do. One owner: the thread that renders."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ends_s = clock.now_s() + MAX_RENDER_S
        self._turns_left = MAX_TURNS
        self._written_left = MAX_WRITTEN_CHARS
        self._produced_left = MAX_PRODUCED_CHARS

    @classmethod
    def of(cls, context: Context) -> Budget:
        """The rendering's own: `parent` holds what `render` was given; a template's own `set` can't reach it."""
        budget: Budget = context.parent[BUDGET]
        return budget

    def turn(self, fixed_chars: int) -> None:
        """A loop or macro begins its body again, whose fixed text has so many characters."""
        self._turns_left -= 1
        if self._turns_left < 0:
            raise OverLimit("looping", MAX_TURNS)
        self._check_time()
        self._write(fixed_chars)

    def written(self, value: Any) -> str:
        """The text of a value that an expression writes."""
        text = text_of(value)
        self._write(len(text))
        return text

    def produced(self, value: Any) -> Any:
        """A filter's result: measured now, or item by item if it is lazy."""
        self._check_time()
        if isinstance(value, Iterator):
            return self._items(value)
        return bounded(value)

    def _items(self, items: Iterator[Any]) -> Iterator[Any]:
        for item in items:
            self._check_time()
            if isinstance(item, str):
                self._produced_left -= len(item)
                if self._produced_left < 0:
                    raise OverLimit("text", MAX_PRODUCED_CHARS)
            yield item

    def _write(self, num_chars: int) -> None:
        self._written_left -= num_chars
        if self._written_left < 0:
            raise OverLimit("text", MAX_WRITTEN_CHARS)

    def _check_time(self) -> None:
        if self._clock.now_s() > self._ends_s:
            raise OverLimit("time", MAX_RENDER_S)


def bounded(value: Any) -> Any:
    """The value itself, if it isn't too big, with all that it holds."""
    if isinstance(value, str):
        check_length(len(value))
    elif isinstance(value, int):
        if value.bit_length() > _MAX_BITS:
            raise OverLimit("arithmetic", _MAX_BITS)
    elif isinstance(value, list | tuple | dict):
        _weigh(value)
    return value


def text_of(value: Any) -> str:
    """A value as text; lists inside lists are measured first."""
    return value if isinstance(value, str) else str(bounded(value))


def check_length(num_chars: int) -> None:
    """Of a text that would come to be."""
    if num_chars > MAX_TEXT_CHARS:
        raise OverLimit("text", MAX_TEXT_CHARS)


def check_operator(operator: str, left: Any, right: Any) -> None:
    """Before `left operator right`."""
    if operator == "*":
        for one, other in ((left, right), (right, left)):
            if isinstance(one, str | list | tuple) and isinstance(other, int):
                check_length(len(one) * other)
        if isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() + right.bit_length())
    elif operator == "**":
        if isinstance(right, int | float) and abs(right) > _MAX_POWER:
            raise OverLimit("arithmetic", _MAX_POWER)
        if isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * right)
    elif operator == "%" and isinstance(left, str):
        _check_formatting(left, "%", right if isinstance(right, tuple) else (right,), {})


def check_call(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Before a method of a text is called. Returns the arguments, with a lazy one taken in."""
    # A formatting method comes wrapped, with the method inside.
    method = getattr(function, "__wrapped__", function)
    owner = getattr(method, "__self__", None)
    if not isinstance(owner, str):
        return args
    name = method.__name__
    if name in _WIDTH_METHODS:
        _check_numbers(args)
    elif name == "expandtabs":
        _check_numbers([*args, *kwargs.values()])
        sizes = [size for size in [*args, *kwargs.values(), 8] if isinstance(size, int)]
        check_length(len(owner) + owner.count("\t") * sizes[0])
    elif name in ("format", "format_map"):
        _check_formatting(owner, "{", args, kwargs)
    elif name == "replace" and len(args) >= 2:
        _check_replacing(owner, args[0], args[1])
    elif name == "join" and args:
        return (_check_joining(owner, args[0]),)
    return args


def bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that is measured: what it is asked before, what it makes afterwards."""
    passed = _PassArg.from_obj(function)

    @pass_context
    @wraps(function)
    def measured(context: Context, value: Any = None, *args: Any, **kwargs: Any) -> Any:
        budget = Budget.of(context)
        value = _check_filter(name, value, args, kwargs)
        if passed is _PassArg.context:
            result = function(context, value, *args, **kwargs)
        elif passed is _PassArg.eval_context:
            result = function(context.eval_ctx, value, *args, **kwargs)
        elif passed is _PassArg.environment:
            result = function(context.environment, value, *args, **kwargs)
        else:
            result = function(value, *args, **kwargs)
        return budget.produced(result)

    return measured


def _check_filter(name: str, value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    given = [*args, *kwargs.values()]
    if name in _SIZED_FILTERS:
        _check_numbers(given, most=100 if name == "round" else _MAX_NUMBER)
    if name in ("indent", "wordwrap") and isinstance(value, str):
        added = max((len(text) for text in given if isinstance(text, str)), default=0)
        lines = value.count("\n") + 1 if name == "indent" else len(value)
        numbers = [number for number in given if isinstance(number, int)]
        check_length(
            len(value) + lines * max(added, *numbers, 1) if name == "indent" else lines * max(added, 1)
        )
    elif name == "format" and isinstance(value, str):
        _check_formatting(value, "%", args, kwargs)
    elif name == "replace" and len(args) >= 2:
        _check_replacing(text_of(value), args[0], args[1])
    elif name == "join":
        separator = given[0] if given and isinstance(given[0], str) else ""
        return value if isinstance(value, str) else _check_joining(separator, value)
    elif name == "tojson" and given:
        _, num_items = _weigh(value)
        check_length(num_items * max([number for number in given if isinstance(number, int)], default=0))
    return value


def _check_numbers(numbers: Iterable[Any], most: int = _MAX_NUMBER) -> None:
    for number in numbers:
        if isinstance(number, int | float) and abs(number) > most:
            raise OverLimit("padding", most)


def _check_bits(num_bits: int) -> None:
    if num_bits > _MAX_BITS:
        raise OverLimit("arithmetic", _MAX_BITS)


def _check_replacing(text: str, old: Any, new: Any) -> None:
    if isinstance(old, str) and isinstance(new, str):
        check_length(len(text) + text.count(old) * len(new))


def _check_joining(separator: str, items: Any) -> Any:
    if not isinstance(items, Iterable):
        return items
    taken, num_chars = [], 0
    for item in items:
        taken.append(item)
        num_chars += len(separator) + (len(item) if isinstance(item, str) else 0)
        check_length(num_chars)
    return taken


def _check_formatting(form: str, sign: str, args: Iterable[Any], kwargs: Mapping[str, Any]) -> None:
    """Widths in the form, widths among the values, and the same value written many times."""
    values = [*args, *(kwargs.values() if isinstance(kwargs, Mapping) else ())]
    values += [item for value in values if isinstance(value, Mapping) for item in value.values()]
    texts = [form, *(value for value in values if isinstance(value, str) and len(value) < 100)]
    if any(_HUGE_WIDTH.search(text) for text in texts):
        raise OverLimit("padding", _MAX_NUMBER)
    if "*" in form or "{" in form.replace("{", "", 1):
        _check_numbers(values)
    check_length(len(form) + form.count(sign) * sum(_weigh(value)[0] for value in values))


def _weigh(value: Any) -> tuple[int, int]:
    """Characters and items of a value, those inside its items counted each time they appear."""
    num_chars = num_items = 0
    waiting = [value]
    while waiting:
        found = waiting.pop()
        num_items += 1
        if isinstance(found, str):
            num_chars += len(found)
        elif isinstance(found, dict):
            waiting.extend(found.keys())
            waiting.extend(found.values())
        elif isinstance(found, list | tuple):
            waiting.extend(found)
        if num_items + len(waiting) > MAX_ITEMS:
            raise OverLimit("nesting", MAX_ITEMS)
        check_length(num_chars)
    return num_chars, num_items
