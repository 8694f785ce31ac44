"""A crowd at the door: everyone is answered or refused, nothing is held afterwards."""

from __future__ import annotations

import pytest

from lightserve.benchmark.serving_path import Load
from lightserve.benchmark.storm import Outcome, run

LATE_MS = 5000.0  # the command has the goal; here other tests run too


def check(outcome: Outcome, requests: int, leavers: int) -> None:
    assert outcome.ends["left"] == leavers
    assert outcome.ends["answered"] + outcome.ends["refused (429)"] == requests
    assert outcome.unhealthy == 0
    assert outcome.health_p99_ms < LATE_MS
    assert set(outcome.held.values()) == {0}
    assert len(outcome.held) == 3


@pytest.mark.long
def test_a_small_crowd_before_a_narrow_door() -> None:
    flags = ["--running_max_req_size", "4", "--max_queue_size", "20", "--null_step_ms", "20"]

    outcome = run(Load("completions", 60, 1, 8), leavers=20, seed=0, flags=flags)

    check(outcome, 60, 20)
    assert outcome.ends["refused (429)"] > 0
    assert outcome.ends["answered"] > 0
    assert "/health: " in str(outcome)


@pytest.mark.long
def test_two_thousand_at_once_and_five_hundred_that_leave() -> None:
    check(run(Load("completions", 2000, 1, 16), leavers=500, seed=0, flags=[]), 2000, 500)
