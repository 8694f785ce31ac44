"""A real server that takes its templates, end tokens and sampling defaults from the files of its model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from benchmark.models import TINY, save_model
from test.api.server import ServerProcess, running_server

USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
TEMPLATES = [
    {"name": "default", "template": "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[{{ mood }}]"},
    {"name": "tool_use", "template": "tools {{ tools[0].function.name }} <tool_call>{{ mood }}"},
    {"name": "rag", "template": "rag {{ documents[0].text }}"},
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("model")
    save_model(folder, None, TINY)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATES}))
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": False, "max_new_tokens": 7}))
    flags = ["--model_dir", str(folder), "--load_format", "dummy", "--default_chat_template_kwargs", '{"mood": "calm"}']
    with running_server(folder / "log", *flags, "--max_total_token_num", "4096") as running:
        yield running


def prompt_of(server: ServerProcess, *messages: dict[str, Any], **fields: Any) -> str:
    """The prompt of a chat, as /tokenize sees it."""
    status, found = server.post("/tokenize", {"messages": list(messages), **fields})
    assert status == 200, found
    _, text = server.post("/detokenize", {"tokens": found["tokens"]})
    prompt: str = text["prompt"]
    return prompt


def test_the_server_prints_the_sampling_defaults_of_the_model(server: ServerProcess) -> None:
    assert "temperature 0, max_new_tokens 7 (of the model; --generation_config none ignores them)" in server.log


def test_requests_without_parameters_use_the_defaults_of_the_model(server: ServerProcess) -> None:
    bodies: list[dict[str, Any]] = [{}, {}, {"temperature": 1.5, "seed": 1}, {"max_tokens": 12, "ignore_eos": True}]
    responses = [server.post("/v1/chat/completions", {"messages": [USER], **body})[1] for body in bodies]

    texts = [response["choices"][0]["message"]["content"] for response in responses]
    assert texts[0] == texts[1] != texts[2]
    assert responses[0]["usage"]["completion_tokens"] <= 7
    assert responses[3]["usage"]["completion_tokens"] == 12


def test_tools_and_documents_choose_the_template(server: ServerProcess) -> None:
    assert prompt_of(server, USER) == "[user]Hi[calm]"
    assert prompt_of(server, USER, chat_template_kwargs={"mood": "glad"}) == "[user]Hi[glad]"
    assert prompt_of(server, USER, tools=[TOOL]) == "tools now <tool_call>calm"
    assert prompt_of(server, USER, documents=[{"text": "A city."}]) == "rag A city."


def test_a_message_may_have_a_role_of_its_own(server: ServerProcess) -> None:
    assert prompt_of(server, USER, {"role": "critic", "content": "No."}) == "[user]Hi[critic]No.[calm]"
