"""A local server with the HTTP protocol of the Hugging Face hub. It can misbehave in the ways real ones do."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

REPO = "org/tiny"
COMMIT = "1234567890abcdef" * 2 + "12345678"
LARGE = (".safetensors", ".bin", ".gguf", "tokenizer.json")  # in LFS: redirected to another host


@dataclass
class Refusal:
    status: int
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Asked:
    method: str
    path: str
    range: str | None
    token: str | None


class HubServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = files  # of REPO at the commit
        self.commit = COMMIT
        self.sent: dict[str, bytes] = {}  # contents that differ from those that are listed
        self.cuts: list[int] = []  # bytes after which the next downloads break off
        self.refusals: dict[str, Refusal] = {}  # by a part of the path
        self.is_hub = True  # False: files have no header with the commit, as on a plain web server
        self.has_xet = False  # whether large files are in Xet too
        self.asked: list[Asked] = []

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that leaves is no error."""

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def other_host(self) -> str:
        return f"http://localhost:{self.server_port}"

    def large_path(self, name: str) -> str:
        """Where the content of a large file is."""
        return f"/large/{_sha256(self.files[name])}"

    def downloads(self) -> list[str]:
        """The files that were downloaded, in order."""
        prefix = f"/{REPO}/resolve/{self.commit}/"
        return [one.path.removeprefix(prefix) for one in self.asked if one.method == "GET" and prefix in one.path]


class _Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        headers = self.headers
        self.server.asked.append(Asked(self.command, path, headers.get("Range"), headers.get("Authorization")))
        refusals = [refusal for part, refusal in self.server.refusals.items() if part in path]
        if refusals:
            self._send(refusals[0].status, b"", refusals[0].headers)
        elif path.startswith(f"/api/models/{REPO}/revision/"):
            self._send(
                200, json.dumps({"id": REPO, "sha": self.server.commit, "siblings": self._siblings()}).encode(), {}
            )
        elif path.startswith(f"/{REPO}/resolve/{self.server.commit}/"):
            self._resolve(path.removeprefix(f"/{REPO}/resolve/{self.server.commit}/"))
        elif path.startswith("/large/"):
            self._send_content(next(name for name in self.server.files if self.server.large_path(name) == path))
        else:
            self._send(404, b"", {"X-Error-Code": "RepoNotFound"})

    def _siblings(self) -> list[dict[str, object]]:
        return [_sibling(name, data) for name, data in self.server.files.items()]

    def _resolve(self, name: str) -> None:
        if name not in self.server.files:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": self.server.commit})
            return
        data = self.server.files[name]
        common = {"ETag": f'"{digest_of(name, data)}"'}
        if self.server.is_hub:
            common["X-Repo-Commit"] = self.server.commit
        if not name.endswith(LARGE):
            self._send_content(name, common)
            return
        linked = {"X-Linked-Size": str(len(data)), "X-Linked-ETag": f'"{_sha256(data)}"'}
        if self.server.has_xet:
            link = f'<{self.server.endpoint}/api/models/{REPO}/xet-read-token/{self.server.commit}>; rel="xet-auth"'
            linked |= {"X-Xet-Hash": _sha256(data), "Link": link}
        location = self.server.other_host + self.server.large_path(name)
        self._send(302, b"", common | linked | {"Location": location})

    def _send_content(self, name: str, headers: dict[str, str] | None = None) -> None:
        whole = self.server.sent.get(name, self.server.files[name])
        asked = self.headers.get("Range")
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked else 0
        span = {"Content-Range": f"bytes {start}-{len(whole) - 1}/{len(whole)}"} if asked else {}
        self._send(206 if asked else 200, whole[start:], (headers or {}) | span)

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if body and self.server.cuts and "/api/" not in self.path:
            body = body[: self.server.cuts.pop(0)]
            self.close_connection = True
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def _sibling(name: str, data: bytes) -> dict[str, object]:
    entry: dict[str, object] = {"rfilename": name, "size": len(data), "blobId": _git_sha1(data)}
    if name.endswith(LARGE):
        entry["lfs"] = {"sha256": _sha256(data), "size": len(data), "pointerSize": 130}
    return entry


def digest_of(name: str, data: bytes) -> str:
    return _sha256(data) if name.endswith(LARGE) else _git_sha1(data)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _git_sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


@contextmanager
def serving(files: dict[str, bytes]) -> Iterator[HubServer]:
    with HubServer(files) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
