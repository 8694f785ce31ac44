"""What the stream log keeps of a request while it runs."""

from __future__ import annotations

import asyncio
import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest

from lightserve.httpserver.app import build_app
from lightserve.httpserver.resume.logged_stream import NewStream
from lightserve.httpserver.resume.stream_log import StreamLog
from test.httpserver.fake_engine import engine, spell
from test.real_model import smollm2_tokenizer
from test.waiting import until

LARGE = " " * 2**20
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": [1, 2], "user": LARGE},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "user": LARGE},
    "/v1/responses": {"input": "Hi", "user": LARGE},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "container": LARGE},
    "/generate": {"inputs": "Hi", "parameters": {"max_new_tokens": 8}, "user": LARGE},
    "/api/chat": {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "user": LARGE},
    "/api/generate": {"model": "tiny", "prompt": "Hi", "stream": False, "user": LARGE},
}


def kept_bytes() -> int:
    """Of bodies, in the recordings of all requests."""
    logged_streams = [one for one in gc.get_objects() if type(one) is NewStream]
    return sum(len(part) for logged in logged_streams for part in logged._body)


@pytest.mark.parametrize("path", BODIES)
def test_the_body_of_a_request_that_is_no_stream_of_events_is_not_kept(tmp_path: Path, path: str) -> None:
    async def run() -> None:
        async with engine(tmp_path, spell("hello"), smollm2_tokenizer()) as (context, fake):
            fake.hold.clear()
            app = build_app(replace(context, stream_log=StreamLog("redis://127.0.0.1:1", 60.0)))
            transport = httpx2.ASGITransport(app)
            async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as http:
                asked = asyncio.create_task(http.post(path, json=BODIES[path]))
                await until(lambda: bool(fake.received) or asked.done())

                assert not asked.done(), asked.result().text
                assert kept_bytes() == 0
                fake.hold.set()
                assert (await asked).status_code == 200

    asyncio.run(run())
