"""Unknown fields of a body that are near a known one: most likely a typing error, or another API's name.

Other unknown fields are accepted in silence, because clients send fields of other servers.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from typing import NamedTuple, get_args

from lightserve.errors import InvalidRequestError
from lightserve.httpserver.http.body import Body
from lightserve.httpserver.http.validation_errors import MAX_NAME_LENGTH, printable_name, similar_name
from lightserve.utils.logger import init_logger

logger = init_logger(__name__)

MAX_NAMES = 16  # unknown fields of a body that are compared; a new name takes 0.2 ms
MAX_ITEMS = 128  # of a list
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
PLAIN = (str, type(None), int, float, bool)  # types of values without objects; isinstance of a Body takes 1 us
INNER_OBJECTS = frozenset({"parameters", "options", "stream_options"})
FOREIGN = frozenset({"models", "speed", "bootstrap_port"})  # of OpenRouter, Anthropic and SGLang, not misspelt


class NearMiss(NamedTuple):
    path: str  # of the unknown field
    nearest: str  # the known field

    def __str__(self) -> str:
        return f"unknown field {self.path}; did you mean {self.nearest}?"


class UnknownFields:
    """Reports near misses, and roles that only the chat template may know. The log names each spelling once."""

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
            if self._is_new(route, miss.path.rpartition(".")[2]):
                logger.warning("%s: %s It is ignored. (logged once; --strict_fields refuses it)", route, miss)
        return ", ".join(f'199 lightserve "{miss}"' for miss in misses) or None

    def log_role(self, role: str) -> None:
        if self._is_new("role", role):
            logger.warning("messages of the unusual role %r go to the chat template as they are (logged once)", role)

    def _is_new(self, category: str, spelling: str) -> bool:
        """Whether to log it. Clients choose the spellings: the log has no more of them than it remembers."""
        if len(self._logged) >= MAX_LOGGED or (category, spelling) in self._logged:
            return False
        self._logged.add((category, spelling))
        return True


def near_misses(body: Body) -> list[NearMiss]:
    misses: list[NearMiss] = []
    for path, model, name in islice(_unknown_names(body), MAX_NAMES):
        nearest = (
            nearest_field(model, name) if len(name) <= MAX_NAME_LENGTH else None
        )  # its cache would keep a long name
        if nearest is not None:
            misses.append(NearMiss(f"{path}{printable_name(name)}", f"{path}{nearest}"))
    return misses[:MAX_REPORTED]


def _unknown_names(body: Body) -> Iterator[tuple[str, type[Body], str]]:
    for path, body_object in _objects(body, ""):
        extra = body_object.model_extra
        if extra:
            yield from ((path, type(body_object), name) for name, value in extra.items() if value is not None)


def _objects(body: Body, path: str) -> Iterator[tuple[str, Body]]:
    """The body and the objects in it, each with the path before the names of its fields.

    Of a list, only the first objects are examined, and not what is in them: a chat may have thousands of messages.
    """
    yield path, body
    values = body.__dict__
    given = [name for name in body.model_fields_set if type(values.get(name)) not in PLAIN]
    for name in sorted(given):
        value = values[name]
        if isinstance(value, list):
            items = enumerate(value[:MAX_ITEMS])
            yield from ((f"{path}{name}.{i}.", item) for i, item in items if isinstance(item, Body))
        elif isinstance(value, Body):
            yield from _objects(value, f"{path}{name}.")


@lru_cache(maxsize=1024)
def nearest_field(model: type[Body], name: str) -> str | None:
    """The field of ``model`` that ``name`` may mean; None: no field is near, or ``name`` has a meaning of its own."""
    if name in model.other_fields or name in FOREIGN:
        return None
    paths = _paths(model)
    near = similar_name(name, _names(model)) or similar_name(name, list(paths))
    return None if near is None else paths[near]


@lru_cache(maxsize=256)
def _paths(model: type[Body]) -> dict[str, str]:
    """The path of every known name."""
    paths = _inner_fields(model) | {name: name for name in (*sorted(model.other_fields), *_names(model))}
    maximum = next((paths[name] for name in MAXIMUM_NAMES if name in paths), None)
    return paths if maximum is None else dict.fromkeys(MAXIMUM_NAMES, maximum) | paths


def _names(model: type[Body]) -> list[str]:
    return [field.alias or name for name, field in model.model_fields.items()]


def _inner_fields(model: type[Body]) -> dict[str, str]:
    """The path of each field of an inner object: clients forget the object around it."""
    paths: dict[str, str] = {}
    for outer in INNER_OBJECTS & model.model_fields.keys():
        for inner in get_args(model.model_fields[outer].annotation):
            if issubclass(inner, Body):
                paths |= {name: f"{outer}.{name}" for name in _names(inner)}
    return paths
