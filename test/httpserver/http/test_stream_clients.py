"""Clients of streams: they skip keep-alives, and find one event in every HTTP chunk."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import anthropic
import openai
import pytest
from huggingface_hub import InferenceClient
from starlette.types import Send
from text_generation import Client as TgiClient

from lightserve.httpserver.http.protocol import ResponseConnection
from lightserve.httpserver.http.sse import EventStream
from test.httpserver.fake_engine import FakeEngine, spell
from test.httpserver.generate_server import Served, serve
from test.waiting import DEADLINE_S

TEXT = "Hello"
QUESTION = "Why?"


def chat(url: str) -> str:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=DEADLINE_S)
    messages: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": QUESTION}]
    chunks = client.chat.completions.create(model="tiny", messages=messages, stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def completions(url: str) -> str:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=DEADLINE_S)
    return "".join(chunk.choices[0].text for chunk in client.completions.create(model="tiny", prompt="x", stream=True))


def responses(url: str) -> str:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=DEADLINE_S)
    events = client.responses.create(model="tiny", input=QUESTION, stream=True)
    return "".join(event.delta for event in events if event.type == "response.output_text.delta")


def messages(url: str) -> str:
    client = anthropic.Anthropic(base_url=url, api_key="none", timeout=DEADLINE_S)
    with client.messages.stream(model="tiny", max_tokens=9, messages=[{"role": "user", "content": QUESTION}]) as stream:
        return "".join(stream.text_stream)


def tgi(url: str) -> str:
    return "".join(
        one.token.text for one in TgiClient(url, timeout=DEADLINE_S).generate_stream(QUESTION, max_new_tokens=9)
    )


def hugging_face(url: str) -> str:
    client = InferenceClient(base_url=url, timeout=DEADLINE_S)
    return "".join(client.text_generation(QUESTION, max_new_tokens=9, stream=True, seed=1))


def holding_engine(client: Callable[[str], str], engines: list[FakeEngine]) -> Callable[[Served], Awaitable[None]]:
    """A client reads a text from an engine that waits until the test lets it go on: it is added to ``engines``."""

    async def scenario(served: Served) -> None:
        engines.append(served.fake)
        served.fake.hold.clear()
        assert await asyncio.to_thread(client, served.url) == TEXT

    return scenario


@pytest.mark.filterwarnings("ignore::pydantic.PydanticDeprecatedSince20")  # of TGI's client
@pytest.mark.parametrize("client", [chat, completions, responses, messages, tgi, hugging_face])
def test_a_client_skips_keep_alives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, client: Callable[[str], str]
) -> None:
    keep_alives: list[EventStream] = []
    engines: list[FakeEngine] = []
    send_keep_alive = EventStream._send_keep_alive

    async def release_after_two(stream: EventStream, send: Send) -> None:
        await send_keep_alive(stream, send)
        keep_alives.append(stream)
        if len(keep_alives) == 2:
            engines[0].hold.set()

    monkeypatch.setattr(EventStream, "keep_alive_s", 0.01)
    monkeypatch.setattr(EventStream, "_send_keep_alive", release_after_two)
    serve(holding_engine(client, engines), tmp_path, spell(TEXT))

    assert len(keep_alives) >= 2


@pytest.mark.filterwarnings("ignore::pydantic.PydanticDeprecatedSince20")  # of TGI's client
@pytest.mark.parametrize("client", [chat, completions, responses, messages, tgi, hugging_face])
def test_tokens_between_the_first_and_the_last_are_written_as_they_arrive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, client: Callable[[str], str]
) -> None:
    written: list[bytes] = []
    engines: list[FakeEngine] = []
    quiet: list[EventStream] = []
    write, send_keep_alive = ResponseConnection.write, EventStream._send_keep_alive

    def record(connection: ResponseConnection, events: bytes) -> None:
        written.append(events)
        write(connection, events)

    async def release(stream: EventStream, send: Send) -> None:
        """The first token was sent a while ago, so the reader waits for the next one."""
        await send_keep_alive(stream, send)
        if stream._first.done() and not stream._is_sending:
            quiet.append(stream)
        if len(quiet) == 2:
            engines[0].hold.set()

    monkeypatch.setattr(EventStream, "keep_alive_s", 0.01)
    monkeypatch.setattr(EventStream, "_send_keep_alive", release)
    monkeypatch.setattr(ResponseConnection, "write", record)
    serve(holding_engine(client, engines), tmp_path, spell(TEXT))

    assert len(written) == len(TEXT) - 2


def test_every_event_is_an_http_chunk_of_its_own(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        body = {"messages": [{"role": "user", "content": QUESTION}], "stream": True}
        async with served.session.post(f"{served.url}/v1/chat/completions", json=body) as response:
            chunks = [chunk async for chunk, _ in response.content.iter_chunks() if chunk]

        assert all(chunk.startswith(b"data: ") and chunk.endswith(b"\n\n") for chunk in chunks)
        assert all(chunk.count(b"\n\n") == 1 for chunk in chunks)
        assert chunks.pop() == b"data: [DONE]\n\n"
        deltas = [json.loads(chunk.removeprefix(b"data: "))["choices"][0]["delta"] for chunk in chunks]
        assert [delta["content"] for delta in deltas] == ["", *TEXT]  # the opening chunk has the role

    serve(scenario, tmp_path, spell(TEXT))


def test_the_keep_alive_of_completions_is_no_event_for_lightllms_benchmark() -> None:
    from lightserve.httpserver.openai.completions_routes import COMPLETION

    chunk = COMPLETION.keep_alive.decode().strip()

    assert chunk.startswith(":")
    assert not json.loads(chunk[6:])["choices"][0]["text"]  # what that client tests
