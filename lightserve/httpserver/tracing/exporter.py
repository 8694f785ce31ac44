"""Sends spans to a collector (OTLP over HTTP) in a thread. Spans that it does not take are dropped and counted."""

from __future__ import annotations

import asyncio
import http.client
import os
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from urllib.parse import SplitResult, unquote, urlsplit

from lightserve import __version__
from lightserve.httpserver.tracing.request_trace import AttributeValue, TraceRecord
from lightserve.ipc.channel import Sender
from lightserve.messages.request import SpanCounts, ToRouter
from lightserve.utils.logger import init_logger

logger = init_logger(__name__)

TRACES_PATH = "/v1/traces"
MAX_QUEUED = 2048  # requests of at most some 4 kB: their attributes are cut
BATCH = 64  # requests of one message: their serialisation holds the interpreter for less than a millisecond
INTERVAL_S = 1.0  # between batches, unless one is full
TIMEOUT_S = 5.0  # of a connection, and of a response
TRIES = 3  # of a batch; afterwards it is dropped
RETRY_WAIT_S = 1.0  # before the second try, twice that before the third
RETRIED_STATUSES = frozenset({429, 502, 503, 504})  # as the OTLP specification says
WARNING_INTERVAL_S = 60.0
REPORT_INTERVAL_S = 1.0
CLOSE_S = 2.0  # at the end of the server, for spans that are not sent yet

Encode = Callable[[Iterable[TraceRecord]], bytes]


class SpanExporter:
    """``put`` may be called from the event loop: it appends to a bounded queue and never waits."""

    def __init__(self, endpoint: str, encode: Encode, retry_wait_s: float = RETRY_WAIT_S) -> None:
        self.exported = 0  # spans
        self.dropped = 0
        self._url = traces_url(endpoint)
        self._target = f"{self._url.path}?{self._url.query}" if self._url.query else self._url.path
        self._encode = encode
        self._retry_wait_s = retry_wait_s
        self._headers = {"Content-Type": "application/x-protobuf", **headers_from_env()}
        self._queue: deque[TraceRecord] = deque()
        self._wake = threading.Event()
        self._is_closed = False
        self._connection: http.client.HTTPConnection | None = None
        self._warned_s = -WARNING_INTERVAL_S
        self._thread = threading.Thread(target=self._run, name="otlp", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, record: TraceRecord) -> None:
        if len(self._queue) >= MAX_QUEUED:
            self.dropped += len(record.spans)
            return
        self._queue.append(record)
        if len(self._queue) >= BATCH:
            self._wake.set()

    def close(self, timeout_s: float) -> None:
        """Send what is queued, for at most ``timeout_s``."""
        self._is_closed = True
        self._wake.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._is_closed or self._queue:
            self._wake.wait(INTERVAL_S)
            if not self._is_closed:
                self._wake.clear()
            while self._queue:
                batch = [self._queue.popleft() for _ in range(min(BATCH, len(self._queue)))]
                self._export(batch)

    def _export(self, batch: list[TraceRecord]) -> None:
        count = sum(len(record.spans) for record in batch)
        try:
            error = self._send_with_retries(self._encode(batch))
        except Exception as failure:  # traces must not end the thread: the next batch may be fine
            error = f"{type(failure).__name__}: {failure}"
        if error is None:
            self.exported += count
            return
        self.dropped += count
        self._warn(error)

    def _send_with_retries(self, body: bytes) -> str | None:
        """What went wrong; None: the collector has the spans."""
        error: str | None = None
        for attempt in range(TRIES):
            status, error = self._send(body)
            if error is None or (status and status not in RETRIED_STATUSES) or self._is_closed:
                return error
            if attempt + 1 < TRIES:
                time.sleep(self._retry_wait_s * 2**attempt)
        return error

    def _send(self, body: bytes) -> tuple[int, str | None]:
        """The status of the response, 0 without one, and what went wrong."""
        try:
            connection = self._connection = self._connection or _connect(self._url)
            connection.request("POST", self._target, body, self._headers)
            response = connection.getresponse()
            response.read()
        except (OSError, http.client.HTTPException) as error:
            self._disconnect()
            return 0, f"{type(error).__name__}: {error}"
        if response.status // 100 == 2:
            return response.status, None
        return response.status, f"status {response.status}"

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _warn(self, error: str) -> None:
        now = time.monotonic()
        if now - self._warned_s >= WARNING_INTERVAL_S:
            self._warned_s = now
            text = "%d spans were dropped so far: the collector %s does not take them (%s); see --otlp_endpoint"
            logger.warning(text, self.dropped, self._url.netloc.rpartition("@")[2], error)


def traces_url(endpoint: str) -> SplitResult:
    """The address of a collector, with the path for traces if it has none."""
    url = urlsplit(endpoint)
    path = url.path.rstrip("/")
    return url._replace(path=path if path.endswith(TRACES_PATH) else path + TRACES_PATH)


def headers_from_env() -> dict[str, str]:
    """OTEL_EXPORTER_OTLP_HEADERS, as other exporters read it: ``name=value,name=value``. It may hold a secret."""
    pairs = (pair.partition("=") for pair in os.environ.get("OTEL_EXPORTER_OTLP_HEADERS", "").split(","))
    return {unquote(name.strip()): unquote(value.strip()) for name, equals, value in pairs if equals and name.strip()}


def _connect(url: SplitResult) -> http.client.HTTPConnection:
    host = url.hostname or ""
    if url.scheme == "https":
        return http.client.HTTPSConnection(host, url.port, timeout=TIMEOUT_S, context=ssl.create_default_context())
    return http.client.HTTPConnection(host, url.port, timeout=TIMEOUT_S)


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
