"""What a gateway says of its load in /metrics."""

from __future__ import annotations

import urllib.request
from collections import defaultdict
from collections.abc import Mapping, Sequence

from prometheus_client.parser import text_string_to_metric_families

from lightserve.links.tls import trust_exactly
from lightserve.ray.messages import Load
from lightserve.utils.direct_http import direct_opener

ALL = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
OF_ROLE = ("role_requests_running", "role_requests_waiting", "role_kv_cache_usage_perc")
METRICS_S = 5.0  # until /metrics must have answered


def read_metrics(url: str, key: str | None, certificate: str | None) -> tuple[Load, dict[str, Load], list[str]]:
    """The load, that of each role, and the engines that get requests. Raises OSError."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    context = None if certificate is None else trust_exactly(certificate)
    request = urllib.request.Request(f"{url}/metrics", headers=headers)
    with direct_opener(context).open(request, timeout=METRICS_S) as response:
        return parse_metrics(response.read().decode())


def parse_metrics(text: str) -> tuple[Load, dict[str, Load], list[str]]:
    values: dict[str, float] = {}
    of_role: dict[str, dict[str, float]] = defaultdict(dict)
    taking = []
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            values[sample.name] = sample.value
            if "role" in sample.labels:
                of_role[sample.labels["role"]][sample.name] = sample.value
            if sample.name == "lightserve_engine_takes_requests" and sample.value:
                taking.append(sample.labels["address"])
    local_prefill_tokens = values.get("lightserve_kv_transfer_local_prefill_tokens_total", 0.0)
    load = _load(values, ALL, local_prefill_tokens)
    return load, {role: _load(samples, OF_ROLE, local_prefill_tokens) for role, samples in of_role.items()}, taking


def _load(values: Mapping[str, float], names: Sequence[str], local_prefill_tokens: float) -> Load:
    running, waiting, kv_usage = (values.get(f"lightserve_{name}", 0.0) for name in names)
    return Load(running, waiting, kv_usage, local_prefill_tokens)
