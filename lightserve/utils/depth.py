"""The depth of a graph, without recursion."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


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
