"""The operators of LightServe in any program of torch.

    import lightserve.ops

    lightserve.ops.enable()                              # aten operators are replaced where that pays
    lightserve.ops.only_enable(include=["silu", "mm"])
    with lightserve.ops.use_ops(exclude=["topk"]):
        model(ids)
    torch.ops.lightserve.silu_and_mul(gate_up)           # fused ones, which aten lacks

Backward passes are torch's. Calls that the kernels do not take go to the kernels of torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from lightserve.common.device import Device, pick_device
from lightserve.errors import ServerError
from lightserve.ops.aten import ATEN, PAYING, Replacement
from lightserve.ops.fused import FUSED
from lightserve.ops.place import current_device
from lightserve.utils.spelling import nearest

__all__ = ["ATEN", "FUSED", "PAYING", "disable", "enable", "enabled", "only_enable", "use_ops"]

_active: Replacement | None = None


def enable(exclude: Sequence[str] = (), device: str | None = None) -> list[str]:
    """Replace the aten operators that gain by the device's kernels (PAYING), but ``exclude``. Returns their names.

    ``device``: as --device; None: the best one here. ``only_enable(list(ATEN))`` replaces the others too.
    """
    _check(exclude)
    return only_enable([name for name in PAYING if name not in exclude], device)


def only_enable(include: Sequence[str], device: str | None = None) -> list[str]:
    """Replace these operators, and no others; those that the device has no kernel for stay torch's."""
    _check(include)
    disable()
    return _install(Replacement(_bound(device), include))


def _install(replacement: Replacement) -> list[str]:
    global _active
    _active = replacement
    return replacement.names


def disable() -> None:
    """All operators are torch's again."""
    global _active
    if _active is not None:
        _active.remove()
    _active = None


def enabled() -> list[str]:
    """The operators that are replaced now."""
    return [] if _active is None else _active.names


@contextmanager
def use_ops(
    include: Sequence[str] | None = None, exclude: Sequence[str] = (), device: str | None = None
) -> Iterator[list[str]]:
    """Within it operators are replaced, without ``include`` as by ``enable``. Behind it, those from before are."""
    before = _active
    _check([*(include or ()), *exclude])
    names = [name for name in (PAYING if include is None else include) if name not in exclude]
    platform = _bound(device)
    if before is not None:
        before.remove()
    try:
        yield _install(Replacement(platform, names))
    finally:
        disable()  # what is enabled by now
        _restore(before)


def _restore(before: Replacement | None) -> None:
    global _active
    _active = None if before is None else Replacement(_bound(before.platform.name), before.names)


def _bound(device: str | None) -> Device:
    platform = pick_device(device)
    platform.bind(current_device(platform))
    return platform


def _check(names: Sequence[str]) -> None:
    for name in names:
        if name not in ATEN:
            near = nearest(name, ATEN)
            meant = f"did you mean {near}? " if near else ""
            raise ServerError(f"operator {name!r} cannot be replaced; {meant}there are {', '.join(ATEN)}")
