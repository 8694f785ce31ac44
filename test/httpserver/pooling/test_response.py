"""Lists of results: long ones are written in a thread, in pieces."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import orjson
import pytest
from starlette.responses import Response
from starlette.types import Message

from lightserve.httpserver.pooling.response import NUMBERS_PER_PIECE, list_response

SIZE = 100
FIELDS = {"object": "list", "usage": {"prompt_tokens": 1}}


def vectors(count: int, threads: set[int]) -> Iterator[dict[str, Any]]:
    for i in range(count):
        threads.add(threading.get_ident())
        yield {"index": i, "embedding": np.full(SIZE, i / 7, dtype=np.float32)}


def sent(response: Response) -> list[bytes]:
    """The pieces of the body."""
    messages: list[Message] = []

    async def send(message: Message) -> None:
        messages.append(message)

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    asyncio.run(response({"type": "http", "asgi": {"spec_version": "2.4"}}, receive, send))
    return [message["body"] for message in messages[1:] if message["body"]]


@pytest.mark.parametrize("fields", [None, FIELDS])
@pytest.mark.parametrize("count", [0, 1, NUMBERS_PER_PIECE // SIZE, 5 * NUMBERS_PER_PIECE // SIZE])
def test_a_list_of_any_length_is_json(count: int, fields: dict[str, Any] | None) -> None:
    body = orjson.loads(b"".join(sent(list_response(vectors(count, set()), count * SIZE, fields))))

    data = body if fields is None else body["data"]
    assert [one["index"] for one in data] == list(range(count))
    assert all(one["embedding"] == pytest.approx([one["index"] / 7] * SIZE) for one in data)
    assert fields is None or body == FIELDS | {"data": data}


def test_a_long_list_is_written_beside_the_event_loop() -> None:
    threads: set[int] = set()
    count = 20 * NUMBERS_PER_PIECE // SIZE

    pieces = sent(list_response(vectors(count, threads), count * SIZE))

    assert threading.get_ident() not in threads
    assert max(map(len, pieces)) < 2 * 12 * NUMBERS_PER_PIECE
    assert len(pieces) > 10


def test_a_short_list_needs_no_thread() -> None:
    threads: set[int] = set()

    [_] = sent(list_response(vectors(3, threads), 3 * SIZE))

    assert threads == {threading.get_ident()}
