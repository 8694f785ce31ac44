"""When the steps of a run of decodes are planned and end, if nothing else happens in their server.

Such a step is planned so long before the last one ends as it takes to launch it. So its time follows from those of the
steps before, and the scheduler and the worker need not know of it yet.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

Times = tuple[float, float]  # of a step: its end, and how long it takes


class DecodedStep(NamedTuple):
    """A step that gave each of so many requests a token, and ended none."""

    end_s: float
    gap_s: float  # since the last step
    num_requests: int


class DecodeTimes:
    def __init__(self, in_flight: Sequence[Times], seconds: Sequence[float], lead_s: float) -> None:
        """``seconds``: of the steps that follow those ``in_flight``. Each takes longer than ``lead_s``."""
        self.num_begun = len(in_flight)  # planned at the beginning
        self.ends = [end_s for end_s, _ in in_flight]
        self._seconds = [*(step_s for _, step_s in in_flight), *seconds]
        self._lead_s = lead_s
        self._num_ended = 0
        free_s = self.ends[-1]
        for step_s in seconds:
            free_s = max((free_s - lead_s) + lead_s, free_s) + step_s  # it is planned at free_s - lead_s
            self.ends.append(free_s)

    @property
    def next_end_s(self) -> float:
        return self.ends[self._num_ended]

    def take_ended(self, now: float, last_end_s: float, num_requests: int) -> list[DecodedStep]:
        """The steps that ended before now, each once."""
        begin, self._num_ended = self._num_ended, bisect_left(self.ends, now, self._num_ended)
        ends = self.ends[begin : self._num_ended]
        return [
            DecodedStep(end_s, end_s - before_s, num_requests)
            for before_s, end_s in zip([last_end_s, *ends], ends, strict=False)
        ]

    def num_planned(self, now: float) -> int:
        """Steps that were planned before now."""
        followed = bisect_left(self.ends, now, key=self._plans_next_s)
        return max(self.num_begun, min(followed + 1, len(self.ends)))

    def in_flight(self, now: float) -> list[Times]:
        """The steps that were planned before now, and had not ended when ``take_ended`` was called."""
        steps = slice(self._num_ended, self.num_planned(now))
        return list(zip(self.ends[steps], self._seconds[steps], strict=True))

    def last_event_s(self, now: float) -> float:
        """When a step was planned or ended for the last time before now."""
        planned = self.num_planned(now)
        times = [self.ends[self._num_ended - 1]] if self._num_ended else []
        times += [self._plans_next_s(self.ends[planned - 2])] if planned > self.num_begun else []
        return max(times, default=0.0)

    def _plans_next_s(self, end_s: float) -> float:
        """When the step is planned that begins at ``end_s``."""
        return end_s - self._lead_s
