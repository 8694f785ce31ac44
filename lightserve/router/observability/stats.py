"""The router's metrics, and the throughput line in the log. The caller passes the time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from lightserve.messages.int_arrays import int32s
from lightserve.messages.metrics import Recorder, add_http_counts
from lightserve.messages.output import MetricsSnapshot
from lightserve.messages.request import HttpCounts
from lightserve.messages.step import DraftColumns

Figures = Mapping[str | tuple[str, str], float]  # values by metric, or by metric and label


class RouterMetrics:
    """One method for each event in the life of a request. All times are in seconds."""

    def __init__(self) -> None:
        self._recorder = Recorder()
        self.values = self._recorder.values  # present values of counters and gauges, for the log
        self._ended = self._recorder.labelled["request_success_total"]
        self._accepted_at = self._recorder.labelled["spec_decode_num_accepted_tokens_per_pos_total"]
        histograms = self._recorder.histograms
        self._first_token = histograms["time_to_first_token_seconds"]
        self._next_token = histograms["inter_token_latency_seconds"]
        self._mean_token = histograms["request_time_per_output_token_seconds"]
        self._e2e = histograms["e2e_request_latency_seconds"]
        self._queue = histograms["request_queue_time_seconds"]
        self._prefill = histograms["request_prefill_time_seconds"]
        self._decode = histograms["request_decode_time_seconds"]
        self._inference = histograms["request_inference_time_seconds"]
        self._prompt_tokens = histograms["request_prompt_tokens"]
        self._output_tokens = histograms["request_generation_tokens"]
        self._max_new_tokens = histograms["request_max_num_generation_tokens"]
        self._step_tokens = histograms["iteration_tokens_total"]

    def admitted(self, queue_s: float, prompt_tokens: int, cached_tokens: int) -> None:
        """Called once for a request, even if it is preempted and admitted again."""
        self._queue.observe(queue_s)
        self.values["prompt_tokens_total"] += prompt_tokens
        self.values["prefix_cache_queries_total"] += prompt_tokens
        self.values["prefix_cache_hits_total"] += cached_tokens

    def first_token(self, ttft_s: float, prefill_s: float) -> None:
        self._first_token.observe(ttft_s)
        self._prefill.observe(prefill_s)
        self.values["generation_tokens_total"] += 1

    def next_tokens(self, itl_s: float, count: int = 1) -> None:
        """``count`` requests got a further token, each ``itl_s`` after its last one."""
        self._next_token.observe(itl_s, count)
        self.values["generation_tokens_total"] += count

    def forced(self, count: int = 1) -> None:
        """So many of the tokens counted by ``next_tokens`` were forced by a grammar."""
        self.values["forced_tokens_total"] += count

    def drafts(self, drafts: DraftColumns) -> None:
        """What became of the drafts of a step."""
        proposed, accepted = int32s(drafts.proposed), int32s(drafts.accepted)
        self.values["spec_decode_num_drafts_total"] += int((proposed > 0).sum())
        self.values["spec_decode_num_draft_tokens_total"] += int(proposed.sum())
        self.values["spec_decode_num_accepted_tokens_total"] += int(accepted.sum())
        for position in range(int(accepted.max(initial=0))):
            name = str(position)
            count = self._accepted_at.get(name, 0.0)
            self._accepted_at[name] = count + int((accepted > position).sum())

    def finished(  # noqa: PLR0913  called once per request with plain numbers
        self,
        reason: str,
        e2e_s: float,
        decode_s: float,
        inference_s: float,
        prompt_tokens: int,
        output_tokens: int,
        max_new_tokens: int,
    ) -> None:
        """A request ended or was aborted. ``decode_s`` and ``inference_s`` count only if it has a token."""
        self._ended[reason] = self._ended.get(reason, 0.0) + 1
        self._e2e.observe(e2e_s)
        self._prompt_tokens.observe(prompt_tokens)
        self._output_tokens.observe(output_tokens)
        self._max_new_tokens.observe(max_new_tokens)
        if output_tokens > 0:
            self._decode.observe(decode_s)
            self._inference.observe(inference_s)
        if output_tokens > 1:
            self._mean_token.observe(decode_s / (output_tokens - 1))

    def refused(self) -> None:
        self.values["request_refused_total"] += 1

    def failed(self, count: int = 1) -> None:
        self.values["request_failed_total"] += count

    def numerical_errors(self, count: int) -> None:
        """So many of the failed requests failed because their logits were not finite numbers."""
        self.values["request_numerical_error_total"] += count

    def workers_restarted(self) -> None:
        self.values["worker_restarts_total"] += 1

    def preempted(self, count: int = 1) -> None:
        self.values["num_preemptions_total"] += count

    def evicted(self, tokens: int) -> None:
        self.values["prefix_cache_evicted_tokens_total"] += tokens

    def step(self, num_tokens: int) -> None:
        self._step_tokens.observe(num_tokens)

    def set_load(self, running: int, waiting: int, used_tokens: int, total_tokens: int) -> None:
        self.values["num_requests_running"] = running
        self.values["num_requests_waiting"] = waiting
        self.values["kv_used_tokens"] = used_tokens
        self.values["kv_cache_usage_perc"] = used_tokens / total_tokens

    def set_kv_group_load(self, name: str, used_slots: int, total_slots: int) -> None:
        """Call it after ``set_load``: the usage is that of the fullest pool."""
        self._recorder.labelled["kv_group_used_slots"][name] = used_slots
        self._recorder.labelled["kv_group_slots"][name] = total_slots
        self.values["kv_cache_usage_perc"] = max(self.values["kv_cache_usage_perc"], used_slots / total_slots)

    def set_kv_group_cache(self, name: str, kept_slots: int, evicted_slots: int) -> None:
        """Slots that only cached prefixes have, and how many these have lost so far."""
        self._recorder.labelled["kv_group_kept_slots"][name] = kept_slots
        self._recorder.labelled["kv_group_evicted_slots_total"][name] = evicted_slots

    def set_groups(self, loads: Sequence[tuple[int, int]]) -> None:
        """Running requests and used KV tokens of each attention group."""
        for group, (running, used_tokens) in enumerate(loads):
            self._recorder.labelled["attention_group_requests_running"][str(group)] = running
            self._recorder.labelled["attention_group_kv_used_tokens"][str(group)] = used_tokens

    def set_figures(self, parts: Iterable[Figures]) -> None:
        """The sums of these present values."""
        total: Counter[str | tuple[str, str]] = Counter()
        for figures in parts:
            total.update(figures)
        for metric, value in total.items():
            if isinstance(metric, str):
                self.values[metric] = value
            else:
                name, label = metric
                self._recorder.labelled[name][label] = value

    def encoded(self, seconds: Mapping[str, float]) -> None:
        """The encoder has done with an image. ``seconds`` by stage; 0: it did not come so far."""
        for stage, duration_s in seconds.items():
            if duration_s:
                self._recorder.histograms[f"image_{stage}_seconds"].observe(duration_s)

    def add_http_counts(self, counts: HttpCounts) -> None:
        add_http_counts(self._recorder, counts)

    def http_process_lost(self, process: int) -> None:
        self.values["http_process_restarts_total"] += 1
        self._recorder.set_fetching(process, 0)

    def snapshot(self) -> MetricsSnapshot:
        return self._recorder.snapshot()


RATE_COUNTERS = (
    "prompt_tokens_total",
    "generation_tokens_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
)


class ThroughputLog:
    """Makes a line every ``interval_s`` while there is work; 0: never."""

    def __init__(self, metrics: RouterMetrics, interval_s: float) -> None:
        self._metrics = metrics
        self._interval_s = interval_s
        self._since_s: float | None = None
        self._before = dict.fromkeys(RATE_COUNTERS, 0.0)

    def line(self, now: float) -> str | None:
        """Call this more often than the interval, so that idle time before the work does not lower the rates."""
        values = self._metrics.values
        counts = {name: values[name] - self._before[name] for name in RATE_COUNTERS}
        is_idle = not (any(counts.values()) or values["num_requests_running"] or values["num_requests_waiting"])
        if self._since_s is None or is_idle:
            self._since_s = now
        elapsed_s = now - self._since_s
        if self._interval_s == 0 or elapsed_s < self._interval_s:
            return None
        self._since_s = now
        self._before = {name: values[name] for name in RATE_COUNTERS}
        return self._text(counts, elapsed_s)

    def _text(self, counts: dict[str, float], elapsed_s: float) -> str:
        values = self._metrics.values
        looked_up = counts["prefix_cache_queries_total"]
        hits = f"{counts['prefix_cache_hits_total'] / looked_up:.1%}" if looked_up else "-"
        return (
            f"prompt {counts['prompt_tokens_total'] / elapsed_s:.1f} tok/s, "
            f"output {counts['generation_tokens_total'] / elapsed_s:.1f} tok/s, "
            f"running {values['num_requests_running']:.0f}, waiting {values['num_requests_waiting']:.0f}, "
            f"KV {values['kv_cache_usage_perc']:.1%}, prefix hits {hits}"
        )
