"""Checks before operators, methods and filters of a template whose result may be much larger than what they are given.

A guard gets what the call gets, after the budget, and raises if the result could not be paid for.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from string import Formatter
from typing import Any

from jinja2.exceptions import SecurityError

from lightserve.model_files.template.budget import ITEM_BYTES, TEXT_FACTOR, RenderBudget

Guard = Callable[..., None]

MAX_BITS = 4096  # of integers
MAX_WIDTH = 999  # of a formatted value
MAX_PRECISION = 100  # of the filter round
LINE_BREAKS = "\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"
_TOO_WIDE = re.compile(r"[%)][#0\- +]*(?:\*|\d{4}|\d*\.(?:\*|\d{4}))")  # in a text for the operator %


# operators


def multiply(budget: RenderBudget, left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())
    elif isinstance(left, int):
        budget.need(_size(right) * max(left, 0))
    elif isinstance(right, int):
        budget.need(_size(left) * max(right, 0))
    return budget.made(left * right)


def power(budget: RenderBudget, base: Any, exponent: Any) -> Any:
    if isinstance(base, int) and isinstance(exponent, int):
        _check_bits(base.bit_length() * max(exponent, 0))
    return base**exponent


def modulo(budget: RenderBudget, left: Any, right: Any) -> Any:
    if isinstance(left, str):
        format_percent(budget, left, right)
    return budget.made(left % right)


BINARY: Mapping[str, Callable[[RenderBudget, Any, Any], Any]] = {
    "*": multiply,
    "**": power,
    "%": modulo,
}


def format_percent(budget: RenderBudget, text: str, *values: Any, **named: Any) -> None:
    if _TOO_WIDE.search(text):
        raise SecurityError(f"a width in a format must be at most {MAX_WIDTH}")
    budget.need(len(text) + text.count("%") * _shown_size(budget, [*values, *named.values()]))


def _check_bits(bits: int) -> None:
    if bits > MAX_BITS:
        raise SecurityError(f"an integer must have at most {MAX_BITS} bits")


def _size(value: Any) -> int:
    """The bytes that a copy of it adds to a larger value."""
    if isinstance(value, str):
        return len(value) if value.isascii() else TEXT_FACTOR * len(value)
    return ITEM_BYTES * len(value) if isinstance(value, list | tuple | dict) else ITEM_BYTES


def _shown_size(budget: RenderBudget, values: Any) -> int:
    before = budget.size
    budget.walk(values)
    return before - budget.size + ITEM_BYTES * len(values)


# methods of strings: those that are not listed cannot be called


def _width(budget: RenderBudget, text: str, width: Any, *_: Any) -> None:
    budget.need(TEXT_FACTOR * operator.index(width))


def _replace(budget: RenderBudget, text: str, old: str, new: str, *_: Any) -> None:
    budget.need(_size(text) + text.count(old) * _size(new))


def _join(budget: RenderBudget, text: str, parts: Any) -> None:
    if not isinstance(parts, list | tuple | dict):
        raise SecurityError("join takes a list")  # of others, a guard could not look at the parts
    budget.need(sum(map(_size, parts)) + _size(text) * len(parts))


def _expand_tabs(budget: RenderBudget, text: str, tab_size: Any = 8) -> None:
    budget.need(TEXT_FACTOR * (len(text) + text.count("\t") * operator.index(tab_size)))


def _split(budget: RenderBudget, text: str, separator: str | None = None, *_: Any, **__: Any) -> None:
    """Without a separator the number of parts is not known; half of the characters may be one."""
    count = len(text) // 2 if separator is None else text.count(separator)
    if ITEM_BYTES * count > budget.size:  # a long text usually has longer words
        count = len(text.split(separator, budget.size // ITEM_BYTES + 1))
    budget.need(_size(text) + ITEM_BYTES * count)


def _split_lines(budget: RenderBudget, text: str, *_: Any, **__: Any) -> None:
    budget.need(_size(text) + ITEM_BYTES * sum(map(text.count, LINE_BREAKS)))


def _format(budget: RenderBudget, text: str, *values: Any, **named: Any) -> None:
    for _, _, spec, _ in Formatter().parse(text):
        if spec and ("{" in spec or re.search(r"\d{4}", spec)):
            raise SecurityError(f"a width in a format must be a number of at most {MAX_WIDTH}")
    budget.need(len(text) + text.count("{") * _shown_size(budget, [*values, *named.values()]))


# their result is not larger than the text
FREE_STRING_METHODS = frozenset(
    {
        *("capitalize", "casefold", "lower", "swapcase", "title", "upper"),
        *("strip", "lstrip", "rstrip", "removeprefix", "removesuffix", "partition", "rpartition"),
        *("count", "find", "index", "rfind", "rindex", "startswith", "endswith"),
        *(name for name in dir(str) if name.startswith("is")),
    }
)
STRING_METHODS: Mapping[str, Guard] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _width),
    **dict.fromkeys(("split", "rsplit"), _split),
    **dict.fromkeys(("format", "format_map"), _format),
    "replace": _replace,
    "join": _join,
    "expandtabs": _expand_tabs,
    "splitlines": _split_lines,
}
# of other types: methods that compare get a guard, those that copy are paid for afterwards
METHODS: Mapping[type, frozenset[str]] = {
    list: frozenset({"copy", "count", "index"}),
    tuple: frozenset({"count", "index"}),
    dict: frozenset({"copy", "get", "items", "keys", "values"}),
    int: frozenset({"bit_length", "is_integer"}),
    float: frozenset({"is_integer"}),
}


# filters


def _filter_format(budget: RenderBudget, value: Any, *values: Any, **named: Any) -> None:
    format_percent(budget, str(value), *values, **named)


def _filter_center(budget: RenderBudget, value: Any, width: Any = 80) -> None:
    _width(budget, "", width)


def _filter_replace(budget: RenderBudget, s: Any, old: Any, new: Any, count: Any = None) -> None:
    _replace(budget, str(s), str(old), str(new))


def _filter_indent(budget: RenderBudget, s: Any, width: Any = 4, first: bool = False, blank: bool = False) -> None:
    each = len(width) if isinstance(width, str) else operator.index(width)
    budget.need((TEXT_FACTOR * each + ITEM_BYTES) * (str(s).count("\n") + 2))


def _filter_batch(budget: RenderBudget, value: Any, linecount: Any, fill_with: Any = None) -> None:
    budget.need(ITEM_BYTES * operator.index(linecount))


def _filter_round(budget: RenderBudget, value: Any, precision: Any = 0, method: str = "common") -> None:
    if abs(precision) > MAX_PRECISION:
        raise SecurityError(f"round: the precision must be at most {MAX_PRECISION}")


def _filter_sum(budget: RenderBudget, iterable: Any, attribute: Any = None, start: Any = 0) -> None:
    if not isinstance(start, int | float):
        raise SecurityError("sum adds numbers")  # lists would be copied once for each of them


def _filter_join(budget: RenderBudget, value: list[Any], d: Any = "", attribute: Any = None) -> None:
    budget.need(_size(str(d)) * len(value))


def _filter_words(budget: RenderBudget, s: Any) -> None:
    budget.need(ITEM_BYTES * len(str(s)))  # it makes a list of the words


def _filter_escape(budget: RenderBudget, value: Any) -> None:
    budget.need(12 * len(str(value)))


FILTERS: Mapping[str, Guard] = {
    "batch": _filter_batch,
    "center": _filter_center,
    "format": _filter_format,
    "indent": _filter_indent,
    "join": _filter_join,
    "replace": _filter_replace,
    "round": _filter_round,
    "sum": _filter_sum,
    **dict.fromkeys(("title", "wordcount"), _filter_words),
    **dict.fromkeys(("e", "escape", "forceescape", "urlencode"), _filter_escape),
}
# they do not look into what a list contains
SHALLOW_FILTERS = frozenset(
    {
        *("abs", "attr", "batch", "count", "d", "default", "first", "items", "last", "length", "list", "map", "random"),
        *("reject", "rejectattr", "reverse", "round", "select", "selectattr", "slice", "sum"),
    }
)
# they take any iterable: the lazy ones get one whose items are counted, the others a list of the items
LAZY_FILTERS = frozenset({"map", "reject", "rejectattr", "select", "selectattr"})
LISTING_FILTERS = frozenset({"batch", "groupby", "join", "list", "max", "min", "slice", "sort", "sum", "unique"})
# of web pages; they may take very long
REMOVED_FILTERS = frozenset({"pprint", "striptags", "urlize", "wordwrap", "xmlattr"})
COMPARING_TESTS = frozenset(
    {
        *("!=", "<", "<=", "==", ">", ">=", "eq", "equalto", "ge", "greaterthan", "gt", "in", "le", "lessthan", "lt"),
        "ne",
    }
)
