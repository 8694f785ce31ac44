"""A collector of OpenTelemetry traces (OTLP over HTTP, protobuf), in threads of the test."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

pytest.importorskip("opentelemetry.proto", reason="needs the package opentelemetry-proto")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass
class Collector:
    url: str = ""
    spans: list[dict[str, Any]] = field(default_factory=list)
    resources: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)  # of the next responses; empty: 200
    may_respond: threading.Event = field(default_factory=threading.Event)

    def named(self, name: str) -> dict[str, Any]:
        (found,) = [span for span in self.spans if span["name"] == name]
        return found

    def take(self, path: str, headers: dict[str, str], body: bytes) -> int:
        self.may_respond.wait()
        self.headers.append(headers | {"path": path})
        status = self.statuses.pop(0) if self.statuses else 200
        if status == 200:
            for resource_spans in ExportTraceServiceRequest.FromString(body).resource_spans:
                self.resources.append(_values(resource_spans.resource.attributes))
                self.spans += [_span(span) for scope in resource_spans.scope_spans for span in scope.spans]
        return status


def _span(span: Any) -> dict[str, Any]:
    return {
        "name": span.name,
        "trace_id": span.trace_id.hex(),
        "span_id": span.span_id.hex(),
        "parent_id": span.parent_span_id.hex(),
        "kind": span.kind,
        "begin_ns": span.start_time_unix_nano,
        "end_ns": span.end_time_unix_nano,
        "is_error": span.status.code == 2,
        **_values(span.attributes),
    }


def _values(attributes: Any) -> dict[str, Any]:
    return {one.key: _value(one.value) for one in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)


@contextmanager
def running_collector() -> Iterator[Collector]:
    collector = Collector()
    collector.may_respond.set()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(collector.take(self.path, dict(self.headers.items()), body))
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        collector.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield collector
        finally:
            collector.may_respond.set()
            server.shutdown()
            thread.join()
