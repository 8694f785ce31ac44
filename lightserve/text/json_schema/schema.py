"""A JSON schema of a client: its limits, its references, and which schemas describe one value.

Grammars, grammars of tool calls and parsers all read schemas here. No function recurses along references: a schema may
refer to itself, or through a thousand others.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import cached_property
from typing import Any, TypeVar
from urllib.parse import unquote

from lightserve.errors import InvalidRequestError
from lightserve.text.json_schema.keywords import ALL_KEYWORDS, BRANCHES, SAME_VALUE, is_leaf, schemas_in

# A few definitions can be combined in many ways, so a small schema can be a lot of work. A step takes 0.5 to 2 us.
MAX_STEPS = 100_000
CHARACTERS_PER_STEP = 25  # of names and of JSON
MAX_NESTING = 64  # levels of JSON: encoders and Python recurse into it
MAX_VALUES = 50_000  # of the JSON
MAX_BRANCHES = 1024  # of one allOf, anyOf or oneOf
MAX_LEVELS = 1024  # of schemas, with references followed: llguidance takes 5 kB of stack for each

_LISTED = ALL_KEYWORDS | {"required"}

T = TypeVar("T")
Node = dict[str, Any]


class StepBudget:
    """Steps from schema to schema and from name to name. Schemas of one request share it."""

    def __init__(self) -> None:
        self.used = 0

    def spend(self, steps: int, characters: int = 0) -> None:
        """Count work before it is done. InvalidRequestError if it is too much."""
        self.used = min(self.used + steps + characters // CHARACTERS_PER_STEP, MAX_STEPS + 1)
        if self.used > MAX_STEPS:
            raise InvalidRequestError(
                f"reading the request's schemas takes more than {MAX_STEPS} steps: they are too large, or combine too "
                "many schemas for the same values; simplify them"
            )


def is_deeper(root: T, limit: int, children: Callable[[T], Iterable[T]], key: Callable[[T], Hashable]) -> bool:
    """Whether a depth-first search, which visits each node once, goes more than ``limit`` nodes deep.

    Nodes with equal keys are one node.
    """
    seen: set[Hashable] = set()
    path: list[Iterator[T]] = [iter([root])]
    while path:
        node = next((child for child in path[-1] if key(child) not in seen), None)
        if node is None:
            path.pop()
        else:
            seen.add(key(node))
            path.append(iter(children(node)))
        if len(path) > limit + 1:
            return True
    return False


class JsonSchema:
    """Any part of it may be malformed: a grammar reports that, and a parser ignores it."""

    def __init__(self, root: Any, budget: StepBudget | None = None) -> None:
        """``budget`` None: its own."""
        self.root = root
        self.budget = budget or StepBudget()
        self._targets: dict[str, Any] = {}  # by reference
        self._resolved: dict[int, Node] = {}  # by the id of a node

    def check(self) -> None:
        """Raise InvalidRequestError if the schema is beyond a limit."""
        if self.limit_error is not None:
            raise InvalidRequestError(self.limit_error)

    @cached_property
    def limit_error(self) -> str | None:
        """The limit that the schema is beyond, as a sentence."""
        try:
            self._check_values()
            self._check_levels()
        except InvalidRequestError as error:
            return str(error)
        return None

    def target(self, node: Node) -> Any:
        """What the reference of a node leads to; None if it has none, or if that leads nowhere in this document."""
        reference = node.get("$ref")
        if not isinstance(reference, str):
            return None
        if reference not in self._targets:
            self._targets[reference] = _at_pointer(self.root, reference)
        return self._targets[reference]

    def resolve(self, node: Any) -> Node:
        """The schema that a chain of references leads to; empty if there is none."""
        passed: list[int] = []
        while isinstance(node, dict) and "$ref" in node and id(node) not in self._resolved:
            self._resolved[id(node)] = {}  # for a chain that leads back to it
            passed.append(id(node))
            node = self.target(node)
        resolved_node: Node = self._resolved.get(id(node), node) if isinstance(node, dict) else {}
        self._resolved.update(dict.fromkeys(passed, resolved_node))
        return resolved_node

    def same_value(self, *nodes: Any) -> list[Node]:
        """The schemas that describe the same value as these: themselves, what they refer to, and their branches."""
        nodes_by_id: dict[int, Node] = {}
        pending = list(reversed(nodes))
        while pending:
            node = pending.pop()
            if isinstance(node, dict) and id(node) not in nodes_by_id:
                self.budget.spend(work_on(node))
                nodes_by_id[id(node)] = node
                pending.extend(reversed(list(self._schemas(node, SAME_VALUE))))
        return list(nodes_by_id.values())

    def _schemas(self, node: Node, keywords: frozenset[str] = ALL_KEYWORDS) -> Iterator[Any]:
        """The schemas that a node has or refers to, in the order of the document."""
        for keyword, value in node.items():
            if keyword == "$ref":
                yield self.target(node)
            elif keyword in keywords:
                yield from schemas_in(keyword, value)

    def _check_values(self) -> None:
        """Level by level: it stops early in a large schema, and recurses into none."""
        level, count = [self.root], 1
        for _ in range(MAX_NESTING + 1):
            values = [item for value in level for item in _items(value)]
            count += len(values)
            if count > MAX_VALUES:
                raise InvalidRequestError(f"the schema has more than {MAX_VALUES} values; simplify it")
            level = [item for item in values if isinstance(item, dict | list)]
            if not level:
                return
        raise InvalidRequestError(f"the schema is nested more than {MAX_NESTING} levels deep; simplify it")

    def _check_levels(self) -> None:
        """As llguidance goes: depth first, each schema once."""
        if is_deeper(self.root, MAX_LEVELS, self._checked_schemas, id):
            raise InvalidRequestError(
                f"the schema is more than {MAX_LEVELS} levels deep if its references are followed; simplify it"
            )

    def _checked_schemas(self, node: Any) -> list[Node]:
        if not isinstance(node, dict) or is_leaf(node):
            return []
        _check_branches(node)
        return [schema for schema in self._schemas(node) if isinstance(schema, dict)]


def work_on(node: Node, keywords: frozenset[str] = _LISTED) -> int:
    """The steps to read which schemas and names a node lists under these keywords."""
    listed = [value for keyword, value in node.items() if keyword in keywords and isinstance(value, dict | list)]
    characters = sum(len(name) for value in listed for name in value if isinstance(name, str))
    return 1 + sum(map(len, listed)) + characters // CHARACTERS_PER_STEP


def _check_branches(node: Node) -> None:
    for keyword in BRANCHES:
        branches = node.get(keyword)
        if isinstance(branches, list) and len(branches) > MAX_BRANCHES:
            raise InvalidRequestError(f"{keyword} has {len(branches)} schemas; the limit is {MAX_BRANCHES}")


def _items(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def _at_pointer(root: Any, reference: str) -> Any:
    """What ``#/$defs/City`` refers to; None if it leads nowhere or to another document."""
    if reference in ("#", "#/"):
        return root
    if not reference.startswith("#/"):
        return None
    for segment in unquote(reference[2:]).split("/"):
        root = _member(root, segment.replace("~1", "/").replace("~0", "~"))
    return root


def _member(value: Any, key: str) -> Any:
    if isinstance(value, dict):
        return value.get(key)
    is_index = isinstance(value, list) and key.isdecimal() and len(key) < 10
    return value[int(key)] if is_index and int(key) < len(value) else None
