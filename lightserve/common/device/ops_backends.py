"""Backends of ops that other packages offer as entry points, for devices that exist already.

Another package registers the module with its kernels in its own pyproject.toml:

    [project.entry-points."lightserve.ops"]
    fast_ops = "lightserve_fast_ops.kernels"

Importing the module registers them under the name of the entry point: ``@ops.rms_norm.impl("fast_ops")``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import entry_points

from lightserve.common import ops
from lightserve.errors import ServerError

ENTRY_POINTS = "lightserve.ops"


def load_ops(what: str, load: Callable[[], object]) -> None:
    """Import a module of operators."""
    try:
        load()
    except (ImportError, AttributeError, ValueError) as error:  # ValueError: of an op that changed
        raise ServerError(f"{what}: {error}") from error


def load_ops_backends(names: Sequence[str]) -> None:
    """Import the modules behind these names, which register what they implement."""
    available = {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}
    for name in names:
        if name not in available:
            installed = ", ".join(sorted(available)) or "none"
            raise ServerError(
                f"--ops_backend {name}: no installed package offers it (entry points {ENTRY_POINTS}); "
                f"installed: {installed}"
            )
        load_ops(f"--ops_backend {name}", available[name].load)
        if not ops.has_backend(name):
            raise ServerError(
                f"--ops_backend {name}: {available[name].value} implements no op under the name {name}; its entry "
                "point must be named as its backend"
            )
