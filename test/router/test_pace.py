"""The next step is sent shortly before the last one ends."""

from __future__ import annotations

import pytest

from lightserve.router.pace import LEAD_S, RECENT, UNSURE, Pace, kind_of

DECODES, PROMPTS = kind_of(tokens=3, requests=3), kind_of(tokens=401, requests=2)


def due_s(length_s: float) -> float:
    return length_s * (1 - UNSURE) - LEAD_S


def test_a_kind_of_step_that_was_never_seen_is_followed_at_once() -> None:
    pace = Pace()
    pace.done(DECODES, 1.0, 1.01)

    assert pace.send_at(PROMPTS, 2.0) <= 2.0
    assert pace.send_at(kind_of(tokens=200, requests=200), 2.0) <= 2.0


def test_a_step_runs_from_when_it_was_sent_or_from_the_end_of_the_one_before() -> None:
    pace = Pace()
    pace.done(DECODES, 1.0, 1.01)
    assert pace.send_at(DECODES, 2.0) == pytest.approx(2.0 + due_s(0.01))
    assert pace.send_at(DECODES, 1.005) == pytest.approx(1.01 + due_s(0.01))

    pace.done(PROMPTS, 1.005, 1.05)
    assert pace.send_at(PROMPTS, 1.02) == pytest.approx(1.05 + due_s(0.04))


def test_the_shortest_of_the_recent_ones_counts() -> None:
    pace = Pace()
    for now_s, length_s in enumerate((0.02, 0.01, 0.5, *[0.03] * (RECENT - 1)), start=1):
        pace.done(DECODES, now_s, now_s + length_s)
        if length_s == 0.5:
            assert pace.send_at(DECODES, 20.0) == pytest.approx(20.0 + due_s(0.01))

    assert pace.send_at(DECODES, 20.0) == pytest.approx(20.0 + due_s(0.03))
