"""Which extras are installed: a fault of one is a case only if it is."""

from __future__ import annotations

from importlib.util import find_spec


def has_otlp() -> bool:
    """Whether the package of the extra ``otlp`` is installed."""
    try:
        return find_spec("opentelemetry.proto") is not None
    except ModuleNotFoundError:
        return False
