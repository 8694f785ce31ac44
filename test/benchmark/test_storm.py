"""Many requests at once: each completes or is refused, and the router holds nothing afterwards."""

from __future__ import annotations

import pytest

from benchmark.serving.serving_path import Load
from benchmark.serving.storm import Outcome, run

LATE_MS = 5000.0  # the command has the goal; here other tests run too


def check(outcome: Outcome, requests: int, disconnects: int) -> None:
    assert outcome.ends["disconnected"] == disconnects
    assert outcome.ends["completed"] + outcome.ends["refused (429)"] == requests
    assert outcome.unhealthy == 0
    assert outcome.health_p99_ms < LATE_MS
    assert set(outcome.held.values()) == {0}
    assert len(outcome.held) == 3


@pytest.mark.long
def test_requests_beyond_the_queue_are_refused() -> None:
    flags = ["--running_max_req_size", "4", "--max_queue_size", "20", "--null_step_ms", "20"]

    outcome = run(Load("completions", 60, 1, 8), disconnects=20, seed=0, flags=flags)

    check(outcome, 60, 20)
    assert outcome.ends["refused (429)"] > 0
    assert outcome.ends["completed"] > 0
    assert "/health: " in str(outcome)


@pytest.mark.long
def test_two_thousand_requests_at_once_and_five_hundred_disconnects() -> None:
    check(run(Load("completions", 2000, 1, 16), disconnects=500, seed=0, flags=[]), 2000, 500)
