"""Requests that concern the requests of all gateways: each gateway gets a copy, and their answers become one.

POST /abort_request            every gateway aborts what it has
GET /debug/requests            the newest requests of all
GET /debug/requests/{id}       from the gateway that has it
"""

from __future__ import annotations

import http.client
import json
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingMixIn, UnixStreamServer
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit, urlunsplit

from lightserve.cluster.proxy.haproxy_config import error_file
from lightserve.utils.direct_http import direct_opener

ANSWER_S = 30.0  # of a gateway; it asks its engines, and waits for them at most 10 s
MAX_BODY_BYTES = 1 << 20
MAX_GATEWAYS = 16  # that are asked at once
HEADERS = ("host", "authorization", "x-api-key", "content-type", "x-request-id")  # that are sent on
NO_GATEWAY = 503
_PATH = re.compile(r"/[!-~]*")


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
        self._opener = direct_opener()

    def ask_all(self, path: str, body: bytes | None, headers: dict[str, str]) -> list[Answer]:
        """The answers of all gateways that can be reached."""
        with ThreadPoolExecutor(MAX_GATEWAYS) as threads:
            asked = [threads.submit(self._ask, url + path, body, headers) for url in self._gateways()]
            return [answer for future in asked if (answer := future.result()) is not None]

    def _ask(self, url: str, body: bytes | None, headers: dict[str, str]) -> Answer | None:
        try:
            request = urllib.request.Request(url, body, headers)
            with self._opener.open(request, timeout=ANSWER_S) as response:
                return Answer(response.status, response.read())
        except urllib.error.HTTPError as error:
            return Answer(error.code, error.read())
        except (OSError, http.client.HTTPException):  # it has died: its requests have ended
            return None


class _Handler(BaseHTTPRequestHandler):
    server: FanOut

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length") or "0"
        if not length.isdecimal() or int(length) > MAX_BODY_BYTES:
            self._send(refusal(413, f"the body is larger than {MAX_BODY_BYTES} bytes"))
            return
        self._answer(self.rfile.read(int(length)))

    def _answer(self, body: bytes | None) -> None:
        path = path_of(self.path)
        if path is None:
            self._send(refusal(400, "the target of the request is not a path"))
            return
        headers = {name: value for name, value in self.headers.items() if name.lower() in HEADERS}
        answers = self.server.ask_all(path, body, headers)
        if answers:
            self._send(merged(path, answers))
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


def path_of(target: str) -> str | None:
    """Path and query of a request's target, which may be a whole URL (RFC 9112, 3.2.2); None: it is not valid."""
    try:
        parts = urlsplit(target)
    except ValueError:
        return None
    path = urlunsplit(("", "", parts.path, parts.query, ""))
    return path if _PATH.fullmatch(path) else None


def refusal(status: int, message: str) -> Answer:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return Answer(status, json.dumps({"error": error}).encode())


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
