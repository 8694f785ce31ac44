"""Unknown fields of a body that are near a known one: most likely a typing error, or another API's name.

Other unknown fields are accepted in silence, because clients send fields of other servers.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple, get_args

from lightserve.errors import InvalidRequestError
from lightserve.httpserver.wire.body import Body
from lightserve.httpserver.wire.similar_names import printable_name, similar_name
from lightserve.utils.logger import init_logger

logger = init_logger(__name__)

MAX_NAMES = 64  # unknown fields of an object that are compared
MAX_OBJECTS = 128  # objects of a body that are examined: a chat may have thousands of messages
MAX_REPORTED = 5  # of one body
MAX_LOGGED = 1000  # spellings that the log names, once each
# the names that APIs have for the maximum number of new tokens; without it a response may be very long
MAXIMUM_NAMES = (
    "max_tokens",
    "max_new_tokens",
    "max_output_tokens",
    "max_completion_tokens",
    "num_predict",
    "n_predict",
    "max_length",
)
INNER_OBJECTS = frozenset({"parameters", "options", "stream_options"})
FOREIGN = frozenset({"models", "speed", "bootstrap_port"})  # of OpenRouter, Anthropic and SGLang, not misspelt


class NearMiss(NamedTuple):
    path: str  # of the unknown field
    nearest: str  # the known field

    def __str__(self) -> str:
        return f"unknown field {self.path}; did you mean {self.nearest}?"


class UnknownFields:
    """Reports near misses. The log names each spelling once."""

    def __init__(self) -> None:
        self._logged: set[tuple[str, str]] = set()

    def check(self, body: Body, is_strict: bool, route: str) -> str | None:
        """The header ``Warning`` of the response; None: there is nothing to report. With ``is_strict`` it is an error.

        A path has only ASCII letters, digits and ``_.-``: a client may have chosen parts of it.
        """
        misses = near_misses(body)
        if misses and is_strict:
            raise InvalidRequestError(f"{misses[0]} (--strict_fields refuses it)", misses[0].path)
        for miss in misses:
            spelling = (route, miss.path.rpartition(".")[2])
            if len(self._logged) < MAX_LOGGED and spelling not in self._logged:
                self._logged.add(spelling)
                logger.warning("%s: %s It is ignored. (logged once; --strict_fields refuses it)", route, miss)
        return ", ".join(f'199 lightserve "{miss}"' for miss in misses) or None


def near_misses(body: Body) -> list[NearMiss]:
    found: list[NearMiss] = []
    for index, (path, one) in enumerate(_objects(body, "")):
        if index == MAX_OBJECTS or len(found) >= MAX_REPORTED:
            break
        names = [name for name, value in (one.model_extra or {}).items() if value is not None]
        for name in names[:MAX_NAMES]:
            nearest = nearest_field(type(one), name)
            if nearest is not None:
                found.append(NearMiss(f"{path}{printable_name(name)}", f"{path}{nearest}"))
    return found[:MAX_REPORTED]


def _objects(body: Body, path: str) -> Iterator[tuple[str, Body]]:
    """The body and every object in it, each with the path before the names of its fields."""
    yield path, body
    for name, value in body.__dict__.items():
        if isinstance(value, Body):
            yield from _objects(value, f"{path}{name}.")
        elif isinstance(value, list):
            for index, item in enumerate(value[:MAX_OBJECTS]):
                if isinstance(item, Body):
                    yield from _objects(item, f"{path}{name}.{index}.")


@lru_cache(maxsize=1024)
def nearest_field(model: type[Body], name: str) -> str | None:
    """The field of ``model`` that ``name`` may mean; None: no field is near, or ``name`` has a meaning of its own."""
    if name in model.other_fields or name in FOREIGN:
        return None
    paths = _inner_fields(model) | {own: own for own in (*sorted(model.other_fields), *_names(model))}
    maximum = next((paths[one] for one in MAXIMUM_NAMES if one in paths), None)
    if maximum is not None:
        paths = dict.fromkeys(MAXIMUM_NAMES, maximum) | paths
    near = similar_name(name, _names(model)) or similar_name(name, list(paths))
    return None if near is None else paths[near]


def _names(model: type[Body]) -> list[str]:
    return [field.alias or name for name, field in model.model_fields.items()]


def _inner_fields(model: type[Body]) -> dict[str, str]:
    """The path of each field of an inner object: clients forget the object around it."""
    found: dict[str, str] = {}
    for outer in INNER_OBJECTS & model.model_fields.keys():
        for inner in get_args(model.model_fields[outer].annotation):
            if issubclass(inner, Body):
                found |= {name: f"{outer}.{name}" for name in _names(inner)}
    return found
