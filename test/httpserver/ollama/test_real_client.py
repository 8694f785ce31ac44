"""The ``ollama`` package's client, unchanged: chats with tools, embeddings, and what a server of one model refuses."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightserve.httpserver.app import build_app
from lightserve.model_files.tokenizer.special_tokens import SpecialTokens
from lightserve.model_files.tokenizer.tokenizer import Tokenizer
from test.httpserver.chat.tool_chats import ALL
from test.httpserver.fake_engine import engine
from test.httpserver.ollama.ollama_client import SHOW, TOOLS, USER
from test.httpserver.openai_server import Server, rows, running, with_template
from test.httpserver.pooling.test_routes import EMBED, TEMPLATE, result_of
from test.pooling.files import word_tokenizer
from test.waiting import DEADLINE_S

ollama: Any = pytest.importorskip("ollama", reason="ollama is missing: pip install -r requirements-test.txt")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("run"), with_template(SHOW)) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Any:
    return ollama.Client(host=str(server.http.base_url), timeout=DEADLINE_S)


def test_a_chat_with_tools_streams_its_calls(server: Server, client: Any) -> None:
    server.engine.script = rows(ALL)

    *_, last = parts = list(client.chat("tiny", messages=[USER], tools=TOOLS[:1], think=True, stream=True))

    calls = [call.function for part in parts for call in part.message.tool_calls or ()]
    assert [call.name for call in calls] == ["weather", "now"]
    assert calls[0].arguments["city"] == "Paris"
    assert "".join(part.message.thinking or "" for part in parts).strip() == "Hm."
    assert (last.done, last.eval_count) == (True, 1)


def test_a_function_of_python_is_a_tool(server: Server, client: Any) -> None:
    def weather(city: str, days: int) -> str:
        """Rain?

        Args:
            city: where
            days: how many
        """
        raise NotImplementedError

    server.engine.script = rows(ALL)

    message = client.chat("tiny", messages=[USER], tools=[weather]).message
    answered = [USER, message, {"role": "tool", "tool_name": "weather", "content": "sun"}]
    server.engine.script = rows("Sunny.")

    assert message.tool_calls[0].function.name == "weather"
    assert client.chat("tiny", messages=answered).message.content == "Sunny."


def test_the_served_model_is_pulled_by_any_of_its_names(client: Any) -> None:
    assert client.pull("tiny").status == "success"
    assert [part.status for part in client.pull("hf.co/tiny", stream=True)][-1] == "success"
    assert client.show("tiny").capabilities
    assert client.list().models[0].model == "tiny"


@pytest.mark.parametrize(
    ("call", "status", "problem"),
    [
        (lambda client: client.pull("hf.co/org/repo:Q4_K_M"), 404, "this server has 'tiny'"),
        (lambda client: client.create("mine", from_="tiny", system="Be brief."), 400, "one model"),
        (lambda client: client.copy("tiny", "mine"), 400, "one model"),
        (lambda client: client.delete("tiny"), 400, "one model"),
        (lambda client: client.embed("tiny", "w5"), 400, "--task embed"),
    ],
)
def test_what_a_server_of_one_model_cannot_do_is_one_error(client: Any, call: Any, status: int, problem: str) -> None:
    with pytest.raises(ollama.ResponseError, match=problem) as refused:
        call(client)

    assert refused.value.status_code == status


def test_embeddings_of_both_endpoints(tmp_path: Path) -> None:
    import httpx

    async def embed() -> tuple[Any, Any]:
        tokenizer = Tokenizer(word_tokenizer(), SpecialTokens(), TEMPLATE)
        async with engine(tmp_path, result_of(EMBED.size), tokenizer) as (context, _):
            transport = httpx.ASGITransport(build_app(replace(context, pooling=EMBED)))
            client = ollama.AsyncClient(host="http://localhost", transport=transport)
            several = await client.embed("tiny", input=["w5 w6", "w7"], dimensions=2, truncate=True)
            return several, await client.embeddings("tiny", "w5 w6")

    several, one = asyncio.run(embed())

    assert [len(vector) for vector in several.embeddings] == [2, 2]
    assert several.prompt_eval_count > 0
    assert len(one.embedding) == EMBED.size
