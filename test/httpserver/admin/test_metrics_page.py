"""The exposition, read back by Prometheus's own parser."""

from __future__ import annotations

import math

import pytest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.parser import text_string_to_metric_families

from lightserve.httpserver.admin.metrics_page import NAMES, MetricsPage
from lightserve.messages.metrics import METRICS, Kind, Metric, image_histogram
from lightserve.messages.output import MetricsSnapshot
from lightserve.messages.request import ImageCounts
from lightserve.router.observability.stats import RouterMetrics

Series = dict[tuple[tuple[str, str], ...], float]  # labels -> value


def busy() -> MetricsSnapshot:
    """Every metric has a value of its own."""
    metrics = RouterMetrics()
    metrics.admitted(queue_s=0.02, prompt_tokens=100, cached_tokens=25)
    metrics.first_token(ttft_s=0.05, prefill_s=0.03)
    metrics.next_tokens(itl_s=0.004, count=3)
    metrics.next_tokens(itl_s=1000.0)
    metrics.finished("stop", 0.5, 0.45, 0.48, prompt_tokens=100, output_tokens=5, max_new_tokens=16)
    metrics.finished("length", 0.5, 0.45, 0.48, prompt_tokens=100, output_tokens=16, max_new_tokens=16)
    metrics.refused()
    metrics.failed()
    metrics.failed()
    metrics.preempted()
    metrics.evicted(tokens=77)
    metrics.step(num_tokens=103)
    metrics.encoded({"decode": 0.01, "resize": 0.02, "encode": 0.1})
    metrics.add_http_counts(ImageCounts(0, [1, *image_histogram().counts[1:]], 0.001, 2, {"file": 1}))
    metrics.set_load(running=3, waiting=4, used_tokens=512, total_tokens=2048)
    return metrics.snapshot()


def parse(text: bytes) -> dict[str, Family]:
    families = list(text_string_to_metric_families(text.decode()))
    by_name = {family.name: family for family in families}
    assert len(by_name) == len(families)
    return by_name


def samples(text: bytes) -> dict[str, Series]:
    found: dict[str, Series] = {}
    for family in parse(text).values():
        for sample in family.samples:
            labels = tuple(sorted(sample.labels.items()))
            assert labels not in found.setdefault(sample.name, {}), f"{sample.name} {labels} is there twice"
            found[sample.name][labels] = sample.value
    return found


def of_model(series: Series, **labels: str) -> float:
    return series[tuple(sorted({"model_name": "m", **labels}.items()))]


@pytest.mark.parametrize("snapshot", [RouterMetrics().snapshot(), busy()], ids=["idle", "busy"])
@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_every_metric_is_exported_with_its_kind_and_help(metric: Metric, snapshot: MetricsSnapshot) -> None:
    if metric.label in ("engine", "address", "group", "kv_group", "role"):
        assert f"lightserve_{metric.name}".encode() not in MetricsPage("m", []).render(snapshot, is_up=True)
        snapshot.labelled[metric.name]["1"] = 1.0  # as with --dp or --enable_dp_attention
    families = parse(MetricsPage("m", []).render(snapshot, is_up=True))

    name = f"lightserve_{metric.name}"
    family = families[name.removesuffix("_total") if metric.kind is Kind.COUNTER else name]
    assert (family.type, family.documentation) == (metric.kind.value, metric.help)
    assert family.samples


def test_values_are_those_of_the_router() -> None:
    found = samples(MetricsPage("m", []).render(busy(), is_up=True))

    assert of_model(found["lightserve_engine_up"]) == 1
    assert of_model(found["lightserve_num_requests_running"]) == 3
    assert of_model(found["lightserve_num_requests_waiting"]) == 4
    assert of_model(found["lightserve_kv_cache_usage_perc"]) == 0.25
    assert of_model(found["lightserve_kv_used_tokens"]) == 512
    assert of_model(found["lightserve_prompt_tokens_total"]) == 100
    assert of_model(found["lightserve_generation_tokens_total"]) == 5
    assert of_model(found["lightserve_request_success_total"], finished_reason="stop") == 1
    assert of_model(found["lightserve_request_success_total"], finished_reason="length") == 1
    assert of_model(found["lightserve_request_success_total"], finished_reason="abort") == 0
    assert of_model(found["lightserve_request_refused_total"]) == 1
    assert of_model(found["lightserve_request_failed_total"]) == 2
    assert of_model(found["lightserve_num_preemptions_total"]) == 1
    assert of_model(found["lightserve_prefix_cache_queries_total"]) == 100
    assert of_model(found["lightserve_prefix_cache_hits_total"]) == 25


def test_histogram_buckets_are_cumulative() -> None:
    found = samples(MetricsPage("m", []).render(busy(), is_up=True))

    for metric in METRICS:
        if metric.kind is not Kind.HISTOGRAM:
            continue
        name = f"lightserve_{metric.name}"
        buckets = {float(dict(labels)["le"]): count for labels, count in found[f"{name}_bucket"].items()}
        assert list(buckets) == [*metric.buckets, math.inf]
        assert list(buckets.values()) == sorted(buckets.values())
        assert buckets[math.inf] == of_model(found[f"{name}_count"]) > 0
        assert of_model(found[f"{name}_sum"]) > 0


def test_a_histogram_counts_each_value_in_its_bucket() -> None:
    found = samples(MetricsPage("m", []).render(busy(), is_up=True))

    buckets = found["lightserve_inter_token_latency_seconds_bucket"]
    assert of_model(buckets, le="0.003") == 0
    assert of_model(buckets, le="0.004") == 3  # a bound includes itself
    assert of_model(buckets, le="80.0") == 3
    assert of_model(buckets, le="+Inf") == 4
    assert of_model(found["lightserve_inter_token_latency_seconds_sum"]) == pytest.approx(1000.012)


def test_without_a_snapshot_of_the_router_only_engine_up_is_exported() -> None:
    found = samples(MetricsPage("m", ["vllm", "lightllm"]).render(None, is_up=False))

    assert found == {"lightserve_engine_up": {(("model_name", "m"),): 0.0}}


# metrics that dashboards of other servers read
VLLM = [
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:request_time_per_output_token_seconds_bucket",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:num_preemptions_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:request_prompt_tokens_bucket",
    "vllm:request_generation_tokens_bucket",
    "vllm:request_success_total",
    "vllm:request_queue_time_seconds_sum",
    "vllm:request_prefill_time_seconds_sum",
    "vllm:request_decode_time_seconds_sum",
    "vllm:request_inference_time_seconds_count",
    "vllm:request_max_num_generation_tokens_sum",
    "vllm:iteration_tokens_total_bucket",
]
LIGHTLLM = [
    "lightllm_request_count_total",
    "lightllm_request_success_total",
    "lightllm_request_failure_total",
    "lightllm_prompt_tokens_total",
    "lightllm_generation_tokens_total",
    "lightllm_queue_size",
    "lightllm_batch_current_size",
    "lightllm_num_running_reqs",
    "lightllm_cache_hit_rate",
    "lightllm_request_duration_bucket",
    "lightllm_request_inference_duration_bucket",
    "lightllm_request_mean_time_per_token_duration_bucket",
    "lightllm_request_first_token_duration_bucket",
    "lightllm_request_queue_duration_bucket_bucket",
    "lightllm_request_input_length_bucket",
    "lightllm_request_generated_tokens_bucket",
    "lightllm_request_max_new_tokens_bucket",
]


@pytest.mark.parametrize(("compat", "names"), [("vllm", VLLM), ("lightllm", LIGHTLLM)])
def test_the_names_of_other_servers_are_exported_on_request(compat: str, names: list[str]) -> None:
    ours = samples(MetricsPage("m", []).render(busy(), is_up=True))
    both = samples(MetricsPage("m", [compat]).render(busy(), is_up=True))

    prefix = NAMES[compat].prefix
    assert not [name for name in ours if name.startswith(prefix)]
    assert set(names) <= set(both)
    assert {name: both[name] for name in ours} == ours


def test_vllm_series_carry_its_labels_and_our_values() -> None:
    found = samples(MetricsPage("m", ["vllm"]).render(busy(), is_up=True))

    assert of_model(found["vllm:num_requests_waiting"], engine="0") == 4
    assert of_model(found["vllm:request_success_total"], engine="0", finished_reason="stop") == 1
    assert of_model(found["vllm:inter_token_latency_seconds_bucket"], engine="0", le="+Inf") == 4
    assert all(dict(labels)["engine"] == "0" for name in found if name[:5] == "vllm:" for labels in found[name])


def test_lightllms_metrics_are_sums_of_ours() -> None:
    found = samples(MetricsPage("m", ["lightllm"]).render(busy(), is_up=True))

    assert of_model(found["lightllm_request_success_total"]) == 2
    assert of_model(found["lightllm_request_failure_total"]) == 3
    assert of_model(found["lightllm_request_count_total"]) == 5
    assert of_model(found["lightllm_cache_hit_rate"]) == 0.25
    assert of_model(found["lightllm_request_duration_sum"]) == pytest.approx(1.0)


def test_a_server_named_twice_is_exported_once() -> None:
    page = MetricsPage("m", ["vllm", "vllm"]).render(busy(), is_up=True)

    assert page == MetricsPage("m", ["vllm"]).render(busy(), is_up=True)


@pytest.mark.parametrize("name", ['quo"te', "back\\slash", r"back\nslash", "new\nline", "漢 字", 'a"} 1\nfake 2'])
def test_a_model_name_with_quotes_is_escaped_in_a_label(name: str) -> None:
    found = samples(MetricsPage(name, []).render(busy(), is_up=True))

    assert {dict(labels)["model_name"] for series in found.values() for labels in series} == {name}
