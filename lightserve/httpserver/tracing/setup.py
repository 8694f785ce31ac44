"""Starts the export of traces in an HTTP process, and reports its counts to the router."""

from __future__ import annotations

import asyncio
import os
from importlib.util import find_spec

from lightserve import __version__
from lightserve.httpserver.tracing.exporter import SpanExporter
from lightserve.httpserver.tracing.request_trace import AttributeValue
from lightserve.ipc.channel import Sender
from lightserve.messages.request import SpanCounts, ToRouter

REPORT_INTERVAL_S = 1.0
CLOSE_S = 2.0  # at the end of the server, for spans that are not sent yet


def has_otlp() -> bool:
    """Whether the package of the extra ``otlp`` is installed."""
    try:
        return find_spec("opentelemetry.proto") is not None
    except ModuleNotFoundError:
        return False


def start_exporter(endpoint: str | None, model: str, http_process: int) -> SpanExporter | None:
    """None: traces are off, and nothing of OpenTelemetry is imported."""
    if endpoint is None:
        return None
    from lightserve.httpserver.tracing.otlp import OtlpEncoder

    resource: dict[str, AttributeValue] = {
        "service.name": os.environ.get("OTEL_SERVICE_NAME", "lightserve"),
        "service.version": __version__,
        "service.instance.id": f"{os.uname().nodename}:{os.getppid()}",
        "process.pid": os.getpid(),
        "lightserve.http_process": http_process,
        "lightserve.model": model,
    }
    exporter = SpanExporter(endpoint, OtlpEncoder(resource).encode)
    exporter.start()
    return exporter


async def report_counts(exporter: SpanExporter, to_router: Sender[ToRouter]) -> None:
    """Every HTTP process exports its own spans. The router adds them up, so that every process shows the same sum."""
    exported = dropped = 0
    while True:
        await asyncio.sleep(REPORT_INTERVAL_S)
        if (exporter.exported, exporter.dropped) != (exported, dropped):
            to_router.send(SpanCounts(exporter.exported - exported, exporter.dropped - dropped))
            exported, dropped = exporter.exported, exporter.dropped
