"""How long tests wait for something."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from test import waiting


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Nobody waits really."""
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(time, "monotonic", lambda: clock.now_s)
    monkeypatch.setattr(time, "sleep", lambda seconds: setattr(clock, "now_s", clock.now_s + seconds))
    return clock


def test_a_wait_ends_at_its_deadline(clock: SimpleNamespace) -> None:
    with pytest.raises(TimeoutError, match=r"^not so within 10 s$"):
        waiting.wait_until(lambda: False, 10, pause_s=1)

    assert clock.now_s == pytest.approx(11)


def test_the_deadline_begins_again_with_each_step(clock: SimpleNamespace) -> None:
    """A step takes 9 s. The first wait is for something that comes after 90, the second for something that does not."""
    steps = lambda: min(int(clock.now_s / 9), 20)  # noqa: E731

    waiting.wait_until(lambda: clock.now_s > 90, 10, pause_s=1, progress=steps)
    with pytest.raises(TimeoutError, match="not so within 10 s after 20"):
        waiting.wait_until(lambda: False, 10, pause_s=1, progress=steps)

    assert clock.now_s == pytest.approx(191)
