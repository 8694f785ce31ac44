"""A client of OpenAI's chat completions, for one terminal: blocking, so that Ctrl-C stops it at once."""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from lightserve.cli.chat.interrupt import reads_end_with_ctrl_c
from lightserve.errors import LightserveError

CONNECT_S = 10.0
READ_S = 600.0  # until the first token of a long prompt on a slow machine
MAX_ERROR_BYTES = 65536


class ServerRefusedError(LightserveError):
    """The server answered with an error, or not at all. The message is one line."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status  # 0: there was no response


class Delta(NamedTuple):
    """A piece of an answer."""

    thinking: str = ""
    content: str = ""
    finish_reason: str | None = None
    usage: Mapping[str, Any] | None = None  # in the last piece


class ChatClient:
    def __init__(self, url: str, api_key: str | None = None) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise LightserveError(f"--url {url}: not an address such as http://127.0.0.1:8000")
        try:
            self._port = parts.port
        except ValueError as error:
            raise LightserveError(f"--url {url}: {error}") from error
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"
        self.api_key = api_key
        self._is_https = parts.scheme == "https"
        self._host = parts.hostname
        self._path = urlsplit(self.url).path

    def model_names(self) -> list[str]:
        with closing(self._connection()) as connection:
            listed = json.loads(self._request(connection, "GET", "/v1/models").read())
        return [str(model["id"]) for model in listed["data"]]

    def stream(self, body: Mapping[str, Any]) -> Iterator[Delta]:
        """The pieces of one answer. Closing the iterator closes the connection, which ends the request."""
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        with closing(self._connection()) as connection, reads_end_with_ctrl_c(connection.sock):
            response = self._request(connection, "POST", "/v1/chat/completions", body)
            for data in _events(response):
                if data == "[DONE]":
                    return
                chunk = json.loads(data)
                if "error" in chunk:
                    raise ServerRefusedError(_message_of(chunk, data), response.status)
                yield _delta(chunk)
        raise ServerRefusedError("the connection ended before the answer was complete")

    def _connection(self) -> http.client.HTTPConnection:
        if self._is_https:
            context = ssl.create_default_context()  # SSL_CERT_FILE adds a certificate of one's own
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                self._host, self._port, timeout=CONNECT_S, context=context
            )
        else:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=CONNECT_S)
        try:
            connection.connect()
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from error
        connection.sock.settimeout(READ_S)
        return connection

    def _request(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> http.client.HTTPResponse:
        headers = {"Content-Type": "application/json"} if body is not None else {}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        try:
            connection.request(method, self._path + path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from error
        if response.status != http.HTTPStatus.OK:
            text = response.read(MAX_ERROR_BYTES).decode(errors="replace")
            raise ServerRefusedError(_error_text(response.status, text), response.status)
        return response

    def _unreachable(self, error: Exception) -> ServerRefusedError:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        remedy = "start one with `lightserve serve`, or set --url"
        return ServerRefusedError(f"no answer from a server at {self.url} ({reason}); {remedy}")


def _events(response: http.client.HTTPResponse) -> Iterator[str]:
    """The data of each server-sent event."""
    try:
        for line in response:
            if line.startswith(b"data:"):
                yield line.removeprefix(b"data:").strip().decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        raise ServerRefusedError(f"the connection broke ({error or type(error).__name__})") from error


def _delta(chunk: Mapping[str, Any]) -> Delta:
    choice: Mapping[str, Any] = next(iter(chunk.get("choices") or ()), {})
    delta = choice.get("delta") or {}
    thinking = delta.get("reasoning_content") or delta.get("reasoning") or ""
    return Delta(thinking, delta.get("content") or "", choice.get("finish_reason"), chunk.get("usage"))


def _error_text(status: int, text: str) -> str:
    try:
        return _message_of(json.loads(text), text)
    except ValueError:
        return f"status {status}: {' '.join(text.split())[:200]}"  # of a proxy


def _message_of(body: Any, text: str) -> str:
    """The message of an error body: OpenAI nests it; some servers do not."""
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message") if isinstance(error, dict) else error
    return str(message or text)[:1000]
