"""Every metric, declared once: the router counts by these names, the HTTP processes export them.

The names are vLLM's without its prefix, so that a dashboard made for one fits the other.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from dataclasses import dataclass

from lightserve.messages.output import HistogramCounts, MetricsSnapshot
from lightserve.messages.request import HttpCounts, ImageCounts, SpanCounts


class Kind(enum.Enum):
    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    kind: Kind
    help: str
    buckets: tuple[float, ...] = ()  # upper bounds, inclusive; the last one, infinity, is implied
    label: str | None = None
    label_values: tuple[str, ...] = ()  # exported as 0 from the start, so that rates are defined


def _gauge(name: str, help: str) -> Metric:
    return Metric(name, Kind.GAUGE, help)


def _counter(name: str, help: str) -> Metric:
    return Metric(name, Kind.COUNTER, help)


def _engine_gauge(name: str, help: str) -> Metric:
    return Metric(name, Kind.GAUGE, help, label="engine")


def _histogram(name: str, help: str, buckets: tuple[float, ...]) -> Metric:
    return Metric(name, Kind.HISTOGRAM, help, buckets)


# vLLM's buckets with finer ones below: a small model on a GPU takes a few milliseconds per token
_FIRST_TOKEN_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_S = (
    *(0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01, 0.0125, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_S = (
    *(0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0),
    *(15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_REQUEST_TOKENS = (*(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5)), 1e6)
_IMAGE_S = (*(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5), *(1.0, 2.5, 5.0, 10.0, 30.0))
_STEP_TOKENS = (1.0, *(2.0**power for power in range(3, 16)))

DEFAULT_DRAFTS = 4  # places of drafts that are exported as 0 from the start

KV_TIERS = ("ram", "disk", "remote")
IMAGE_REFUSALS = ("number", "fetch", "busy", "file", "decode")

METRICS = (
    _gauge("num_requests_running", "Requests that are running."),
    _gauge("num_requests_waiting", "Requests that are waiting in the queue."),
    _gauge("kv_cache_usage_perc", "Share of the KV pool in use, or of a KV group's pool if it is fuller; 1 is all."),
    _gauge("kv_used_tokens", "Tokens of the KV pool in use."),
    _gauge("kv_pinned_tokens", "Tokens of the KV pool that pinned prefixes (--pinned_prefixes) hold."),
    Metric(
        "kv_group_used_slots",
        Kind.GAUGE,
        "Slots in use of a KV group's pool, as layers with a sliding window or a recurrent state may have.",
        label="kv_group",
    ),
    Metric("kv_group_slots", Kind.GAUGE, "All slots of a KV group's pool.", label="kv_group"),
    Metric(
        "kv_group_kept_slots",
        Kind.GAUGE,
        "Slots of a KV group's pool that only cached prefixes have.",
        label="kv_group",
    ),
    Metric(
        "attention_group_requests_running",
        Kind.GAUGE,
        "With data-parallel attention: requests that are running in the group.",
        label="group",
    ),
    Metric(
        "attention_group_kv_used_tokens",
        Kind.GAUGE,
        "With data-parallel attention: tokens in use of the group's KV pool.",
        label="group",
    ),
    _counter("prompt_tokens_total", "Prompt tokens of admitted requests, including cached tokens."),
    _counter("generation_tokens_total", "Tokens generated."),
    _counter("forced_tokens_total", "Generated tokens that a grammar forced; they needed no sampling step."),
    _counter("spec_decode_num_drafts_total", "With --speculative_config: steps of requests that had drafts."),
    _counter("spec_decode_num_draft_tokens_total", "With --speculative_config: tokens that were drafted."),
    _counter("spec_decode_num_accepted_tokens_total", "With --speculative_config: drafted tokens that were accepted."),
    _gauge(
        "draft_weights_old", "1: a draft head lost its updated weights, and drafts with older ones; texts are right."
    ),
    _gauge("spec_decode_synthetic", "1: drafts are accepted by a schedule (rejection_sample_method); no text is real."),
    Metric(
        "spec_decode_num_accepted_tokens_per_pos_total",
        Kind.COUNTER,
        "With --speculative_config: accepted tokens, by their place among the drafts of a step.",
        label="position",
        label_values=tuple(map(str, range(DEFAULT_DRAFTS))),
    ),
    Metric(
        "image_hits_total",
        Kind.COUNTER,
        "Images of requests whose KV or embeddings were there already, or which had to be encoded (none).",
        label="kind",
        label_values=("kv", "embedding", "none"),
    ),
    _counter("images_encoded_total", "Images encoded."),
    _counter("images_evicted_total", "Images whose embeddings were evicted to make room for others."),
    Metric(
        "images_waiting",
        Kind.GAUGE,
        "Images that are fetched from another server, wait for the encoder to take them, or are in it.",
        label="stage",
        label_values=("fetch", "queue", "encoder"),
    ),
    Metric(
        "image_refused_total",
        Kind.COUNTER,
        "Images that were refused: not fetched, fetched too many at once, no readable file, or not decoded; number "
        "counts requests with too many images.",
        label="reason",
        label_values=IMAGE_REFUSALS,
    ),
    _gauge("image_rows_used", "Rows of the arena (--embed_cache_gb) that hold embeddings, one for each token."),
    Metric(
        "request_success_total",
        Kind.COUNTER,
        "Requests that ended, by finish reason.",
        label="finished_reason",
        label_values=("stop", "length", "abort"),
    ),
    _counter("request_refused_total", "Requests refused because the queue was full."),
    _counter("request_failed_total", "Requests that ended with an error after they were accepted."),
    _counter("request_numerical_error_total", "Requests that failed because their logits were not finite numbers."),
    _counter("worker_restarts_total", "Number of times that the model workers died and were restarted."),
    _counter("http_process_restarts_total", "Number of times that an HTTP process died and was replaced."),
    _counter(
        "num_preemptions_total", "Number of times that a running request was preempted to free slots of the KV pool."
    ),
    _counter("prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache."),
    _counter("prefix_cache_hits_total", "Prompt tokens found in the prefix cache."),
    _counter("prefix_cache_evicted_tokens_total", "Tokens evicted from the prefix cache to free slots of the KV pool."),
    Metric(
        "kv_group_evicted_slots_total",
        Kind.COUNTER,
        "Slots of a KV group's pool that cached prefixes lost to requests.",
        label="kv_group",
    ),
    *(
        Metric(name, kind, help, label="tier", label_values=KV_TIERS)
        for name, kind, help in (
            ("kv_tier_stored_tokens_total", Kind.COUNTER, "Evicted tokens that were stored in this tier."),
            ("kv_tier_hits_total", Kind.COUNTER, "Prompt tokens that were loaded from this tier."),
            (
                "kv_tier_recomputed_tokens_total",
                Kind.COUNTER,
                "Prompt tokens that were in this tier, and computed because that is faster than to load them.",
            ),
            (
                "kv_tier_late_total",
                Kind.COUNTER,
                "Requests that computed tokens of this tier because their load took longer than that.",
            ),
            (
                "kv_tier_errors_total",
                Kind.COUNTER,
                "Blocks of this tier that could not be written, or were found damaged or missing and computed again.",
            ),
            ("kv_tier_used_bytes", Kind.GAUGE, "Bytes of this tier in use."),
            ("kv_tier_load_bytes_per_second", Kind.GAUGE, "Measured speed of loads from this tier; 0: none yet."),
        )
    ),
    _counter("kv_transfer_sent_tokens_total", "With --roles: prompt tokens whose KV was sent to decode engines."),
    _counter(
        "kv_transfer_waited_tokens_total",
        "With --roles: prompt tokens for whose KV decode engines waited, or wait now.",
    ),
    _counter("kv_transfer_received_tokens_total", "With --roles: of these, tokens whose KV has come."),
    _counter(
        "kv_transfer_given_up_tokens_total",
        "With --roles: of these, tokens whose KV did not come in time, or never; the decode engine computed them.",
    ),
    _counter(
        "kv_transfer_local_prefill_tokens_total",
        "With --roles: prompt tokens that decode engines computed because the queues of prefill engines were longer.",
    ),
    _counter(
        "kv_transfer_recomputed_tokens_total",
        "With --roles: prompt tokens that a decode engine computed although their KV had come.",
    ),
    _gauge(
        "kv_transfer_requests_waiting",
        "With --roles: of the waiting requests, those that wait for KV of a prefill engine.",
    ),
    *(
        Metric(name, Kind.GAUGE, help, label="role")
        for name, help in (
            ("role_requests_running", "With --dp or --engines: requests that are running in engines of this role."),
            (
                "role_requests_waiting",
                "With --dp or --engines: requests that wait for engines of this role, and not for KV of others.",
            ),
            (
                "role_kv_cache_usage_perc",
                "With --dp or --engines: mean share of the KV pools of this role in use; 1 is all.",
            ),
        )
    ),
    _engine_gauge("dp_engine_serving", "With --dp or --engines: 1 if the engine generates tokens now, else 0."),
    Metric(
        "engine_takes_requests",
        Kind.GAUGE,
        "With --engines or --engines_file: 1 if new requests are sent to the engine at this address, else 0.",
        label="address",
    ),
    _engine_gauge("dp_requests_running", "With --dp or --engines: requests that are running in the engine."),
    _engine_gauge(
        "dp_requests_waiting", "With --dp or --engines: requests that are waiting in the queue of the engine."
    ),
    _engine_gauge("dp_kv_cache_usage_perc", "With --dp or --engines: share of the engine's KV pool in use; 1 is all."),
    _counter("dp_requests_moved_total", "With --dp or --engines: requests that another engine continued."),
    _counter(
        "dp_engine_restarts_total",
        "With --dp or --engines: number of times that the router of an engine died, or its link ended.",
    ),
    _counter(
        "dp_prefix_missed_tokens_total",
        "With --dp or --engines: prompt tokens for which an engine was chosen that did not have them cached after all.",
    ),
    _counter("otlp_spans_exported_total", "Spans sent to the collector of --otlp_endpoint."),
    _counter("otlp_spans_dropped_total", "Spans dropped because the collector was slow or did not respond."),
    _counter(
        "resumable_streams_lost_total", "With --stream_log: streams that went on without it; it was down or too slow."
    ),
    _counter("resumable_streams_resumed_total", "With --stream_log: clients that came back for a stream."),
    _counter(
        "resumable_streams_taken_over_total",
        "With --stream_log: streams of HTTP processes that died, which one of this server continued.",
    ),
    _histogram("time_to_first_token_seconds", "Time from a request's arrival to its first token.", _FIRST_TOKEN_S),
    _histogram("inter_token_latency_seconds", "Time between two tokens of a request.", _TOKEN_S),
    _histogram("request_time_per_output_token_seconds", "Mean time per output token after the first.", _TOKEN_S),
    _histogram("e2e_request_latency_seconds", "Time from a request's arrival to its last token.", _REQUEST_S),
    _histogram("request_queue_time_seconds", "Time from a request's arrival to its first step.", _REQUEST_S),
    _histogram("request_prefill_time_seconds", "Time from a request's first step to its first token.", _REQUEST_S),
    _histogram("request_decode_time_seconds", "Time from a request's first token to its last token.", _REQUEST_S),
    _histogram("request_inference_time_seconds", "Time from a request's first step to its last token.", _REQUEST_S),
    _histogram("request_prompt_tokens", "Prompt tokens per request.", _REQUEST_TOKENS),
    _histogram("request_generation_tokens", "Generated tokens per request.", _REQUEST_TOKENS),
    _histogram("request_max_num_generation_tokens", "Maximum output tokens that a request allows.", _REQUEST_TOKENS),
    _histogram("iteration_tokens_total", "Tokens computed per step.", _STEP_TOKENS),
    _histogram("image_fetch_seconds", "Time to fetch an image from another server.", _IMAGE_S),
    _histogram("image_decode_seconds", "Time to decode an image.", _IMAGE_S),
    _histogram("image_resize_seconds", "Time to make an image as large as the model reads it.", _IMAGE_S),
    _histogram("image_encode_seconds", "Time to encode an image: its share of a batch of the encoder.", _IMAGE_S),
)


class Histogram:
    __slots__ = ("_buckets", "counts", "total")

    def __init__(self, buckets: tuple[float, ...]) -> None:
        self._buckets = buckets
        self.counts = [0] * (len(buckets) + 1)
        self.total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """``count`` observations of the same value."""
        self.counts[bisect_left(self._buckets, value)] += count
        self.total += value * count

    def add(self, observed: HistogramCounts) -> None:
        """What was observed in another process."""
        self.counts = [count + new for count, new in zip(self.counts, observed.counts, strict=True)]
        self.total += observed.total


class Recorder:
    """Holds every metric of METRICS, from zero. Its user writes ``values`` and ``labelled`` directly."""

    def __init__(self) -> None:
        self.values = {
            metric.name: 0.0 for metric in METRICS if metric.kind is not Kind.HISTOGRAM and metric.label is None
        }
        self.labelled = {
            metric.name: dict.fromkeys(metric.label_values, 0.0) for metric in METRICS if metric.label is not None
        }
        self._fetching: dict[int, int] = {}  # images, by HTTP process
        self.histograms = {
            metric.name: Histogram(metric.buckets) for metric in METRICS if metric.kind is Kind.HISTOGRAM
        }

    def set_fetching(self, process: int, images: int) -> None:
        """How many an HTTP process fetches now."""
        self._fetching[process] = images
        self.labelled["images_waiting"]["fetch"] = sum(self._fetching.values())

    def snapshot(self) -> MetricsSnapshot:
        return MetricsSnapshot(
            dict(self.values),
            {name: dict(counts) for name, counts in self.labelled.items()},
            {
                name: HistogramCounts(list(histogram.counts), histogram.total)
                for name, histogram in self.histograms.items()
            },
        )


def image_histogram() -> Histogram:
    """Of the seconds of a stage."""
    return Histogram(_IMAGE_S)


def add_http_counts(recorder: Recorder, counts: HttpCounts) -> None:
    """Add what an HTTP process has counted since its last message."""
    values = recorder.values
    if isinstance(counts, ImageCounts):
        recorder.histograms["image_fetch_seconds"].add(HistogramCounts(counts.fetch_counts, counts.fetch_s))
        recorder.set_fetching(counts.process, counts.fetching)
        refused = recorder.labelled["image_refused_total"]
        for reason, count in counts.refused.items():
            refused[reason] = refused.get(reason, 0.0) + count
    elif isinstance(counts, SpanCounts):
        values["otlp_spans_exported_total"] += counts.exported
        values["otlp_spans_dropped_total"] += counts.dropped
    else:
        values["resumable_streams_lost_total"] += counts.lost
        values["resumable_streams_resumed_total"] += counts.resumed
        values["resumable_streams_taken_over_total"] += counts.taken_over
