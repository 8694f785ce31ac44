"""The message for a body that is not valid: the path of the wrong field, what is expected, and what was found."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from lightserve.errors import InvalidRequestError

MAX_PARAM_LENGTH = 100  # characters of a field's path: the client may have chosen parts of it
MAX_COMPARED = 64  # fields of an object where a required one is missing
MAX_ERRORS = 100  # that are examined
MAX_SHOWN = 10  # values in a message
MAX_SHOWN_LENGTH = 40  # characters of one of them
EXPECTED = "Input should be "  # how pydantic's messages begin
OBJECT = "a valid object"  # JSON's word; pydantic names a Python class
MESSAGES = {"model_type": EXPECTED + OBJECT, "dict_type": EXPECTED + OBJECT}
JSON_TYPES = {
    str: "a string",
    bool: "a boolean",
    int: "an integer",
    float: "a float",
    list: "a list",
    dict: "an object",
}
CUTOFF = 0.82  # similarity: max_new_tokens and max_tokens have 0.83; top_a, another sampler, and top_k have 0.8
SEPARATORS = 0.1  # by how much lengths may differ more than CUTOFF allows, because of _ and -
MAX_NAME_LENGTH = 64  # characters of a name that is compared; comparing takes quadratic time


def invalid_request(error: ValidationError, value: Any) -> InvalidRequestError:
    """The error of the first wrong field. ``value`` is the body."""
    details = error.errors(include_url=False, include_input=False, include_context=False)[:MAX_ERRORS]
    paths = [_path(value, detail) for detail in details]
    # a field of several types has an error for each type: the deepest path is of the type that fits best
    deepest = max((path for path in paths if path[: len(paths[0])] == paths[0]), key=len)
    chosen = [detail for detail, path in zip(details, paths, strict=True) if path == deepest]
    param = ".".join(map(str, deepest))[:MAX_PARAM_LENGTH]
    kinds = [detail["type"] for detail in chosen]
    message = _too_large(value, deepest, kinds) or _joined(chosen) + _found(value, deepest, kinds)
    return InvalidRequestError(f"{param}: {message}" if param else message, param or None)


def _path(value: Any, details: ErrorDetails) -> list[int | str]:
    """The keys and indices of the wrong field. pydantic adds the names of types where there are several."""
    path: list[int | str] = []
    for key in details["loc"]:
        if _has(value, key):
            value = value[key]
            path.append(key)
    if details["type"] == "missing":
        path.append(details["loc"][-1])
    return path


def _has(value: Any, key: int | str) -> bool:
    if isinstance(value, dict):
        return key in value
    return isinstance(value, list) and isinstance(key, int) and key < len(value)


def _joined(details: Iterable[ErrorDetails]) -> str:
    first, *others = dict.fromkeys(MESSAGES.get(detail["type"], detail["msg"]) for detail in details)
    return " or ".join([first, *(message.removeprefix(EXPECTED) for message in others)])


def _found(value: Any, path: Sequence[int | str], kinds: Sequence[str]) -> str:
    if not path:
        return ""
    if "missing" in kinds:
        return _found_instead(_at(value, path[:-1]), str(path[-1]))
    is_type = all(kind.endswith("_type") for kind in kinds)
    return f", not {JSON_TYPES.get(type(_at(value, path)), 'null')}" if is_type else ""


def _too_large(value: Any, path: Sequence[int | str], kinds: Sequence[str]) -> str:
    """The message for an integer of more than 64 bits: the parser makes it a float."""
    wrong_value = _at(value, path) if "int_type" in kinds else None
    if not isinstance(wrong_value, float) or abs(wrong_value) < 2**63:
        return ""
    return EXPECTED + (f"greater than or equal to {-(2**63)}" if wrong_value < 0 else f"less than {2**63}")


def _at(value: Any, path: Sequence[int | str]) -> Any:
    for key in path:
        value = value[key]
    return value


def _found_instead(value: Any, missing: str) -> str:
    """The unknown field that may mean the missing one."""
    names = list(value)[:MAX_COMPARED] if isinstance(value, dict) else []
    near = similar_name(missing, [name for name in names if len(name) <= MAX_NAME_LENGTH])
    return "" if near is None else f"; found the unknown field {printable_name(near)}"


def listed(values: Sequence[object]) -> str:
    """The first values, for a message. A client may have chosen them."""
    shown = ", ".join(repr(value)[:MAX_SHOWN_LENGTH] for value in values[:MAX_SHOWN])
    more = len(values) - MAX_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown


def similar_name(name: str, known: Sequence[str]) -> str | None:
    if len(name) > MAX_NAME_LENGTH:
        return None
    plain, letters = _plain(name), _letters(name)
    known = [candidate for candidate in known if _may_be_similar(name, candidate)]
    same = [candidate for candidate in known if _plain(candidate) == plain or _letters(candidate) == letters]
    near = same or difflib.get_close_matches(name, known, n=1, cutoff=CUTOFF)
    return near[0] if near else None


def _may_be_similar(name: str, candidate: str) -> bool:
    """A quick check of the lengths: difflib takes 10 us for a pair. A minimum is not a maximum."""
    is_near = 2 * min(len(name), len(candidate)) >= (CUTOFF - SEPARATORS) * (len(name) + len(candidate))
    return is_near and {name[:3], candidate[:3]} != {"min", "max"}


def printable_name(name: str) -> str:
    """For a header or a log: a client has chosen it."""
    return re.sub(r"[^A-Za-z0-9_.-]", "?", name[:MAX_NAME_LENGTH])


@lru_cache(maxsize=4096)
def _letters(name: str) -> str:
    return "".join(sorted(name))


@lru_cache(maxsize=4096)
def _plain(name: str) -> str:
    """maxTokens, max-tokens and max_tokens are the same."""
    return re.sub(r"[-_\s]", "", name).lower()
