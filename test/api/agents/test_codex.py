"""A session of Codex against the real server: with a scripted engine, and with a real model that calls tools."""

from __future__ import annotations

import itertools
import json
import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from test.api.agents.codex_requests import HEADERS, INSTRUCTIONS, PATH, TOOLS, Codex
from test.api.agents.replay import Json, stream
from test.api.scripted import MODEL_NAME, ScriptedEngine, scripted_server
from test.api.server import RESPONSE_S, running_server

pytestmark = pytest.mark.slow

TOOL_MODEL = os.environ.get("LIGHTSERVE_TEST_TOOL_MODEL")
THOUGHT = "<think>\nThe tests tell more.\n</think>\n\n"
PATCH = '*** Begin Patch\n*** Update File: a.py\n@@\n-x = "1"\n+x = "2\\n"\n*** End Patch\n'
CALLS = ("function_call", "custom_tool_call")


def call(name: str, **arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


# output of the model, as its chat template writes it; results of its calls; turn by turn
READ_BOTH = call("exec_command", cmd="cat a.py") + call("exec_command", cmd="cat b.py", yield_time_ms=1000)
SESSION: list[tuple[str, list[Any]]] = [
    (f"{THOUGHT}I run the tests." + call("exec_command", cmd="pytest -q"), ["Output:\n1 failed: x is 1\n"]),
    ("Both files matter." + READ_BOTH, ["Output:\nx = 1\n", "Output:\nNo such file\n"]),
    (call("apply_patch", input=PATCH), ["Exit code: 0\nOutput:\nSuccess. Updated the following files:\nM a.py\n"]),
    ("An agent checks it." + call("multi_agent_v1__spawn_agent", message="Check."), ['{"agent_id": "7"}']),
    (call("view_image", path="a.png"), [[{"type": "input_image", "image_url": "data:image/png;base64,AAAA"}]]),
    (f"{THOUGHT}The test passes now.", []),
]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedEngine]:
    with scripted_server(tmp_path_factory.mktemp("engine"), "--httpserver_workers", "2", "--strict_fields") as engine:
        yield engine


def ask(url: str, agent: Codex, **fields: Any) -> Json:
    return agent.add_reply(stream(url + PATH, agent.request(**fields), **HEADERS))


def calls_of(response: Json) -> list[Json]:
    return [item for item in response["output"] if item["type"] in CALLS]


def replay(engine: ScriptedEngine, agent: Codex) -> list[Json]:
    """Send every turn of the session and return the responses."""
    responses = []
    for output, results in SESSION:
        engine.will_write(output)
        responses.append(ask(engine.url, agent))
        calls = calls_of(responses[-1])
        assert len(calls) == len(results)
        for one, result in zip(calls, results, strict=True):
            agent.add_output(one, result)
    return responses


def test_the_fixture_has_the_size_of_a_real_request() -> None:
    agent = Codex("x")
    agent.begin("Fix the test.")

    assert 10_000 < len(INSTRUCTIONS) < 16_000
    assert len(TOOLS) >= 10
    assert 25_000 < len(json.dumps(agent.request())) < 45_000


def test_a_session_calls_its_tools_and_hits_the_prefix_cache_at_every_turn(engine: ScriptedEngine) -> None:
    agent = Codex(MODEL_NAME)
    agent.begin("Fix the test.")

    responses = replay(engine, agent)

    calls = [one for response in responses for one in calls_of(response)]
    assert [(one.get("namespace"), one["name"]) for one in calls] == [
        (None, "exec_command"),
        (None, "exec_command"),
        (None, "exec_command"),
        (None, "apply_patch"),
        ("multi_agent_v1", "spawn_agent"),
        (None, "view_image"),
    ]
    assert [one["input"] for one in calls if one["type"] == "custom_tool_call"] == [PATCH]
    assert json.loads(calls[2]["arguments"]) == {"cmd": "cat b.py", "yield_time_ms": 1000}
    assert responses[-1]["output"][-1]["content"][0]["text"] == "The test passes now."
    assert {one["type"] for one in responses[0]["ignored"]} == {"tool_search", "web_search"}
    assert [tool["type"] for tool in responses[0]["tools"]] == [tool["type"] for tool in TOOLS[:-2]]
    usages = [response["usage"] for response in responses]
    for before, after in itertools.pairwise(usages):
        # every token of the turn before but its last, whose KV is never computed
        assert after["input_tokens_details"]["cached_tokens"] >= before["total_tokens"] - 2
        assert after["input_tokens"] > before["total_tokens"]


def test_a_second_session_shares_instructions_and_tools(engine: ScriptedEngine) -> None:
    first, second = Codex(MODEL_NAME), Codex(MODEL_NAME)
    first.begin("Say A.")
    second.begin("Say B.")
    engine.will_write("A", "B")

    ask(engine.url, first)
    usage = ask(engine.url, second)["usage"]

    assert usage["input_tokens_details"]["cached_tokens"] > usage["input_tokens"] - 20


def test_a_session_with_history_of_hosted_tools_goes_on(engine: ScriptedEngine) -> None:
    """The user began with another provider."""
    agent = Codex(MODEL_NAME)
    agent.begin("Look it up.")
    agent.items += [
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [{"type": "summary_text", "text": "Hm"}],
            "encrypted_content": "g",
        },
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}},
        {
            "type": "local_shell_call",
            "call_id": "1",
            "status": "completed",
            "action": {"type": "exec", "command": ["ls"]},
        },
        {"type": "function_call_output", "call_id": "1", "output": "a.py"},
        {
            "type": "message",
            "role": "assistant",
            "phase": "final_answer",
            "content": [{"type": "output_text", "text": "x"}],
        },
    ]
    agent.add_user("And now?")
    engine.will_write("Now I know.")

    response = ask(engine.url, agent)

    assert response["output"][0]["content"][0]["text"] == "Now I know."
    assert "web_search_call" in [one["type"] for one in response["ignored"]]


def test_a_cut_response_completes(engine: ScriptedEngine) -> None:
    agent = Codex(MODEL_NAME)
    agent.begin("Count.")
    engine.will_write("one two three four five")

    response = ask(engine.url, agent, max_output_tokens=2)

    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})


def test_a_stored_response_is_found_by_every_process(engine: ScriptedEngine) -> None:
    """Each connection may reach another of the two HTTP processes."""
    engine.will_write("Paris.")
    _, first = engine.server.post(PATH, {"model": MODEL_NAME, "input": "Capital of France?"})

    for _ in range(8):
        engine.will_write("Yes.")
        status, follow = engine.server.post(
            PATH, {"model": MODEL_NAME, "input": "Sure?", "previous_response_id": first["id"]}
        )
        assert status == 200, follow
        assert follow["usage"]["input_tokens"] > first["usage"]["total_tokens"]


def test_a_stream_is_cancelled_through_any_process(engine: ScriptedEngine) -> None:
    for _ in range(4):
        engine.will_write("word " * 20_000)
        body = json.dumps({"model": MODEL_NAME, "input": "Hi", "stream": True}).encode()
        request = urllib.request.Request(engine.url + PATH, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=RESPONSE_S) as response:
            assert response.readline() == b"event: response.created\n"
            created = json.loads(response.readline().removeprefix(b"data: "))
            status, cancelled = engine.server.post(f"{PATH}/{created['response']['id']}/cancel", {})
            *_, last, _ = response.read().splitlines()

        assert (status, cancelled["status"]) == (200, "cancelled"), cancelled
        assert json.loads(last.removeprefix(b"data: "))["response"] == cancelled


@pytest.mark.long
@pytest.mark.skipif(TOOL_MODEL is None, reason="LIGHTSERVE_TEST_TOOL_MODEL is not set")
def test_a_session_with_a_real_model_hits_the_prefix_cache_at_every_turn(tmp_path: Path) -> None:
    """Qwen2.5-Coder-1.5B-Instruct, say: whatever it writes, the next turn finds the tokens before in the cache."""
    assert TOOL_MODEL is not None
    name = Path(TOOL_MODEL).stem
    agent = Codex(name)
    agent.begin("Run the tests with exec_command.")

    with running_server(tmp_path / "log", "--model_dir", TOOL_MODEL, "--model_name", name) as server:
        usages = []
        for turn in range(5):
            response = ask(server.url, agent, max_output_tokens=48, temperature=0)
            usages.append(response["usage"])
            for one in calls_of(response):
                agent.add_output(one, "Output:\n1 failed: x is 1\n")
            if not calls_of(response):
                agent.add_user(f"Go on with step {turn + 2}.")

    for before, after in itertools.pairwise(usages):
        assert after["input_tokens_details"]["cached_tokens"] >= before["input_tokens"] - 8
