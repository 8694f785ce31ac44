"""Real engines with null workers do what the simulator says."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from dataclasses import replace

import pytest

from benchmark.cluster.core_waits import CoreWaits, threads_below
from benchmark.cluster.simulated_replicas import LOAD, Figures, Times, compare, figures_of, pauses, simulated, table
from lightserve.bench.client.record import Record
from test.waiting import wait_until

TIMES = Times(0.04, 100e-6)


def test_a_step_costs_its_tokens_and_what_comes_between() -> None:
    cost = replace(TIMES, between_s=0.002).cost

    assert cost.step_s(1, 5000, 0.0) == pytest.approx(0.0421)
    assert cost.step_s(300, 0, 9e6) == pytest.approx(0.072)


def test_the_way_of_a_request_delays_its_first_token_only() -> None:
    load = replace(LOAD, count=20, rate=40.0)

    near, far = (simulated(replace(TIMES, way_s=way_s), load, 2, "prefix") for way_s in (0.0, 0.5))

    assert far.ttft_p50_ms == pytest.approx(near.ttft_p50_ms + 500)
    assert replace(far, ttft_p50_ms=near.ttft_p50_ms, ttft_p99_ms=near.ttft_p99_ms) == near


def test_figures_of_records() -> None:
    times = ((0.0, [0.1, 0.2, 0.4]), (1.0, [1.3, 1.4]))
    records = [
        Record(
            index=number, due=0.0, sent=sent, event_times=events, input_tokens=100, output_tokens=len(events),
            cached_tokens=40 * number,
        )
        for number, (sent, events) in enumerate(times)
    ]  # fmt: skip

    figures = figures_of(records)

    assert figures.tokens_s == pytest.approx(5 / 1.4)
    assert figures.ttft_p50_ms == pytest.approx(200)
    assert figures.itl_p50_ms == pytest.approx(100)
    assert figures.hit_rate == pytest.approx(20)
    assert table(figures, Figures(*figures.values())).splitlines()[-1].split() == ["+0.0%"] * 5 + ["+0.0"]


@pytest.mark.slow
def test_real_engines_serve_the_simulated_load(capsys: pytest.CaptureFixture[str]) -> None:
    load = replace(LOAD, count=16, rate=30.0)

    real, fake = compare(TIMES, load, 2, "prefix", 1, [])

    assert "load average" in capsys.readouterr().out
    assert real.ttft_p50_ms > 40, "a step with a prompt takes longer than one of a token"
    assert real.itl_p50_ms > 40
    assert abs(real.hit_rate - fake.hit_rate) < 25


@pytest.mark.long
def test_three_engines_are_simulated_within_a_tenth() -> None:
    """On a machine that does nothing else: see docs/log.md."""
    real, fake = compare(TIMES, replace(LOAD, rate=12.0), 3, "prefix", 3, [])

    assert fake.tokens_s == pytest.approx(real.tokens_s, rel=0.1)
    assert fake.ttft_p50_ms == pytest.approx(real.ttft_p50_ms, rel=0.1)
    assert fake.ttft_p99_ms == pytest.approx(real.ttft_p99_ms, rel=0.2)
    assert fake.itl_p50_ms == pytest.approx(real.itl_p50_ms, rel=0.1)
    assert fake.hit_rate == pytest.approx(real.hit_rate, abs=2)


def test_a_pause_is_shown_with_the_waits_for_a_core_during_it() -> None:
    with CoreWaits() as waits:
        begin = time.monotonic()
        sum(range(10**6))
        end = time.monotonic()
    times = [begin, begin + 0.01, begin + 0.02, max(end, begin + 0.2)]

    found = pauses([Record(index=0, due=0.0, sent=begin, event_times=times)], waits, 0.1)

    assert found.startswith("1 of 3 pauses are over 100 ms, the longest ")
    assert pauses([Record(index=0, due=0.0, sent=0.0, event_times=[0.0, 0.01])], waits, 0.1) == "no pause over 100 ms"


def test_threads_that_outnumber_the_cores_wait_for_one() -> None:
    def work() -> None:
        while not has_ended.is_set():
            hashlib.pbkdf2_hmac("sha256", b"", b"", 20_000)  # without Python's lock

    has_ended, count = threading.Event(), 2 * len(os.sched_getaffinity(0)) + 2
    threads = [threading.Thread(target=work) for _ in range(count)]
    with CoreWaits() as waits:
        begin = time.monotonic()
        for thread in threads:
            thread.start()
        wait_until(lambda: waits.during(begin, time.monotonic()).sum_s > 0.2)
        has_ended.set()
        for thread in threads:
            thread.join()

    assert waits.during(begin, time.monotonic()).longest_s > 0
    assert set(dict(threads_below(os.getpid()))) >= {threading.get_native_id()}
