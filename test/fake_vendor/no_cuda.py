"""A torch as on this vendor's machines: whatever LightServe calls of ``torch.cuda`` fails."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch


def forbid_cuda() -> None:
    """Torch itself may call it: it asks whether there are such devices when a generator is seeded, for one."""
    for name, value in vars(torch.cuda).items():
        if callable(value) and not name.startswith("_") and not isinstance(value, type):
            setattr(torch.cuda, name, _guarded(name, value))


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.startswith("lightserve"):
            raise RuntimeError(f"{caller} calls torch.cuda.{name} on a machine of another vendor")
        return function(*args, **kwargs)

    return call
