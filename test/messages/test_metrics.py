"""The list of metrics, histograms and snapshots."""

from __future__ import annotations

import msgspec
import pytest

from lightserve.messages.metrics import METRICS, Histogram, Kind, Recorder
from lightserve.messages.output import HistogramCounts, MetricsSnapshot


def test_every_metric_is_declared_once_and_its_buckets_rise() -> None:
    names = [metric.name for metric in METRICS]

    assert len(names) == len(set(names))
    for metric in METRICS:
        assert list(metric.buckets) == sorted(set(metric.buckets))
        assert bool(metric.buckets) == (metric.kind is Kind.HISTOGRAM)
        assert metric.kind is not Kind.COUNTER or metric.name.endswith("_total")


@pytest.mark.parametrize(("value", "bucket"), [(-1.0, 0), (0.0, 0), (1.0, 0), (1.5, 1), (2.0, 1), (2.5, 2)])
def test_a_value_counts_in_the_first_bucket_with_a_large_enough_bound(value: float, bucket: int) -> None:
    histogram = Histogram((1.0, 2.0))

    histogram.observe(value, count=3)

    assert histogram.counts == [3 if i == bucket else 0 for i in range(3)]
    assert histogram.total == 3 * value


def test_a_snapshot_contains_every_metric_and_does_not_change_later() -> None:
    recorder = Recorder()

    snapshot = recorder.snapshot()
    recorder.values["prompt_tokens_total"] += 1
    recorder.labelled["request_success_total"]["stop"] += 1
    recorder.histograms["iteration_tokens_total"].observe(1)

    assert {*snapshot.values, *snapshot.labelled, *snapshot.histograms} == {metric.name for metric in METRICS}
    assert set(snapshot.values.values()) == {0.0}
    assert snapshot.labelled["request_success_total"] == {"stop": 0, "length": 0, "abort": 0}
    assert sum(sum(one.counts) for one in snapshot.histograms.values()) == 0


def test_a_snapshot_survives_encoding() -> None:
    recorder = Recorder()
    recorder.histograms["iteration_tokens_total"].observe(5)

    received = msgspec.msgpack.decode(msgspec.msgpack.encode(recorder.snapshot()), type=MetricsSnapshot)

    assert received == recorder.snapshot()
    assert isinstance(received.histograms["iteration_tokens_total"], HistogramCounts)
