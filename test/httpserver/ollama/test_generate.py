"""/api/generate: prompts with and without a template, conversations as token ids, text between two texts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import tokenizers

from lightserve.httpserver.ollama.fill_in_the_middle import KNOWN
from lightserve.messages.params import FinishReason
from lightserve.model_files.tokenizer.special_tokens import SpecialTokens
from lightserve.model_files.tokenizer.tokenizer import Tokenizer
from test.httpserver.chat.tool_chats import THOUGHT, prompt
from test.httpserver.fake_engine import LIMITS
from test.httpserver.ollama.ollama_client import END_FIELDS, SHOW, error_of, generate, lines, whole
from test.httpserver.openai_server import Server, rows, running, with_template
from test.real_model import smollm2_tokenizer as smol


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("run"), with_template(SHOW)) as server:
        yield server


def text_of(server: Server) -> str:
    return server.context.tokenizer.decode(server.engine.received[-1].prompt_ids, skip_special_tokens=False)


def test_a_prompt_is_a_turn_of_the_user(server: Server) -> None:
    server.engine.script = rows("Hel", "lo")

    body = whole(generate(server, system="Be brief.", stream=False))

    assert prompt(server)["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ]
    assert list(body) == ["model", "created_at", "response", "done", "done_reason", "context", *END_FIELDS]
    assert (body["response"], body["done"], body["done_reason"]) == ("Hello", True, "stop")


def test_a_stream_has_pieces_of_the_response_and_the_context_last(server: Server) -> None:
    server.engine.script = rows("Hel", "lo", finish=FinishReason.LENGTH)

    *pieces, last = lines(generate(server))

    assert [piece["response"] for piece in pieces] == ["Hel", "lo"]
    assert [list(piece) for piece in pieces] == [["model", "created_at", "response", "done"]] * 2
    assert (last["response"], last["done"], last["done_reason"]) == ("", True, "length")
    assert last["context"][: last["prompt_eval_count"]] == server.engine.received[-1].prompt_ids


def test_thinking_is_a_field_of_its_own(server: Server) -> None:
    server.engine.script = rows(THOUGHT, "Yes.")

    body, stream = whole(generate(server, think=True, stream=False)), lines(generate(server, think=True))

    assert (body["thinking"], body["response"]) == ("Hm.", "Yes.")
    assert "".join(one.get("thinking", "") for one in stream) == "Hm."
    assert "".join(one["response"] for one in stream) == "Yes."


def test_a_context_is_the_conversation_so_far(server: Server) -> None:
    server.engine.script = rows("Hello")
    context = whole(generate(server, stream=False))["context"]

    body = whole(generate(server, prompt="More", context=context, stream=False))

    ids = server.engine.received[-1].prompt_ids
    assert ids[: len(context)] == context
    assert '"More"' in smol().decode(ids[len(context) :])
    assert body["prompt_eval_count"] == len(ids)


def test_a_raw_prompt_is_taken_as_it_is(server: Server) -> None:
    server.engine.script = rows(THOUGHT, "Yes.")

    body = whole(generate(server, prompt="<|im_start|>user\nHi", raw=True, stream=False))

    assert text_of(server) == "<|im_start|>user\nHi"
    assert body["response"] == THOUGHT + "Yes."
    assert "context" not in body


def test_a_model_without_a_template_continues_the_prompt(tmp_path_factory: pytest.TempPathFactory) -> None:
    with running(tmp_path_factory.mktemp("run"), with_template(None)) as base:
        assert whole(generate(base, stream=False))["response"] == "Hello"
        assert text_of(base) == "Hi"
        assert error_of(generate(base, system="Be brief."))[0] == 400


@pytest.mark.parametrize("fields", [{"prompt": ""}, {"prompt": None}, {"prompt": None, "keep_alive": 0}], ids=str)
def test_no_prompt_only_asks_whether_the_model_is_loaded(server: Server, fields: dict[str, Any]) -> None:
    received = len(server.engine.received)

    body = whole(generate(server, **fields))

    assert list(body) == ["model", "created_at", "response", "done", "done_reason"]
    assert (body["response"], body["done"], body["done_reason"]) == ("", True, "load")
    assert len(server.engine.received) == received


def filling_tokenizer(*tokens: str) -> Tokenizer:
    backend = tokenizers.Tokenizer.from_str(smol().to_json())
    backend.add_special_tokens(list(tokens))
    return Tokenizer(backend, SpecialTokens(), SHOW)


@pytest.mark.parametrize("tokens", KNOWN, ids=["qwen", "starcoder", "deepseek"])
def test_a_suffix_is_filled_with_the_tokens_of_the_model(
    tmp_path_factory: pytest.TempPathFactory, tokens: tuple[str, str, str]
) -> None:
    with running(tmp_path_factory.mktemp("run"), filling_tokenizer(*tokens)) as coder:
        coder.context.manager.engine_info(msgspec.structs.replace(LIMITS, vocab_size=LIMITS.vocab_size + len(tokens)))
        body = whole(generate(coder, prompt="def f():", suffix="return x", stream=False))
        shown = whole(coder.post("/api/show", {"model": "tiny"}))["capabilities"]
        text = text_of(coder)

    before, between, after = tokens
    assert text == f"{before}def f():{between}return x{after}"
    assert body["response"] == "Hello"
    assert "insert" in shown


def test_without_such_tokens_a_suffix_is_refused(server: Server) -> None:
    status, message = error_of(generate(server, suffix="return x"))

    assert status == 400
    assert "does not support insert" in message


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"template": "{{ .Prompt }}"}, "template: a request cannot set it"),
        ({"images": ["aGk="]}, "an image"),
        ({"system": "x", "raw": True}, "system: does not combine"),
        ({"system": "x", "suffix": "y"}, "system: does not combine"),
        ({"context": [10**6]}, "context"),
        ({"context": ["a"]}, "context"),
        ({"prompt": 3}, "prompt"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_refused(server: Server, fields: dict[str, Any], named: str) -> None:
    status, message = error_of(generate(server, **fields))

    assert status == 400
    assert named in message
