"""How many lines run: more while nothing waits, none but the oldest while something does."""

from __future__ import annotations

from lightserve.httpserver.batches.concurrency import FIRST_LIMIT, ConcurrencyLimit
from lightserve.messages.metrics import Recorder
from lightserve.messages.output import RouterStats


def sample(waiting: float = 0, usage: float = 0) -> RouterStats:
    metrics = Recorder().snapshot()
    values = {"num_requests_waiting": waiting, "kv_cache_usage_perc": usage}
    return RouterStats(0.0, type(metrics)(metrics.values | values, metrics.labelled, metrics.histograms))


def test_the_limit_doubles_while_nothing_waits() -> None:
    concurrency = ConcurrencyLimit(maximum=50)
    limits = []
    for _ in range(4):
        concurrency.update(sample(), concurrency.limit)
        limits.append(concurrency.limit)

    assert limits == [2 * FIRST_LIMIT, 4 * FIRST_LIMIT, 50, 50]
    assert ConcurrencyLimit(maximum=3).limit == 3


def test_the_same_sample_counts_once() -> None:
    concurrency, stats = ConcurrencyLimit(50), sample()
    for _ in range(3):
        concurrency.update(stats, 8)

    assert concurrency.limit == 2 * FIRST_LIMIT


def test_a_full_pool_stops_the_growth() -> None:
    concurrency = ConcurrencyLimit(50)
    concurrency.update(sample(usage=0.9), 8)

    assert (concurrency.limit, concurrency.num_stopped) == (FIRST_LIMIT, 0)


def test_a_busy_server_slows_lines_to_one_and_they_resume() -> None:
    concurrency, in_flight, counts = ConcurrencyLimit(64), 64, []
    concurrency.limit = 64
    for _ in range(8):
        concurrency.update(sample(waiting=3), in_flight)
        in_flight -= concurrency.num_stopped
        counts.append((concurrency.limit, in_flight))

    assert counts[0] == (32, 64)  # a burst: nothing is stopped yet
    assert counts[1:4] == [(16, 16), (8, 8), (4, 4)]
    assert counts[-1] == (0, 1)
    concurrency.update(sample(), 1)
    assert concurrency.limit == 1
