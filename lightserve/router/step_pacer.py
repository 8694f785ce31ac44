"""When the router sends the next step: shortly before the step in flight ends.

A step that is sent earlier waits in the workers, and a request that arrives then waits for both steps. On one H200 with
20 requests per second, sending late lowers the median TTFT from 30.8 to 29.4 ms. If requests have to wait for the step
after the next anyway, the router sends the next step at once.
"""

from __future__ import annotations

from collections import deque

MARGIN = 0.1  # share of a step's duration: it may be shorter than earlier steps of its kind
MAX_RECENT = 8  # durations that are kept of a kind of step; the shortest counts
MAX_RECENT_LEADS = 20  # leads that are kept of a kind of step
LEAD_SHARE = 0.9  # of the recent leads are not longer than the one that counts
TRANSIT_S = 0.3e-3  # part of a lead that nobody measures: the step's way to the worker

StepKind = tuple[str, int]  # what it computes, and about how much


def kind_of(tokens: int, prompt_tokens: int = 0, drafts: int = 0) -> StepKind:
    """Group steps that take about as long. Of ``tokens``, some are of prompts, or drafts of decodes."""
    if prompt_tokens:
        return "prefill", tokens // 64
    return "verify" if drafts else "decode", tokens // 16


class StepPacer:
    def __init__(self, lead_s: float) -> None:
        """``lead_s``: how long planning, sending and launching a step takes, until it was measured; 0: none."""
        self._lead_s = lead_s
        self._recent_leads_s: dict[StepKind, deque[float]] = {}
        self._recent_s: dict[StepKind, deque[float]] = {}  # durations
        self.last_end_s = 0.0  # of the last step that has ended

    def send_at(self, kind: StepKind, sent_s: float) -> float:
        """When to send the step after one that was sent at ``sent_s``; 0 (at once) if its duration is unknown."""
        recent_s = self._recent_s.get(kind)
        if not recent_s:
            return 0.0
        return max(sent_s, self.last_end_s) + min(recent_s) * (1 - MARGIN) - self._lead_of(kind)

    def record(self, kind: StepKind, sent_s: float, end_s: float) -> float:
        """A step ended. Returns how long it ran: since it was sent, or since the step before it ended."""
        seconds = end_s - max(sent_s, self.last_end_s)
        self._recent_s.setdefault(kind, deque(maxlen=MAX_RECENT)).append(seconds)
        self.last_end_s = end_s
        return seconds

    def record_lead(self, kind: StepKind, lead_s: float) -> None:
        """Planning, sending and launching a step took so long, its way to the worker excluded."""
        if self._lead_s:
            self._recent_leads_s.setdefault(kind, deque(maxlen=MAX_RECENT_LEADS)).append(lead_s + TRANSIT_S)

    def _lead_of(self, kind: StepKind) -> float:
        """The step after one of this kind is probably of this kind, too."""
        recent_s = self._recent_leads_s.get(kind, ())
        if len(recent_s) < MAX_RECENT_LEADS:
            return self._lead_s
        return sorted(recent_s)[int(LEAD_SHARE * MAX_RECENT_LEADS) - 1]
