"""Observability: a log line per request, throughput lines, and metrics under the names of common dashboards."""

from __future__ import annotations

import gzip
import json
import re
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from test.api.server import RESPONSE_S, ServerProcess, running_server
from test.waiting import wait_until

IDLE_S = 5.0


def post(server: ServerProcess, path: str, body: dict[str, Any], **headers: str) -> Any:
    status, response = server.post(path, body, **headers)
    assert status == 200, response
    return response


def test_requests_appear_in_log_and_metrics(tmp_path: Path) -> None:
    flags = ("--null_worker", "--null_step_ms", "5", "--log_stats_interval", "1", "--metrics_compat", "vllm,lightllm")
    with running_server(tmp_path / "log", *flags, "--profile_dir", str(tmp_path / "profiles")) as server:
        check_profile(server)
        for i in range(5):
            body = {"prompt": [1, 2, 3], "max_tokens": 100, "ignore_eos": True, "n": 2}
            post(server, "/v1/completions", body, **{"X-Request-Id": f"mine-{i}"})

        wait_until(lambda: server.metrics()["request_success_total/length"] == 11)
        wait_until(lambda: "tok/s" in server.log)
        seen = server.metrics()

        check_timelines(server)
        line = next(line for line in server.log.splitlines() if "mine-0" in line)
        pattern = (
            r"mine-0 /v1/completions status=200 prompt=3 cached=0 output=200 "
            r"queue=\d+\.\d+s first=\d+\.\d+s total=\d+\.\d+s finish=length\*2"
        )
        assert re.search(pattern, line)
        assert re.search(r"prompt \d+\.\d tok/s, output \d+\.\d tok/s, running \d+, waiting \d+, KV \d", server.log)
        for prefix in ("", "vllm:"):
            assert seen[f"{prefix}generation_tokens_total"] == 1004
            assert seen[f"{prefix}prompt_tokens_total"] == 37
            assert seen[f"{prefix}time_to_first_token_seconds_count"] == 11
            assert seen[f"{prefix}inter_token_latency_seconds_count"] == 993
            assert seen[f"{prefix}e2e_request_latency_seconds_count"] == 11
            assert seen[f"{prefix}num_requests_running"] == 0
        assert seen["lightllm_request_count_total"] == 11
        below_5ms = seen["inter_token_latency_seconds_bucket/0.005"]
        below_20ms = seen["inter_token_latency_seconds_bucket/0.02"]
        assert below_5ms < below_20ms  # a step takes 5 ms: the buckets are fine enough to see it


def check_profile(server: ServerProcess) -> None:
    """Router and worker are in one file, on one clock."""
    post(server, "/start_profile", {"max_seconds": 60})
    post(server, "/v1/completions", {"prompt": [7] * 7, "max_tokens": 4, "ignore_eos": True}, **{"X-Request-Id": "p"})
    events = json.loads(gzip.decompress(Path(post(server, "/stop_profile", {})["path"]).read_bytes()))["traceEvents"]

    processes = {one["args"]["name"]: one["pid"] for one in events if one["name"] == "process_name"}
    assert set(processes) == {"router", "model worker 0"}
    steps = sorted(one["ts"] for one in events if one["name"] in ("prefill step", "decode step"))
    launches = sorted(one["ts"] for one in events if one["name"] == "launch")
    assert 4 <= len(steps) <= len(launches)  # a last one may free the request
    assert all(sent < launched for sent, launched in zip(steps, launches, strict=False))
    assert all(launched < sent for launched, sent in zip(launches, steps[1:], strict=False))
    assert "request p (0)" in [one["args"]["name"] for one in events if one["name"] == "thread_name"]


def check_timelines(server: ServerProcess) -> None:
    """Of the requests above."""
    with urllib.request.urlopen(f"{server.url}/debug/requests?limit=3", timeout=RESPONSE_S) as response:
        listed = json.load(response)["requests"]
    with urllib.request.urlopen(f"{server.url}/debug/requests/mine-0", timeout=RESPONSE_S) as response:
        sequences = json.load(response)["sequences"]

    assert [one["request_id"] for one in listed] == ["mine-4", "mine-4", "mine-3"]
    assert len(sequences) == 2
    for one in sequences:
        assert (one["prompt_tokens"], one["output_tokens"], one["end"]) == (3, 100, "length")
        assert [event["event"] for event in one["events"]] == [
            *("queued", "admitted", "prefill", "first_token", "finished")
        ]


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that logs no requests, with a small KV pool."""
    flags = ("--null_worker", "--disable_log_requests", "--max_total_token_num", "600")
    with running_server(tmp_path_factory.mktemp("quiet") / "log", *flags) as server:
        yield server


def test_request_log_lines_can_be_disabled(quiet: ServerProcess) -> None:
    post(quiet, "/v1/completions", {"prompt": [1], "max_tokens": 2}, **{"X-Request-Id": "unlogged"})

    assert "unlogged" not in quiet.log


def test_max_model_len_is_limited_by_the_kv_pool(quiet: ServerProcess) -> None:
    with urllib.request.urlopen(f"{quiet.url}/v1/models", timeout=RESPONSE_S) as response:
        longest = json.load(response)["data"][0]["max_model_len"]
    completion = post(quiet, "/v1/completions", {"prompt": [1, 2], "max_tokens": longest - 2})

    assert longest == 600
    assert completion["usage"]["total_tokens"] == longest


@pytest.mark.slow
def test_an_idle_server_uses_little_cpu(server: ServerProcess) -> None:
    """All processes together come to use less than 2 % of a core. Some begin only after the server is ready."""
    children = [child for group in server.processes().values() for child in group]

    def used_s() -> float:
        return sum(sum(child.cpu_times()[:2]) for child in children)

    def used_share() -> float:
        begin_s, begin_used_s = time.monotonic(), used_s()
        wait_until(lambda: time.monotonic() - begin_s > IDLE_S, 2 * IDLE_S)
        return (used_s() - begin_used_s) / (time.monotonic() - begin_s)

    wait_until(lambda: server.metrics()["num_requests_running"] == 0)
    wait_until(lambda: used_share() < 0.02)
