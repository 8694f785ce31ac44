from __future__ import annotations

import io
import logging

import pytest

from lightserve.utils.logger import init_logger
from lightserve.utils.progress import Progress


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_gets_a_line_every_few_seconds_and_a_last_one() -> None:
    log, clock = io.StringIO(), Clock()

    with Progress("loading", 100_000_000, log, clock) as progress:
        for _ in range(10):
            clock.now += 1
            progress.advance(10_000_000)

    assert log.getvalue().splitlines() == [
        "loading: 50 % of 100.0 MB, 10.0 MB/s",
        "loading: 100 % of 100.0 MB, 10.0 MB/s",
        "loading: 100 % of 100.0 MB, 10.0 MB/s in 10.0 s",
    ]


def test_a_terminal_gets_a_bar_in_one_line() -> None:
    terminal, clock = Terminal(), Clock()

    with Progress("loading", 2000, terminal, clock) as progress:
        clock.now += 0.5
        progress.advance(1000)
        assert terminal.getvalue().endswith("loading [###############---------------]  50 % 2.0 kB/s")
        progress.advance(1000)

    assert terminal.getvalue().count("\n") == 1
    assert terminal.getvalue().endswith("100 % of 2.0 kB, 4.0 kB/s in 0.5 s\n")


def test_bytes_of_an_earlier_run_do_not_count_for_the_rate() -> None:
    log, clock = io.StringIO(), Clock()

    with Progress("fetching", 1000, log, clock) as progress:
        progress.resume_at(900)
        clock.now += 1
        progress.advance(100)

    assert log.getvalue() == "fetching: 100 % of 1.0 kB, 100 B/s in 1.0 s\n"


def test_an_interrupted_transfer_is_reported() -> None:
    log, clock = io.StringIO(), Clock()

    def transfer() -> None:
        with Progress("fetching", 1000, log, clock) as progress:
            clock.now += 1
            progress.advance(500)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        transfer()
    assert log.getvalue().endswith("50 % of 1.0 kB, 500 B/s, stopped\n")


def test_an_unknown_total_counts_as_done() -> None:
    log = io.StringIO()

    with Progress("loading", 0, log, Clock()):
        pass

    assert "100 %" in log.getvalue()


def test_a_log_line_has_time_level_and_name() -> None:
    logger = init_logger("lightserve.test")
    handler = logging.getLogger("lightserve").handlers[0]
    record = logger.makeRecord(logger.name, logging.WARNING, __file__, 1, "too %s", ("late",), None)

    assert handler.format(record).endswith(" WARNING lightserve.test: too late")


def test_the_log_level_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTSERVE_LOG_LEVEL", "debug")
    assert init_logger("lightserve.test").level == logging.DEBUG

    monkeypatch.setenv("LIGHTSERVE_LOG_LEVEL", "loud")
    assert init_logger("lightserve.test").level == logging.INFO
