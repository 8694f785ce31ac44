"""The router's metrics, and its throughput line in the log."""

from __future__ import annotations

import pytest

from lightserve.router.observability.stats import RouterMetrics, ThroughputLog


def observed(metrics: RouterMetrics, name: str) -> tuple[int, float]:
    """The number of values and their sum."""
    histogram = metrics.snapshot().histograms[name]
    return sum(histogram.counts), histogram.total


def test_an_admitted_request_counts_its_prompt_and_cached_tokens() -> None:
    metrics = RouterMetrics()

    metrics.admitted(queue_s=0.5, prompt_tokens=100, cached_tokens=64)

    values = metrics.snapshot().values
    assert values["prompt_tokens_total"] == values["prefix_cache_queries_total"] == 100
    assert values["prefix_cache_hits_total"] == 64
    assert observed(metrics, "request_queue_time_seconds") == (1, 0.5)


def test_tokens_are_counted_one_by_one_or_a_step_at_once() -> None:
    metrics = RouterMetrics()

    metrics.first_token(ttft_s=0.75, prefill_s=0.25)
    metrics.next_tokens(itl_s=0.5, count=31)
    metrics.next_tokens(itl_s=0.25)

    assert metrics.snapshot().values["generation_tokens_total"] == 33
    assert observed(metrics, "time_to_first_token_seconds") == (1, 0.75)
    assert observed(metrics, "request_prefill_time_seconds") == (1, 0.25)
    assert observed(metrics, "inter_token_latency_seconds") == (32, 15.75)


def test_a_finished_request_counts_its_times_and_lengths() -> None:
    metrics = RouterMetrics()

    metrics.finished("length", 4.0, 2.0, 3.0, prompt_tokens=7, output_tokens=5, max_new_tokens=5)

    assert metrics.snapshot().labelled["request_success_total"] == {"stop": 0, "length": 1, "abort": 0}
    assert observed(metrics, "e2e_request_latency_seconds") == (1, 4.0)
    assert observed(metrics, "request_decode_time_seconds") == (1, 2.0)
    assert observed(metrics, "request_inference_time_seconds") == (1, 3.0)
    assert observed(metrics, "request_time_per_output_token_seconds") == (1, 0.5)
    assert observed(metrics, "request_prompt_tokens") == (1, 7.0)
    assert observed(metrics, "request_generation_tokens") == (1, 5.0)
    assert observed(metrics, "request_max_num_generation_tokens") == (1, 5.0)


@pytest.mark.parametrize(("output_tokens", "decoded", "meant"), [(0, 0, 0), (1, 1, 0), (2, 1, 1)])
def test_a_request_without_tokens_has_no_token_times(output_tokens: int, decoded: int, meant: int) -> None:
    metrics = RouterMetrics()

    metrics.finished("abort", 1.0, 0.0, 0.0, prompt_tokens=7, output_tokens=output_tokens, max_new_tokens=5)

    assert observed(metrics, "request_decode_time_seconds")[0] == decoded
    assert observed(metrics, "request_inference_time_seconds")[0] == decoded
    assert observed(metrics, "request_time_per_output_token_seconds")[0] == meant
    assert observed(metrics, "e2e_request_latency_seconds")[0] == 1


def test_refusals_failures_and_preemptions_are_counted() -> None:
    metrics = RouterMetrics()

    metrics.refused()
    metrics.failed()
    metrics.failed()
    for _ in range(3):
        metrics.preempted()
    metrics.evicted(tokens=40)
    metrics.evicted(tokens=0)

    values = metrics.snapshot().values
    assert values["request_refused_total"] == 1
    assert values["request_failed_total"] == 2
    assert values["num_preemptions_total"] == 3
    assert values["prefix_cache_evicted_tokens_total"] == 40


def test_the_load_gauges_have_the_last_value() -> None:
    metrics = RouterMetrics()

    metrics.set_load(1, 1, 1, 1)
    metrics.set_load(running=3, waiting=9, used_tokens=100, total_tokens=400)
    metrics.step(num_tokens=2051)

    values = metrics.snapshot().values
    assert values["num_requests_running"] == 3
    assert values["num_requests_waiting"] == 9
    assert values["kv_used_tokens"] == 100
    assert values["kv_cache_usage_perc"] == 0.25
    assert observed(metrics, "iteration_tokens_total") == (1, 2051.0)


def test_the_usage_is_that_of_the_fuller_pool() -> None:
    metrics = RouterMetrics()

    metrics.set_load(running=3, waiting=9, used_tokens=100, total_tokens=400)
    metrics.set_kv_group_load("sliding_window_8", used_slots=40, total_slots=50)

    values, labelled = metrics.snapshot().values, metrics.snapshot().labelled
    assert values["kv_used_tokens"] == 100
    assert labelled["kv_group_used_slots"] == {"sliding_window_8": 40}
    assert labelled["kv_group_slots"] == {"sliding_window_8": 50}
    assert values["kv_cache_usage_perc"] == 0.8
    metrics.set_load(running=3, waiting=9, used_tokens=100, total_tokens=400)
    metrics.set_kv_group_load("sliding_window_8", used_slots=5, total_slots=50)
    assert metrics.snapshot().values["kv_cache_usage_perc"] == 0.25


def test_a_kv_group_shows_what_cached_prefixes_keep_and_have_lost() -> None:
    metrics = RouterMetrics()

    for evicted in (3, 7):
        metrics.set_kv_group_cache("state", kept_slots=20, evicted_slots=evicted)

    labelled = metrics.snapshot().labelled
    assert labelled["kv_group_kept_slots"] == {"state": 20}
    assert labelled["kv_group_evicted_slots_total"] == {"state": 7}


def work(metrics: RouterMetrics, prompt_tokens: int, output_tokens: int) -> None:
    metrics.admitted(queue_s=0.0, prompt_tokens=prompt_tokens, cached_tokens=prompt_tokens // 4)
    metrics.next_tokens(itl_s=0.01, count=output_tokens)


def test_a_line_has_the_rates_since_the_last_line() -> None:
    metrics = RouterMetrics()
    log = ThroughputLog(metrics, interval_s=10.0)
    metrics.set_load(running=3, waiting=1, used_tokens=50, total_tokens=400)

    assert log.line(1000.0) is None
    work(metrics, prompt_tokens=400, output_tokens=1000)
    assert log.line(1009.9) is None
    first = log.line(1010.0)
    work(metrics, prompt_tokens=0, output_tokens=30)
    second = log.line(1030.0)

    assert first == ("prompt 40.0 tok/s, output 100.0 tok/s, running 3, waiting 1, KV 12.5%, prefix hits 25.0%")
    assert second == "prompt 0.0 tok/s, output 1.5 tok/s, running 3, waiting 1, KV 12.5%, prefix hits -"


def test_an_idle_router_is_silent() -> None:
    log = ThroughputLog(RouterMetrics(), interval_s=10.0)

    assert [log.line(now) for now in (0.0, 10.0, 100.0)] == [None, None, None]


def test_idle_time_before_the_work_does_not_lower_the_rates() -> None:
    metrics = RouterMetrics()
    log = ThroughputLog(metrics, interval_s=10.0)
    for second in range(100):
        assert log.line(float(second)) is None

    work(metrics, prompt_tokens=0, output_tokens=100)

    assert log.line(100.0) is None
    assert (log.line(109.0) or "").startswith("prompt 0.0 tok/s, output 10.0 tok/s")


def test_the_last_tokens_of_the_work_get_a_line_too() -> None:
    metrics = RouterMetrics()
    log = ThroughputLog(metrics, interval_s=10.0)
    log.line(0.0)
    work(metrics, prompt_tokens=0, output_tokens=100)
    metrics.set_load(running=0, waiting=0, used_tokens=0, total_tokens=400)

    assert log.line(5.0) is None
    assert log.line(10.0) is not None
    assert log.line(20.0) is None


def test_waiting_requests_count_as_work() -> None:
    metrics = RouterMetrics()
    log = ThroughputLog(metrics, interval_s=10.0)
    metrics.set_load(running=0, waiting=1, used_tokens=0, total_tokens=400)

    log.line(0.0)

    assert "waiting 1" in (log.line(10.0) or "")


def test_an_interval_of_zero_means_no_line() -> None:
    metrics = RouterMetrics()
    log = ThroughputLog(metrics, interval_s=0.0)
    metrics.set_load(running=1, waiting=1, used_tokens=0, total_tokens=400)

    assert [log.line(now) for now in (0.0, 10.0, 100.0)] == [None, None, None]
