"""The CPU cores that this process may use."""

from __future__ import annotations

import os


def available_cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # not on a Mac
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
