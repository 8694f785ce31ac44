"""The metrics of all engines as one snapshot: sums, and a few gauges for each engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lightserve.cluster.engine import Engine
from lightserve.messages.metrics import METRICS, Kind, Recorder, add_http_counts
from lightserve.messages.output import HistogramCounts, MetricsSnapshot
from lightserve.messages.request import HttpCounts

MEANS = ("kv_cache_usage_perc",)
# by the metric of an engine: the same with the label ``engine``
BY_ENGINE = {
    "dp_requests_running": "num_requests_running",
    "dp_requests_waiting": "num_requests_waiting",
    "dp_kv_cache_usage_perc": "kv_cache_usage_perc",
}
BY_ROLE = ("role_requests_running", "role_requests_waiting", "role_kv_cache_usage_perc")
OF_ROLE = ("num_requests_running", "num_requests_waiting", "kv_transfer_requests_waiting", "kv_cache_usage_perc")
GAUGES = {metric.name for metric in METRICS if metric.kind is Kind.GAUGE}


class ClusterMetrics:
    def __init__(self) -> None:
        self._own = Recorder()
        self.values = self._own.values  # what the dispatcher itself counts
        self._ended = self._own.snapshot()  # sum of the counters of routers that died
        self._left: dict[int, tuple[str, MetricsSnapshot]] = {}  # by engine: of a router that died or is disconnected

    def add_http_counts(self, counts: HttpCounts) -> None:
        add_http_counts(self._own, counts)

    def http_process_lost(self, process: int) -> None:
        self.values["http_process_restarts_total"] += 1
        self._own.set_fetching(process, 0)

    def engine_left(self, engine: Engine) -> None:
        """Keep what a router has counted: counters never decrease."""
        if engine.stats is not None:
            self._retire(engine.number)
            self._left[engine.number] = engine.link.instance, _without_gauges(engine.stats.metrics)

    def _retire(self, number: int) -> None:
        if number in self._left:
            self._ended = _sum([self._ended, self._left.pop(number)[1]])

    def snapshot(self, engines: Iterable[Engine], addresses: Mapping[int, str], num_unplaced: int) -> MetricsSnapshot:
        """``addresses`` are those of all engines by number, also of engines that are down."""
        by_number = {engine.number: engine for engine in engines}
        stats = {number: engine.stats.metrics for number, engine in by_number.items() if engine.stats is not None}
        for number in stats:
            if number in self._left and self._left[number][0] == by_number[number].link.instance:
                del self._left[number]  # the same router is connected again, and counts on
        left = [metrics for _, metrics in self._left.values()]
        total = _sum([self._own.snapshot(), self._ended, *left, *stats.values()])
        for name in MEANS:
            total.values[name] /= max(len(stats), 1)
        total.values["num_requests_waiting"] += num_unplaced
        for name, metric in BY_ENGINE.items():
            total.labelled[name] = {str(number): metrics.values.get(metric, 0.0) for number, metrics in stats.items()}
        total.labelled.update(_by_role([(by_number[number].role, metrics.values) for number, metrics in stats.items()]))
        total.labelled["dp_engine_serving"] = {
            str(number): float(number in by_number and by_number[number].is_serving) for number in addresses
        }
        total.labelled["engine_takes_requests"] = {
            address: float(number in by_number and by_number[number].takes_requests)
            for number, address in addresses.items()
            if address
        }
        return total


def _by_role(engines: list[tuple[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """The load of each role: who decides how many engines it needs must not count requests that wait for another."""
    labelled: dict[str, dict[str, float]] = {name: {} for name in BY_ROLE}
    for role in dict.fromkeys(role for role, _ in engines):
        role_values = [values for engine_role, values in engines if engine_role == role]
        running, waiting, for_kv, usage = (sum(values.get(name, 0.0) for values in role_values) for name in OF_ROLE)
        loads = running, waiting - for_kv, usage / len(role_values)
        for name, load in zip(BY_ROLE, loads, strict=True):
            labelled[name][role] = load
    return labelled


def _sum(snapshots: list[MetricsSnapshot]) -> MetricsSnapshot:
    """The metrics that the first one has. Engines of other versions may lack some, and have others."""
    first = snapshots[0]
    return MetricsSnapshot(
        {name: sum(snapshot.values.get(name, 0.0) for snapshot in snapshots) for name in first.values},
        {name: _sum_labelled([snapshot.labelled.get(name, {}) for snapshot in snapshots]) for name in first.labelled},
        {
            name: _sum_histograms([snapshot.histograms[name] for snapshot in snapshots if name in snapshot.histograms])
            for name in first.histograms
        },
    )


def _sum_labelled(counts: list[dict[str, float]]) -> dict[str, float]:
    labels = dict.fromkeys(label for by_label in counts for label in by_label)
    return {label: sum(by_label.get(label, 0.0) for by_label in counts) for label in labels}


def _sum_histograms(histograms: list[HistogramCounts]) -> HistogramCounts:
    """Those with other buckets are left out."""
    histograms = [histogram for histogram in histograms if len(histogram.counts) == len(histograms[0].counts)]
    counts = [sum(column) for column in zip(*(histogram.counts for histogram in histograms), strict=True)]
    return HistogramCounts(counts, sum(histogram.total for histogram in histograms))


def _without_gauges(snapshot: MetricsSnapshot) -> MetricsSnapshot:
    values = {name: 0.0 if name in GAUGES else value for name, value in snapshot.values.items()}
    labelled = {name: {} if name in GAUGES else counts for name, counts in snapshot.labelled.items()}
    return MetricsSnapshot(values, labelled, snapshot.histograms)
