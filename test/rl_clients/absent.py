"""Stand-ins for packages that a trainer imports beside its HTTP client, and that the client does not use.

Their modules have every name, as a class that takes any arguments. The client's own module is imported as it is.
"""

from __future__ import annotations

import sys
from collections.abc import MutableSequence, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class Anything:
    """A class, a decorator or a value of a package that is absent."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __class_getitem__(cls, item: Any) -> type[Anything]:
        return cls

    def __getattr__(self, name: str) -> Anything:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args else self


class AbsentModule(ModuleType):
    __path__: MutableSequence[str] = []  # noqa: RUF012  # a package without files

    def __getattr__(self, name: str) -> type[Anything]:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (Anything,), {})


class AbsentPackages(MetaPathFinder, Loader):
    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        is_absent = any(fullname == name or fullname.startswith(f"{name}.") for name in self._names)
        return ModuleSpec(fullname, self, is_package=True) if is_absent else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return AbsentModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def stand_in_for(*names: str) -> None:
    sys.meta_path.insert(0, AbsentPackages(names))
