"""A session of an agent on Ollama's API against the real server: with a scripted engine, and with a real model."""

from __future__ import annotations

import json
import os
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from test.api.agents.chat_ollama_requests import PATH, ChatOllama, Json
from test.api.scripted import MODEL_NAME, ScriptedEngine, scripted_server
from test.api.server import RESPONSE_S, ServerProcess, running_server
from test.waiting import wait_until

pytestmark = pytest.mark.slow

TOOL_MODEL = os.environ.get("LIGHTSERVE_TEST_TOOL_MODEL")
THOUGHT = "<think>\nA tool knows that.\n</think>\n\n"


def call(name: str, **arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


# (what the user asks; output of the model, as its chat template writes it; results of its calls), turn by turn
SESSION: list[tuple[str | None, str, list[str]]] = [
    ("Will it rain in Paris?", THOUGHT + call("weather", city="Paris", days=2), ["sunny"]),
    (None, "It is sunny in Paris.", []),
    ("And where can I stay?", call("search", query="hotel") + call("weather", city="Paris"), ["Le Petit", "sunny"]),
    (None, "Le Petit has rooms." + call("book", hotel="Le Petit", nights=1), ["booked"]),
    (None, THOUGHT + "Your room is booked.", []),
    ("Thanks!", "You are welcome.", []),
]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedEngine]:
    with scripted_server(tmp_path_factory.mktemp("engine"), "--strict_fields") as engine:
        yield engine


def lines_of(url: str, body: Json, request_id: str) -> list[Json]:
    headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
    request = urllib.request.Request(url + PATH, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=RESPONSE_S) as response:
        return [json.loads(line) for line in response.read().splitlines()]


def cached_tokens(server: ServerProcess, request_id: str) -> int:
    """From the access log: Ollama's responses do not tell."""
    found: list[str] = []

    def is_logged() -> bool:
        found[:] = re.findall(rf"{request_id} {PATH} status=200 prompt=\d+ cached=(\d+)", server.log)
        return bool(found)

    wait_until(is_logged)
    return int(found[0])


def test_each_turn_of_a_session_computes_only_its_new_tokens(engine: ScriptedEngine) -> None:
    engine.will_write(*[output for _, output, _ in SESSION])
    agent = ChatOllama(MODEL_NAME)
    known = 0  # tokens of the turn before, its output included

    for turn, (asked, output, results) in enumerate(SESSION):
        if asked is not None:
            agent.add_user(asked)
        lines = lines_of(engine.url, agent.request(), f"turn-{turn}")
        calls = agent.add_reply(lines)

        end = lines[-1]
        if turn:
            assert cached_tokens(engine.server, f"turn-{turn}") == known - 1, turn  # the last token is never computed
        known = end["prompt_eval_count"] + end["eval_count"]
        assert (end["done"], end["done_reason"]) == (True, "stop")
        assert len(calls) == len(results) == output.count("<tool_call>")
        assert ("thinking" in agent.messages[-1]) == (THOUGHT in output)
        for result in results:
            agent.add_result(result)

    assert agent.messages[-1] == {"role": "assistant", "content": "You are welcome."}


@pytest.mark.long
@pytest.mark.skipif(TOOL_MODEL is None, reason="LIGHTSERVE_TEST_TOOL_MODEL is not set")
def test_a_real_model_works_through_a_session(tmp_path: Path) -> None:
    """Qwen2.5-Coder does not think, so the requests do not ask for it. It may answer instead of calling a tool."""
    flags = ("--model_dir", str(TOOL_MODEL), "--model_name", "coder", "--max_total_token_num", "8192")
    agent = ChatOllama("coder", "Use tools whenever one fits.")
    known = 0  # tokens of the prompt of the turn before

    with running_server(tmp_path / "log", *flags) as server:
        for turn in range(6):
            agent.add_user(f"Call the tool weather for city number {turn}, or say what you know.")
            options = {"temperature": 0.0, "num_predict": 64, "num_ctx": 8192}
            body = {**agent.request(), "options": options, "think": None}
            lines = lines_of(server.url, body, f"turn-{turn}")
            calls = agent.add_reply(lines)

            assert cached_tokens(server, f"turn-{turn}") >= known - 1
            assert lines[-1]["done_reason"] in ("stop", "length")
            known = lines[-1]["prompt_eval_count"]
            for one in calls:
                assert isinstance(one["function"]["arguments"], dict)
                agent.add_result("sunny")

    assert len(agent.messages) > 12
