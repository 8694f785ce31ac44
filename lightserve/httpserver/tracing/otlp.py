"""Spans as an OTLP message in protobuf. The package opentelemetry-proto is the extra ``otlp``."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, InstrumentationScope, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span as OtlpSpan, Status

from lightserve import __version__
from lightserve.httpserver.tracing.request_trace import AttributeValue, TraceRecord
from lightserve.utils.clock import unix_offset_ns


class OtlpEncoder:
    """``resource`` are attributes of the server, such as service.name."""

    def __init__(self, resource: Mapping[str, AttributeValue]) -> None:
        self._resource = Resource(attributes=_attributes(resource))
        self._scope = InstrumentationScope(name="lightserve", version=__version__)

    def encode(self, records: Iterable[TraceRecord]) -> bytes:
        offset_ns = unix_offset_ns()  # once, so that the spans of a request are adjacent
        spans: list[OtlpSpan] = []
        for record in records:
            spans += _spans(record, offset_ns)
            time.sleep(0)  # lets the event loop have the interpreter: a batch takes milliseconds
        scope_spans = ScopeSpans(scope=self._scope, spans=spans)
        request = ExportTraceServiceRequest(
            resource_spans=[ResourceSpans(resource=self._resource, scope_spans=[scope_spans])]
        )
        return bytes(request.SerializeToString())


def _spans(record: TraceRecord, offset_ns: int) -> list[OtlpSpan]:
    """The first span is the parent of the others."""
    spans = []
    for index, span in enumerate(record.spans):
        is_first = index == 0
        spans.append(
            OtlpSpan(
                trace_id=record.context.trace_id,
                span_id=record.span_id if is_first else os.urandom(8),
                parent_span_id=record.context.parent_id if is_first else record.span_id,
                name=span.name,
                kind=OtlpSpan.SPAN_KIND_SERVER if is_first else OtlpSpan.SPAN_KIND_INTERNAL,
                start_time_unix_nano=offset_ns + round(span.begin_s * 1e9),
                end_time_unix_nano=offset_ns + round(span.end_s * 1e9),
                attributes=_attributes(span.attributes),
                status=Status(code=Status.STATUS_CODE_ERROR) if span.is_error else None,
            )
        )
    return spans


def _attributes(values: Mapping[str, AttributeValue]) -> list[KeyValue]:
    return [KeyValue(key=name, value=_any_value(value)) for name, value in values.items()]


def _any_value(value: AttributeValue | Sequence[str]) -> AnyValue:
    if isinstance(value, str):
        return AnyValue(string_value=value)
    if isinstance(value, int):
        return AnyValue(int_value=value)
    return AnyValue(array_value=ArrayValue(values=[_any_value(item) for item in value]))
