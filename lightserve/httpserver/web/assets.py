"""Files of the package as HTTP responses: compressed, with an ETag, and with a strict Content-Security-Policy."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

# The registry of the operating system may lack these or define others.
MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Cache-Control": "no-cache",  # a browser asks with the ETag, so that an update of the server takes effect at once
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Assets:
    """The files of a folder by their paths in it. Nothing else can be requested: a path is looked up, never opened."""

    def __init__(self, folder: Path, extra_headers: Mapping[str, str] | None = None) -> None:
        self._headers = HEADERS | dict(extra_headers or {})
        paths = (path for path in folder.rglob("*") if path.suffix in MEDIA_TYPES)
        self._files = {path.relative_to(folder).as_posix(): _File(path) for path in paths}

    async def respond(self, request: Request, name: str) -> Response:
        """The file, or 304 if the client has it."""
        file = self._files.get(name)
        if file is None:
            raise HTTPException(404)
        await asyncio.to_thread(file.load)  # the first time: 1.7 MB take 0.1 s to compress
        headers = self._headers | {"ETag": file.etag, "Vary": "Accept, Accept-Encoding"}
        if file.etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(file.compressed, headers=headers | {"Content-Encoding": "gzip"}, media_type=file.media_type)
        return Response(file.content, headers=headers, media_type=file.media_type)


@dataclass
class _File:
    """A file that is read when it is first requested."""

    path: Path

    @property
    def media_type(self) -> str:
        return MEDIA_TYPES[self.path.suffix]

    @cached_property
    def content(self) -> bytes:
        return self.path.read_bytes()

    @cached_property
    def compressed(self) -> bytes:
        return gzip.compress(self.content, mtime=0)

    @cached_property
    def etag(self) -> str:
        """Weak: the compressed file has the same one."""
        return f'W/"{hashlib.sha256(self.content).hexdigest()[:32]}"'

    def load(self) -> None:
        _ = self.compressed, self.etag
