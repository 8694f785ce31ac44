"""Lists of results as JSON.

A long list is written in a thread and sent in pieces: 2,048 embeddings of 4,096 numbers are 100 MB.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from itertools import islice
from typing import Any

import orjson
from starlette.responses import Response, StreamingResponse

from lightserve.httpserver.http.body import JsonObject

MAX_NUMBERS = 2**23  # of one response
NUMBERS_PER_PIECE = 2**14  # which take 0.8 ms to write


def list_response(items: Iterable[Any], numbers: int, fields: JsonObject | None = None) -> Response:
    """``items`` have so many ``numbers`` together, which may be in arrays. ``fields``: of the object that has the list
    as ``data``.
    """
    begin, end = (b"[", b"]") if fields is None else (orjson.dumps(fields)[:-1] + b',"data":[', b"]}")
    if numbers <= NUMBERS_PER_PIECE:
        return Response(b"".join([begin, *_written(iter(items)), end]), media_type="application/json")
    return StreamingResponse(_pieces(iter(items), begin, end), media_type="application/json")


async def _pieces(items: Iterator[Any], begin: bytes, end: bytes) -> AsyncIterator[bytes]:
    yield begin
    written = _written(items)
    while piece := await asyncio.to_thread(_next_piece, written):
        yield piece
    yield end


def _next_piece(written: Iterator[bytes]) -> bytes:
    """Numbers in arrays have about twelve bytes each."""
    piece = bytearray()
    while len(piece) < 12 * NUMBERS_PER_PIECE and (chunk := next(written, b"")):
        piece += chunk
    return bytes(piece)


def _written(items: Iterator[Any]) -> Iterator[bytes]:
    """The bytes between the brackets."""
    for item in islice(items, 1):
        yield orjson.dumps(item, option=orjson.OPT_SERIALIZE_NUMPY)
    for item in items:
        yield b"," + orjson.dumps(item, option=orjson.OPT_SERIALIZE_NUMPY)
