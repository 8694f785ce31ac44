"""Axes: from values to positions, and the ticks between."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
WIDE_RANGE = 20.0  # largest value divided by the smallest one: above it, a log scale shows both


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps ``low``..``high`` to ``begin``..``end`` pixels."""

    low: float
    high: float
    begin: float
    end: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        low, high = self._of(self.low), self._of(self.high)
        share = (self._of(max(value, self.low)) - low) / (high - low)
        return self.begin + share * (self.end - self.begin)

    def _of(self, value: float) -> float:
        return math.log10(value) if self.is_log else value

    def ticks(self) -> list[float]:
        return log_ticks(self.low, self.high) if self.is_log else linear_ticks(self.low, self.high)


def scale_from_zero(values: Sequence[float], begin: float, end: float) -> Scale:
    top = nice_top(max(values, default=1.0))
    return Scale(0.0, top, begin, end)


def scale_of(values: Sequence[float], begin: float, end: float) -> Scale:
    """From zero, or logarithmic if small values would not be seen beside large ones."""
    positive = [value for value in values if value > 0]
    if not positive or max(positive) / min(positive) < WIDE_RANGE:
        return scale_from_zero(values, begin, end)
    low = 10.0 ** math.floor(math.log10(min(positive)))
    high = next(tick for tick in log_ticks(low, max(positive) * 10) if tick >= max(positive))
    return Scale(low, high, begin, end, is_log=True)


def step_of(span: float) -> float:
    """A round step that divides ``span`` into about five parts."""
    raw = span / 5
    power = 10.0 ** math.floor(math.log10(raw))
    return next(step * power for step in STEPS if step * power >= raw * 0.999)


def nice_top(value: float) -> float:
    if not value > 0:
        return 1.0
    step = step_of(value)
    return step * math.ceil(value / step - 1e-9)


def linear_ticks(low: float, high: float) -> list[float]:
    step = step_of(high - low)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten; only the powers if there would be too many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1,) if len(powers) > 4 else (1, 2, 5)
    ticks = [factor * 10.0**power for power in powers for factor in factors]
    return [tick for tick in ticks if low * 0.999 <= tick <= high * 1.001]


def number(value: float) -> str:
    """As many digits as a reader needs."""
    size = abs(value)
    if size >= 100 or value == int(value):
        return f"{value:,.0f}"
    if size >= 10:
        return f"{value:.1f}".removesuffix(".0")
    return f"{value:.2f}".rstrip("0").rstrip(".") if size >= 0.01 else f"{value:.2g}"
