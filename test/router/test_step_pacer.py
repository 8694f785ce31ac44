"""The next step is sent shortly before the step in flight ends."""

from __future__ import annotations

import pytest

from lightserve.router.step_pacer import MARGIN, MAX_RECENT, MAX_RECENT_LEADS, TRANSIT_S, StepPacer, kind_of

LEAD_S = 3e-3
DECODES, PROMPTS, DRAFTS = kind_of(3), kind_of(401, prompt_tokens=400), kind_of(12, drafts=9)


def due_s(length_s: float) -> float:
    return length_s * (1 - MARGIN) - LEAD_S


def test_the_step_after_one_of_unknown_duration_is_sent_at_once() -> None:
    pacer = StepPacer(LEAD_S)
    pacer.record(DECODES, 1.0, 1.01)

    assert pacer.send_at(PROMPTS, 2.0) <= 2.0
    assert pacer.send_at(DRAFTS, 2.0) <= 2.0
    assert pacer.send_at(kind_of(200), 2.0) <= 2.0


def test_steps_with_and_without_drafts_or_prompts_are_different_kinds() -> None:
    assert len({kind_of(64), kind_of(64, drafts=48), kind_of(64, prompt_tokens=1)}) == 3
    assert kind_of(64, prompt_tokens=32, drafts=24) == kind_of(64, prompt_tokens=63)


def test_a_step_runs_since_it_was_sent_or_since_the_last_step_ended() -> None:
    pacer = StepPacer(LEAD_S)
    pacer.record(DECODES, 1.0, 1.01)
    assert pacer.send_at(DECODES, 2.0) == pytest.approx(2.0 + due_s(0.01))
    assert pacer.send_at(DECODES, 1.005) == pytest.approx(1.01 + due_s(0.01))

    pacer.record(PROMPTS, 1.005, 1.05)
    assert pacer.send_at(PROMPTS, 1.02) == pytest.approx(1.05 + due_s(0.04))


def test_the_shortest_recent_duration_counts() -> None:
    pacer = StepPacer(LEAD_S)
    for now_s, length_s in enumerate((0.02, 0.01, 0.5, *[0.03] * (MAX_RECENT - 1)), start=1):
        pacer.record(DECODES, now_s, now_s + length_s)
        if length_s == 0.5:
            assert pacer.send_at(DECODES, 20.0) == pytest.approx(20.0 + due_s(0.01))

    assert pacer.send_at(DECODES, 20.0) == pytest.approx(20.0 + due_s(0.03))


def test_a_measured_lead_replaces_the_one_of_the_device() -> None:
    pacer = StepPacer(LEAD_S)
    pacer.record(DECODES, 1.0, 1.01)
    pacer.record(PROMPTS, 1.01, 1.05)
    for number in range(MAX_RECENT_LEADS):
        assert pacer.send_at(DECODES, 2.0) == pytest.approx(2.0 + due_s(0.01))
        pacer.record_lead(DECODES, 1e-3 if number else 0.5)  # one was held up

    assert pacer.send_at(DECODES, 2.0) == pytest.approx(2.0 + 0.01 * (1 - MARGIN) - 1e-3 - TRANSIT_S)
    assert pacer.send_at(PROMPTS, 2.0) == pytest.approx(2.0 + due_s(0.04)), "the lead of another kind of step"


def test_a_lead_that_has_grown_is_noticed() -> None:
    pacer = StepPacer(LEAD_S)
    pacer.record(DECODES, 1.0, 1.05)
    for lead_s in (*[1e-3] * MAX_RECENT_LEADS, *[8e-3] * 3):
        pacer.record_lead(DECODES, lead_s)

    assert pacer.send_at(DECODES, 2.0) == pytest.approx(2.0 + 0.05 * (1 - MARGIN) - 8e-3 - TRANSIT_S)


def test_a_device_that_launches_nothing_ahead_has_no_lead() -> None:
    pacer = StepPacer(0.0)
    pacer.record(DECODES, 1.0, 1.01)
    for _ in range(MAX_RECENT_LEADS):
        pacer.record_lead(DECODES, 9e-3)  # launching is computing there

    assert pacer.send_at(DECODES, 2.0) == pytest.approx(2.0 + 0.01 * (1 - MARGIN))
