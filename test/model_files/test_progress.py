from __future__ import annotations

import fcntl
import io
import json
import logging
import os
import struct
import sys
import termios
from datetime import datetime
from pathlib import Path

import pytest

from lightserve.utils.logger import FORMAT_VARIABLE, JsonFormatter, TextFormatter, fields, init_logger
from lightserve.utils.progress import Progress, ProgressState, StreamOutput, use_output
from lightserve.utils.terminal import Style


@pytest.fixture(autouse=True)
def _terminal_that_can_clear_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")


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


def test_a_task_may_count_items() -> None:
    log = io.StringIO()

    with Progress("CUDA graphs", 4, log, Clock(), unit="items") as progress:
        for _ in range(4):
            progress.advance(1)

    assert log.getvalue() == "CUDA graphs: 100 % of 4 in 0.0 s\n"


def test_several_tasks_may_share_one_line_of_a_terminal() -> None:
    terminal, clock = Terminal(), Clock()
    output = StreamOutput(terminal, clock, keeps_lines=False)

    output.show(ProgressState("import torch"))
    output.show(ProgressState("weights", 1, 2, "items"))
    output.show(ProgressState("weights", 1, 2, "items"))  # too soon to be shown again
    output.show(ProgressState("weights", 2, 2, "items", status="finished"))

    full, half = "#" * 30, "#" * 15 + "-" * 15
    drawn = ["import torch ...", f"weights [{half}]  50 %", f"weights [{full}] 100 %"]
    assert terminal.getvalue() == "".join(f"\r\x1b[K{text}" for text in drawn)


def test_a_bar_is_no_wider_than_the_terminal() -> None:
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 20, 0, 0))
    with os.fdopen(slave, "w") as terminal:
        StreamOutput(terminal).show(ProgressState("weights", 1, 2, "items"))

        assert os.read(master, 1000).decode() == "\r\x1b[Kweights [##########"
    os.close(master)


def test_a_terminal_that_cannot_clear_a_line_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    terminal = Terminal()

    with Progress("loading", 2000, terminal, Clock()):
        pass

    assert "\x1b" not in terminal.getvalue()


def test_a_log_has_no_line_for_a_task_without_an_amount() -> None:
    log, clock = io.StringIO(), Clock()
    output = StreamOutput(log, clock)

    clock.now += 100
    output.show(ProgressState("import torch"))

    assert log.getvalue() == ""


def test_with_json_a_stream_of_its_own_still_gets_the_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FORMAT_VARIABLE, "json")
    sink = io.StringIO()

    with Progress("downloading", 0, sink, Clock()):
        pass

    assert sink.getvalue().startswith("downloading: 100 %")


def test_a_process_may_show_its_progress_elsewhere() -> None:
    class Recorder:
        def __init__(self) -> None:
            self.states: list[ProgressState] = []

        def show(self, state: ProgressState) -> None:
            self.states.append(state)

    recorder = Recorder()
    use_output(recorder)
    try:
        with Progress("weights", 3, clock=Clock()) as progress:
            progress.advance(3)
    finally:
        use_output(None)

    assert [(state.done, state.status) for state in recorder.states] == [(3, "running"), (3, "finished")]


def test_a_log_line_replaces_the_bar_of_a_terminal_and_has_the_colour_of_its_level(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    record = logging.makeLogRecord({"name": "n", "levelno": logging.WARNING, "levelname": "WARNING", "msg": "late"})

    text = TextFormatter(Style(Terminal())).format(record)

    assert text.startswith("\r\x1b[K")
    assert text.endswith(" \x1b[33mWARNING\x1b[0m n: late")


def test_a_json_line_has_the_fields_of_its_record() -> None:
    try:
        raise ValueError("broken")
    except ValueError:
        trace = sys.exc_info()
    attributes = {"name": "n", "levelname": "ERROR", "msg": "took %d s", "args": (3,), "exc_info": trace}

    line = json.loads(JsonFormatter().format(logging.makeLogRecord(attributes | fields(seconds=3, path=Path("a")))))

    assert datetime.fromisoformat(line.pop("time")).tzinfo is not None
    assert "ValueError: broken" in line.pop("traceback")
    assert line == {"level": "error", "logger": "n", "message": "took 3 s", "seconds": 3, "path": "a"}


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
