"""Traces of requests, as a collector gets them."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest

from lightserve.config import HttpConfig
from lightserve.httpserver.app import build_app
from lightserve.httpserver.http.access_log import AccessLog
from lightserve.httpserver.tracing import exporter as exporter_module
from lightserve.httpserver.tracing.exporter import SpanExporter, headers_from_env, report_counts, traces_url
from lightserve.httpserver.tracing.request_trace import RequestTrace, Span, TraceRecord, trace_context
from lightserve.messages.output import StrOut
from lightserve.messages.params import FinishReason
from lightserve.messages.request import GenerateReq, SpanCounts
from lightserve.messages.step import ReqFailed
from test.httpserver.fake_engine import Script, engine, spell
from test.httpserver.tracing.collector import Collector, running_collector
from test.waiting import until, wait_until

from lightserve.httpserver.tracing.otlp import OtlpEncoder  # isort: skip  # after the collector, which may skip

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
BODY = {"prompt": [1, 2, 3], "max_tokens": 5}
SERVER_KIND, INTERNAL_KIND = 2, 1

Check = Callable[[httpx2.AsyncClient, Collector], Awaitable[None]]


def fast_exporter(url: str) -> SpanExporter:
    return SpanExporter(url, OtlpEncoder({"service.name": "test"}).encode, retry_wait_s=0.001)


@pytest.fixture(autouse=True)
def short_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter_module, "INTERVAL_S", 0.01)


def traced(
    run_dir: Path, check: Check, script: Script | None = None, config: HttpConfig | None = None, key: str = ""
) -> None:
    async def run(collector: Collector) -> None:
        exporter = fast_exporter(collector.url)
        exporter.start()
        async with engine(run_dir, script or spell("hello", FinishReason.LENGTH), None, config) as (context, _):
            app = build_app(replace(context, export_trace=exporter.put))
            transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
            headers = {"x-api-key": key}
            async with httpx2.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as http:
                await check(http, collector)
        exporter.close(30)

    with running_collector() as collector:
        asyncio.run(run(collector))


def test_a_chat_with_images_has_a_span_for_reading_them() -> None:
    records: list[TraceRecord] = []
    trace, log = RequestTrace(b"", "m", records.append), AccessLog("id", "/v1/chat/completions", is_written=False)
    trace.watch(log)
    log.images_read_s, log.image_tokens, log.first_token_s = (log.arrived_s, log.arrived_s + 1.0), 12, 2.0
    log.is_generating = True
    log.close(None)

    trace.response_sent(200, "id", "/v1/chat/completions")

    spans = {span.name: span for span in records[0].spans}
    assert list(spans) == ["POST /v1/chat/completions", "images", "queue", "prefill", "decode"]
    assert spans["images"].end_s - spans["images"].begin_s == pytest.approx(1.0)
    assert spans["prefill"].attributes["lightserve.image_tokens"] == 12


def test_a_request_has_spans_for_queue_prefill_and_decode(tmp_path: Path) -> None:
    async def check(http: httpx2.AsyncClient, collector: Collector) -> None:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-Id": "mine"}
        response = await http.post("/v1/completions", json=BODY, headers=headers)
        await until(lambda: len(collector.spans) == 4)

        request = collector.named("POST /v1/completions")
        queue, prefill, decode = (collector.named(name) for name in ("queue", "prefill", "decode"))
        assert response.headers["traceparent"] == f"00-{TRACE}-{request['span_id']}-01"
        assert {span["trace_id"] for span in collector.spans} == {TRACE}
        assert request["parent_id"] == PARENT
        assert {span["parent_id"] for span in (queue, prefill, decode)} == {request["span_id"]}
        assert (request["kind"], queue["kind"]) == (SERVER_KIND, INTERNAL_KIND)
        assert queue["end_ns"] == prefill["begin_ns"]
        assert prefill["end_ns"] == decode["begin_ns"]
        assert request["begin_ns"] <= queue["begin_ns"] <= decode["end_ns"] <= request["end_ns"]
        assert abs(request["end_ns"] - int(time.time_ns())) < 60e9
        assert request["gen_ai.usage.input_tokens"] == prefill["gen_ai.usage.input_tokens"] == 3
        assert request["gen_ai.usage.output_tokens"] == decode["gen_ai.usage.output_tokens"] == 5
        assert request["gen_ai.usage.cache_read.input_tokens"] == 2
        assert request["gen_ai.response.finish_reasons"] == ["length"]
        assert request["gen_ai.request.model"] == "tiny"
        assert request["gen_ai.operation.name"] == "text_completion"
        assert request["http.response.status_code"] == 200
        assert request["lightserve.request_id"] == "mine"
        assert collector.resources[0]["service.name"] == "test"
        assert not any(span["is_error"] for span in collector.spans)

    traced(tmp_path, check)


def test_a_stream_is_one_trace_with_its_own_id_if_the_client_has_none(tmp_path: Path) -> None:
    async def check(http: httpx2.AsyncClient, collector: Collector) -> None:
        response = await http.post("/v1/completions", json=BODY | {"stream": True, "n": 2})
        await until(lambda: len(collector.spans) == 4)

        request = collector.named("POST /v1/completions")
        assert request["parent_id"] == ""
        assert response.headers["traceparent"] == f"00-{request['trace_id']}-{request['span_id']}-01"
        assert request["gen_ai.usage.output_tokens"] == 10
        assert request["gen_ai.response.finish_reasons"] == ["length", "length"]

    traced(tmp_path, check)


def test_a_trace_that_the_caller_does_not_sample_is_not_sent(tmp_path: Path) -> None:
    async def check(http: httpx2.AsyncClient, collector: Collector) -> None:
        response = await http.post("/v1/completions", json=BODY, headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})
        await http.post("/v1/completions", json=BODY)
        await until(lambda: len(collector.spans) == 4)

        assert response.headers["traceparent"].startswith(f"00-{TRACE}-")
        assert response.headers["traceparent"].endswith("-00")
        assert TRACE not in {span["trace_id"] for span in collector.spans}

    traced(tmp_path, check)


def test_refused_and_failed_requests_are_traced_and_scrapes_are_not(tmp_path: Path) -> None:
    def fail(req: GenerateReq) -> list[StrOut | ReqFailed]:
        return [ReqFailed(req.req_id, 504, "too late")]

    async def check(http: httpx2.AsyncClient, collector: Collector) -> None:
        await http.get("/health")
        await http.post("/v1/completions", json={"prompt": 5.5})
        await http.post("/v1/completions", json=BODY)
        await until(lambda: len(collector.spans) == 3)

        refused, failed, queue = collector.spans
        assert (refused["http.response.status_code"], refused["is_error"]) == (400, False)
        assert (failed["http.response.status_code"], failed["is_error"]) == (504, True)
        assert failed["error.type"] == "DeadlineError"
        assert failed["gen_ai.response.finish_reasons"] == ["error:504"]
        assert (queue["name"], queue["is_error"]) == ("queue", True)

    traced(tmp_path, check, fail)


def test_a_span_is_named_by_its_route_and_never_by_a_path_that_a_client_chose(tmp_path: Path) -> None:
    async def check(http: httpx2.AsyncClient, collector: Collector) -> None:
        await http.post("/v1/completions", json=BODY)
        await http.post("/v1/completions", json=BODY, headers={"x-api-key": "wrong"})
        await http.post("/v1/responses/resp_123/cancel")
        await http.post("/v1/responses/resp_123/cancel", headers={"x-api-key": "wrong"})
        await http.post("/some/path")
        await http.post("/v1/models/tiny")
        await until(lambda: len(collector.spans) == 9)

        requests = [span for span in collector.spans if span["kind"] == SERVER_KIND]
        assert [(span["name"], span["http.response.status_code"]) for span in requests] == [
            ("POST /v1/completions", 200),
            ("POST /v1/completions", 401),
            ("POST /v1/responses/{response_id}/cancel", 404),
            ("POST unmatched", 401),
            ("POST unmatched", 404),
            ("POST /v1/models/{model_id:path}", 405),
        ]
        assert all(span["name"] == f"POST {span['http.route']}" for span in requests)

    traced(tmp_path, check, config=HttpConfig(api_key=["right"]), key="right")


def test_requests_without_a_key_take_little_memory_of_the_queue(tmp_path: Path) -> None:
    records: list[TraceRecord] = []
    count, length = 50, 60_000

    async def run() -> None:
        config = HttpConfig(api_key=["right"])
        async with engine(tmp_path, spell("x"), None, config) as (context, _):
            app = build_app(replace(context, export_trace=records.append))
            transport = httpx2.ASGITransport(app)
            async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as http:
                for i in range(count):
                    headers = {"X-Request-Id": f"{i}" * 30_000, "traceparent": "0" * 1000}
                    assert (await http.post(f"/{i}{'x' * length}", headers=headers)).status_code == 401

    asyncio.run(run())
    assert len(records) == count
    assert sum(len(OtlpEncoder({}).encode([one])) for one in records) < count * 4096


def record(spans: int = 2) -> TraceRecord:
    return TraceRecord(trace_context(b""), b"\x01" * 8, [Span(f"span {i}", 1.0, 2.0) for i in range(spans)])


def test_a_collector_that_is_away_costs_its_spans_and_nothing_else() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    exporter = fast_exporter(f"http://127.0.0.1:{port}")
    exporter.start()
    for _ in range(3):
        exporter.put(record())

    wait_until(lambda: exporter.dropped == 6)
    exporter.close(30)

    assert exporter.exported == 0


def test_a_collector_that_hangs_fills_a_bounded_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter_module, "MAX_QUEUED", 4)
    monkeypatch.setattr(exporter_module, "BATCH", 1)
    with running_collector() as collector:
        collector.may_respond.clear()
        exporter = fast_exporter(collector.url)
        exporter.start()
        exporter.put(record())
        wait_until(lambda: not exporter._queue)  # the first is being sent
        for _ in range(10):
            exporter.put(record())

        assert exporter.dropped == 2 * 6  # four wait
        collector.may_respond.set()
        wait_until(lambda: exporter.exported == 2 * 5)
        exporter.close(30)


@pytest.mark.parametrize(
    ("statuses", "tries", "exported"), [([503, 429], 3, 2), ([503] * 3, 3, 0), ([400], 1, 0), ([], 1, 2)]
)
def test_a_collector_that_refuses_is_tried_again_if_that_may_help(
    statuses: list[int], tries: int, exported: int
) -> None:
    with running_collector() as collector:
        collector.statuses = statuses.copy()
        exporter = fast_exporter(collector.url)
        exporter.start()
        exporter.put(record())
        wait_until(lambda: exporter.exported + exporter.dropped == 2)
        exporter.close(30)

    assert len(collector.headers) == tries
    assert exporter.exported == exported


def test_spans_that_wait_are_sent_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter_module, "INTERVAL_S", 1000.0)
    with running_collector() as collector:
        exporter = fast_exporter(collector.url)
        exporter.start()
        exporter.put(record())
        exporter.close(30)

    assert len(collector.spans) == 2


def test_headers_of_the_environment_go_with_every_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Basic%20abc, x-team = infra ,broken")

    assert headers_from_env() == {"authorization": "Basic abc", "x-team": "infra"}


@pytest.mark.parametrize(
    ("endpoint", "path"),
    [
        ("http://host:4318", "/v1/traces"),
        ("http://host:4318/", "/v1/traces"),
        ("https://host/otlp", "/otlp/v1/traces"),
        ("https://host/otlp/v1/traces", "/otlp/v1/traces"),
    ],
)
def test_the_path_for_traces_is_added_to_an_endpoint(endpoint: str, path: str) -> None:
    assert traces_url(endpoint).path == path


def test_the_router_counts_what_every_http_process_exports() -> None:
    class Counted:
        exported, dropped = 8, 3

    class FakeRouter:
        def __init__(self) -> None:
            self.sent: list[Any] = []

        def send(self, message: Any) -> None:
            self.sent.append(message)

    async def run() -> FakeRouter:
        router = FakeRouter()
        task = asyncio.create_task(report_counts(Counted(), router))  # type: ignore[arg-type]
        await until(lambda: bool(router.sent))
        task.cancel()
        return router

    assert asyncio.run(run()).sent == [SpanCounts(8, 3)]
