"""Operators: one meaning, one implementation per backend.

An op is declared by its PyTorch body. That body defines the op, runs on any device that has nothing better, and is the
oracle of the op's tests. A backend replaces the ops that it computes faster. An op whose body calls other ops becomes
faster with them. A device has a second, slower backend, ``batch_invariant(name)``: the result of a row does not depend
on the other rows of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from importlib import import_module
from inspect import Parameter, Signature, signature
from pkgutil import walk_packages
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")
Key = TypeVar("Key", bound=Hashable)

REFERENCE = "torch"


def batch_invariant(backend: str) -> str:
    """The name of the backend whose sums have a fixed order. In ``backend`` the order depends on the batch."""
    return f"{backend}_batch_invariant"


OPS: dict[str, Op[Any, Any]] = {}
_active: list[str] = []


class Op(Generic[P, R]):
    def __init__(self, reference: Callable[P, R]) -> None:
        self.name = reference.__name__
        self.__doc__ = reference.__doc__
        self.impls: dict[str, Callable[P, R]] = {REFERENCE: reference}
        self._active = reference

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._active(*args, **kwargs)

    @property
    def active_backend(self) -> str:
        """The name of the one that computes it now."""
        return next(name for name, function in self.impls.items() if function is self._active)

    def impl(self, backend: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
        def register(fn: Callable[P, R]) -> Callable[P, R]:
            if backend in self.impls:
                raise ValueError(f"op {self.name} already has a {backend} implementation")
            self._check_parameters(backend, fn)
            self.impls[backend] = fn
            return fn

        return register

    def _check_parameters(self, backend: str, fn: Callable[..., Any]) -> None:
        """Refuse a function of another package that was written for another version of this op."""
        wanted = signature(self.impls[REFERENCE])
        required = [each for each in wanted.parameters.values() if each.default is Parameter.empty]
        takes = _signature_of(fn)
        if takes is None or (_binds(takes, len(required)) and _binds(takes, len(wanted.parameters))):
            return
        raise ValueError(
            f"op {self.name} is called with ({', '.join(wanted.parameters)}) in this version, and its implementation "
            f"for {backend} takes ({', '.join(takes.parameters)}); install a release of its package for this version"
        )

    def after(self, backend: str) -> Callable[P, R]:
        """The implementation that is bound behind ``backend``, for what ``backend`` cannot compute."""
        later = _active[_active.index(backend) + 1 :] if backend in _active else []
        return self._first_of(later)

    def select(self, backends: Sequence[str]) -> None:
        self._active = self._first_of(backends)

    def _first_of(self, backends: Sequence[str]) -> Callable[P, R]:
        return next(self.impls[name] for name in (*backends, REFERENCE) if name in self.impls)


def _signature_of(fn: Callable[..., Any]) -> Signature | None:
    """None: only its C code knows."""
    try:
        return signature(fn)
    except (TypeError, ValueError):
        return None


def _binds(takes: Signature, count: int) -> bool:
    """Whether a function with this signature may be called with so many arguments."""
    try:
        takes.bind(*(None for _ in range(count)))
    except TypeError:
        return False
    return True


def op(reference: Callable[P, R]) -> Op[P, R]:
    if reference.__name__ in OPS:
        raise ValueError(f"op {reference.__name__} is declared twice")
    OPS[reference.__name__] = declared = Op(reference)
    return declared


def import_implementations(package: str, path: Iterable[str]) -> None:
    """Import the modules of a package, which register what they implement. A name with an underscore is a helper's."""
    for module in walk_packages(path, f"{package}."):
        if not module.name.rpartition(".")[2].startswith("_"):
            import_module(module.name)


def has_backend(backend: str) -> bool:
    return any(backend in o.impls for o in OPS.values())


def use_backend(*backends: str) -> None:
    """Bind every op to the first of ``backends`` that implements it, or to its definition. A worker does it once."""
    for backend in backends:
        if not has_backend(backend):
            raise ValueError(f"no op is implemented by backend {backend!r}")
    for o in OPS.values():
        o.select(backends)
    _active[:] = backends


def active_backends() -> tuple[str, ...]:
    """What ``use_backend`` was called with last."""
    return tuple(_active)


class Repeater(Protocol[Key]):
    """Calls a function that does the same for each key, whatever the integers of its inputs are."""

    def __call__(self, function: Callable[[Tensor, Key], R], inputs: Tensor, key: Key) -> R:
        """Always of the same ``function``. The result may be overwritten by the next call."""

    def clear(self) -> None:
        """Forget addresses: memory is given back."""


_repeaters: dict[str, Callable[[], Repeater[Any]]] = {}


def register_repeater(backend: str, make: Callable[[], Repeater[Any]]) -> None:
    """For functions of ops, which cost the host less when they are called again."""
    _repeaters[backend] = make


def new_repeater() -> Repeater[Any] | None:
    """Of the backend that is asked first: what one before it did might not be seen. None: it has none."""
    make = _repeaters.get(_active[0]) if _active else None
    return None if make is None else make()
