"""Requests that concern the requests of all gateways: each gateway gets a copy, and their answers become one.

POST /abort_request            every gateway aborts what it has
GET /debug/requests            the newest requests of all
GET /debug/requests/{id}       from the gateway that has it
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingMixIn, UnixStreamServer
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

from lightserve.cluster.proxy.haproxy_config import error_file

ANSWER_S = 30.0  # of a gateway; it asks its engines, and waits for them at most 10 s
MAX_BODY_BYTES = 1 << 20
MAX_GATEWAYS = 16  # that are asked at once
HEADERS = ("host", "authorization", "x-api-key", "content-type", "x-request-id")  # that are sent on
NO_GATEWAY = 503


class Answer(NamedTuple):
    status: int
    body: bytes


class FanOut(ThreadingMixIn, UnixStreamServer):
    daemon_threads = True

    def __init__(self, path: Path, gateways: Callable[[], Sequence[str]]) -> None:
        """``gateways``: their URLs now."""
        path.unlink(missing_ok=True)
        super().__init__(str(path), _Handler)
        self._gateways = gateways

    def ask_all(self, path: str, body: bytes | None, headers: dict[str, str]) -> list[Answer]:
        """The answers of all gateways that can be reached."""
        with ThreadPoolExecutor(MAX_GATEWAYS) as threads:
            asked = [threads.submit(self._ask, url + path, body, headers) for url in self._gateways()]
            return [answer for one in asked if (answer := one.result()) is not None]

    def _ask(self, url: str, body: bytes | None, headers: dict[str, str]) -> Answer | None:
        try:
            request = urllib.request.Request(url, body, headers)
            with urllib.request.urlopen(request, timeout=ANSWER_S) as response:
                return Answer(response.status, response.read())
        except urllib.error.HTTPError as error:
            return Answer(error.code, error.read())
        except OSError:  # it has died: its requests have ended
            return None


class _Handler(BaseHTTPRequestHandler):
    server: FanOut

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        if size > MAX_BODY_BYTES:
            self._send(Answer(413, b'{"error": {"message": "the body is too large", "type": "invalid_request_error"}}'))
            return
        self._answer(self.rfile.read(size))

    def _answer(self, body: bytes | None) -> None:
        headers = {name: value for name, value in self.headers.items() if name.lower() in HEADERS}
        answers = self.server.ask_all(self.path, body, headers)
        if answers:
            self._send(merged(self.path, answers))
        else:
            self.wfile.write(error_file(NO_GATEWAY))
            self.close_connection = True

    def _send(self, answer: Answer) -> None:
        self.send_response(answer.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        self.wfile.write(answer.body)

    def log_message(self, format: str, *args: Any) -> None:
        """Gateways log their requests."""


def merged(path: str, answers: Sequence[Answer]) -> Answer:
    """One answer. An error of a gateway counts, unless another one has the request that was asked for."""
    parts = urlsplit(path)
    if "/debug/requests/" in parts.path:
        return min(answers, key=lambda answer: answer.status)
    worst = max(answers, key=lambda answer: answer.status)
    if worst.status != 200 or not parts.path.endswith("/debug/requests"):
        return worst
    listed = [request for answer in answers for request in json.loads(answer.body)["requests"]]
    listed.sort(key=lambda request: request["arrived"], reverse=True)
    limit = int(parse_qs(parts.query).get("limit", ["100"])[-1])
    return Answer(200, json.dumps({"requests": listed[:limit]}).encode())
