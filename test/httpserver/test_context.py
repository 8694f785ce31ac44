"""Text becomes tokens within limits."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.requests import Request

from lightserve.errors import InvalidRequestError
from lightserve.httpserver import context as context_module
from test.httpserver.fake_engine import LIMITS, engine, spell
from test.small_text import small_tokenizer
from test.traced_memory import kept_bytes


def test_a_text_with_a_token_that_the_embedding_lacks_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with engine(tmp_path, spell("x"), small_tokenizer()) as (context, _):
            context.manager.engine_info(msgspec.structs.replace(LIMITS, vocab_size=8))
            assert max(await context.encode("aede")) < 8
            with pytest.raises(InvalidRequestError, match="the text has the token id 9; the model has 8 embeddings"):
                await context.encode("aede1")

    asyncio.run(scenario())


def test_warm_up_prepares_the_first_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = small_tokenizer()

    async def scenario() -> None:
        async with engine(tmp_path, spell("x"), tokenizer) as (context, _):
            context.warm_up()
            backend = ListsNoVocabulary(tokenizer._backend)
            monkeypatch.setattr(tokenizer, "_backend", backend)
            assert await context.encode("aede")
            assert backend.was_called

    asyncio.run(scenario())


def test_no_cache_keeps_the_queries_of_requests(tmp_path: Path) -> None:
    size = 2**16

    def request(number: int) -> Request:
        head = {"type": "http", "path": "/v1/completions", "headers": [], "server": ("127.0.0.1", 80)}
        state = {"request_id": "a", "record": None}
        return Request(head | {"query_string": b"%05d" % number + b"x" * size, "state": state})

    async def scenario() -> None:
        async with engine(tmp_path, spell("x"), small_tokenizer()) as (context, _):
            context.log(request(0))
            assert kept_bytes(lambda: [context.log(request(i)) for i in range(20)].clear()) < size

    asyncio.run(scenario())


class ListsNoVocabulary:
    """A backend whose vocabulary is too large to be listed while a request waits."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.was_called = False

    def __getattr__(self, name: str) -> Any:
        assert not name.startswith("get_"), f"{name} was left to the first request"
        self.was_called = True
        return getattr(self._backend, name)


def test_a_text_that_takes_too_long_is_refused_and_delays_no_other_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context_module, "ENCODE_LIMIT_S", 0.01)
    may_end = threading.Event()
    tokenizer = small_tokenizer()
    monkeypatch.setattr(tokenizer, "encode", lambda *_: may_end.wait(60) and [])

    async def scenario() -> None:
        async with engine(tmp_path, spell("x"), tokenizer) as (context, _):
            with pytest.raises(InvalidRequestError, match="takes longer than"):
                await context.encode("a" * context_module.LONG_TEXT)
            may_end.set()

    asyncio.run(scenario())
