"""Dates of moments that were measured with the monotonic clock, which all processes of a machine share."""

from __future__ import annotations

import time


def unix_offset_ns() -> int:
    """What to add to a monotonic time for its date, in nanoseconds since 1970. It is only for others to read."""
    readings = [(time.monotonic_ns(), int(time.time_ns()), time.monotonic_ns()) for _ in range(3)]
    before, date, after = min(readings, key=lambda reading: reading[2] - reading[0])  # the least interrupted reading
    return date - (before + after) // 2


def unix_s(monotonic_s: float) -> float:
    return unix_offset_ns() / 1e9 + monotonic_s
