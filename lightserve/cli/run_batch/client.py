"""Sends the requests of a batch to a server, some at once."""

from __future__ import annotations

import http.client
import itertools
import queue
import ssl
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import orjson

from lightserve.batches.line import LineRequest
from lightserve.errors import LightserveError

READ_S = 3600.0
ATTEMPTS = 30  # while the server restarts its workers, or its queue is full
PAUSE_S = 2.0
RETRIED = (429, 503)


class LineResponse(NamedTuple):
    request: LineRequest
    status: int
    request_id: str
    body: Any


class BatchClient:
    def __init__(self, url: str, api_key: str | None, concurrency: int) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise LightserveError(f"--url {url}: not an address such as http://127.0.0.1:8000")
        self._url = url
        self._address = parts.scheme, parts.hostname, parts.port
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._concurrency = concurrency

    def responses(self, requests: Iterator[LineRequest]) -> Iterator[LineResponse]:
        """In the order in which they come."""
        pending: queue.SimpleQueue[LineRequest | None] = queue.SimpleQueue()
        results: queue.SimpleQueue[LineResponse | Exception] = queue.SimpleQueue()
        has_ended = threading.Event()
        arguments = pending, results, has_ended
        for _ in range(self._concurrency):
            threading.Thread(target=self._work, args=arguments, daemon=True).start()
        in_flight = 0
        try:
            for request in itertools.islice(requests, 2 * self._concurrency):
                pending.put(request)
                in_flight += 1
            while in_flight:
                result = results.get()
                if isinstance(result, Exception):
                    raise result
                yield result
                in_flight -= 1
                for request in itertools.islice(requests, 1):
                    pending.put(request)
                    in_flight += 1
        finally:
            has_ended.set()
            for _ in range(self._concurrency):
                pending.put(None)

    def _work(
        self,
        pending: queue.SimpleQueue[LineRequest | None],
        results: queue.SimpleQueue[LineResponse | Exception],
        has_ended: threading.Event,
    ) -> None:
        connection = self._connection()
        while (request := pending.get()) is not None and not has_ended.is_set():
            try:
                results.put(self._response(connection, request, has_ended))
            except Exception as error:  # the thread that reads results raises it
                results.put(error)
                return

    def _response(
        self, connection: http.client.HTTPConnection, request: LineRequest, has_ended: threading.Event
    ) -> LineResponse:
        problem = ""
        for _ in range(ATTEMPTS):
            try:
                connection.request("POST", self._path + request.url, orjson.dumps(request.body), self._headers)
                response = connection.getresponse()
                content = response.read()
            except (OSError, http.client.HTTPException) as error:
                connection.close()  # the next request opens it again
                problem = str(error) or type(error).__name__
            else:
                if response.status not in RETRIED:
                    request_id = response.headers.get("x-request-id", "")
                    return LineResponse(request, response.status, request_id, _json(content))
                problem = f"status {response.status}"
            if has_ended.wait(PAUSE_S):
                break
        raise LightserveError(
            f"{self._url} does not answer ({problem}); start it, and run the same command again to go on"
        )

    def _connection(self) -> http.client.HTTPConnection:
        scheme, host, port = self._address
        if scheme == "http":
            return http.client.HTTPConnection(host, port, timeout=READ_S)
        return http.client.HTTPSConnection(host, port, timeout=READ_S, context=ssl.create_default_context())


def _json(content: bytes) -> Any:
    try:
        orjson.loads(content)
    except orjson.JSONDecodeError:
        return {"error": {"message": content[:1000].decode(errors="replace")}}
    return orjson.Fragment(content)  # it may have more levels than orjson writes
