"""Dates of moments that were measured with the monotonic clock, which all processes of a machine share."""

from __future__ import annotations

import time


def unix_ns(monotonic_s: float) -> int:
    """The date of a moment, in nanoseconds since 1970. It is only for people and other programs to read."""
    return int(time.time_ns()) - time.monotonic_ns() + round(monotonic_s * 1e9)


def unix_s(monotonic_s: float) -> float:
    return unix_ns(monotonic_s) / 1e9
