"""Fused hooks: methods of a layer that compute what several of its hooks compute, in fewer ops.

A fused hook is called instead of the hooks that it replaces, unless a subclass overrides one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Method = TypeVar("Method", bound=Callable[..., Any])

_REPLACED = "replaced_hooks"


def replaces(*hooks: str) -> Callable[[Method], Method]:
    """Declare a fused hook. The declaration also holds for what subclasses override it with."""

    def declare(method: Method) -> Method:
        setattr(method, _REPLACED, hooks)
        return method

    return declare


def usable_fused_hooks(layer_class: type) -> frozenset[str]:
    """The fused hooks that a class may call: no hook that they replace is overridden in a class below theirs."""
    declared = {
        name: getattr(method, _REPLACED)
        for base in layer_class.__mro__
        for name, method in vars(base).items()
        if hasattr(method, _REPLACED)
    }
    return frozenset(
        fused
        for fused, hooks in declared.items()
        if all(_depth(layer_class, fused) <= _depth(layer_class, hook) for hook in hooks)
    )


def _depth(layer_class: type, name: str) -> int:
    """How many classes of the method resolution order come before the one that defines a method."""
    return next(depth for depth, base in enumerate(layer_class.__mro__) if name in vars(base))
