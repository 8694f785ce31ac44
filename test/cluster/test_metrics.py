"""The metrics of engines of several versions as one snapshot."""

from __future__ import annotations

from lightserve.cluster.disaggregation import SAME_SERVER
from lightserve.cluster.engine import Engine
from lightserve.cluster.load_estimate import SharedRates
from lightserve.cluster.metrics import ClusterMetrics
from lightserve.messages.output import HistogramCounts, MetricsSnapshot, RouterStats
from lightserve.router.observability.stats import RouterMetrics
from test.cluster.test_adapters import FakeLink

HISTOGRAM = "time_to_first_token_seconds"


def snapshot_with(running: float) -> MetricsSnapshot:
    metrics = RouterMetrics()
    metrics.values["num_requests_running"] = running
    metrics.first_token(0.1, 0.1)
    return metrics.snapshot()


def test_an_engine_of_another_version_counts_with_what_it_has() -> None:
    current, older, other = (snapshot_with(running) for running in (1.0, 2.0, 4.0))
    for name in ("kv_transfer_requests_waiting", "prefix_cache_hits_total"):
        del older.values[name]
    older.labelled.clear()
    older.histograms.clear()
    other.values["a_metric_of_tomorrow"] = 1.0
    other.histograms[HISTOGRAM] = HistogramCounts([1, 2], 3.0)
    engines = [Engine(number, FakeLink(), SharedRates(), "normal", SAME_SERVER) for number in range(3)]
    for engine, metrics in zip(engines, (current, older, other), strict=True):
        engine.stats = RouterStats(0.0, metrics)

    cluster = ClusterMetrics()
    total = cluster.snapshot(engines, {0: "", 1: "", 2: ""}, num_unplaced=0)
    cluster.engine_left(engines[1])
    after = cluster.snapshot([engines[0], engines[2]], {0: "", 2: ""}, num_unplaced=0)

    assert total.values["num_requests_running"] == 7
    assert "a_metric_of_tomorrow" not in total.values
    assert sum(total.histograms[HISTOGRAM].counts) == sum(current.histograms[HISTOGRAM].counts)
    assert after.values["num_requests_running"] == 5
