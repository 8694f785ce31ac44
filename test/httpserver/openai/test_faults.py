"""Bad inputs: each has its status and names its field, and the server goes on."""

from __future__ import annotations

import gzip
import json
import re
import reprlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from test.httpserver.fake_engine import LIMITS
from test.httpserver.openai_server import Server, rows, running
from test.real_model import smollm2_tokenizer as smol

CHAT = "/v1/chat/completions"
COMPLETE = "/v1/completions"
USER = {"role": "user", "content": "Hi"}
LIMIT = LIMITS.max_req_total_len


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("run")) as server:
        server.engine.script = rows("ok")
        yield server


def say(content: Any, role: str = "user", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content, **fields}]}


def part_of(kind: str, **fields: str) -> dict[str, Any]:
    return {"type": kind, kind: fields}


def part(kind: str) -> dict[str, Any]:
    return say([part_of(kind, url="data:,")])


BODIES: dict[str, tuple[bytes, int]] = {
    "empty": (b"", 400),
    "a brace": (b"{", 400),
    "cut short": (b'{"prompt": "x', 400),
    "null": (b"null", 400),
    "a list": (b"[]", 400),
    "a string": (b'"x"', 400),
    "a number": (b"1", 400),
    "nested deeply": (b'{"prompt":' + b"[" * 10_000_000, 400),
    "nested deeply and closed": (b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400),
    "NaN": (b'{"prompt": "x", "temperature": NaN}', 400),
    "Infinity": (b'{"prompt": "x", "temperature": Infinity}', 400),
    "too large a number": (b'{"prompt": "x", "temperature": 1e400}', 400),
    "no UTF-8": (b'{"prompt": "\xff"}', 400),
    "half a surrogate pair": (b'{"prompt": "\\ud83d"}', 400),
    "larger than the limit": (b'{"prompt": "' + b"x" * 17_000_000 + b'"}', 413),
}


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("path", [CHAT, COMPLETE])
def test_a_body_that_is_not_a_json_object_is_refused(server: Server, path: str, name: str) -> None:
    content, status = BODIES[name]

    response = server.http.post(path, content=content, headers={"Content-Type": "application/json"})

    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


FORM = {"Content-Type": "application/x-www-form-urlencoded"}  # what curl -d sends


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "Hi"}]}),
        (COMPLETE, {"prompt": "x"}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}),
        ("/api/chat", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/api/show", {}),
        ("/generate", {"inputs": "x"}),
        ("/", {"inputs": "x"}),
        ("/invocations", {"prompt": "x"}),
        ("/tokenize", {"prompt": "x"}),
        ("/abort_request", {"request_id": "x"}),
    ],
)
def test_json_needs_no_content_type_unless_a_web_page_sends_it(server: Server, path: str, body: object) -> None:
    content = json.dumps(body)

    for headers in (FORM, {}, {"Content-Type": "text/plain"}):
        assert server.http.post(path, content=content, headers=headers).status_code == 200
        for page in ({"Origin": "http://page"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}):
            assert server.http.post(path, content=content, headers=headers | page).status_code == 415


@pytest.mark.parametrize("content", [b"", b"a=b", b"--x\r\n", '{"prompt": "é"}'.encode("latin-1"), b"[1]"])
def test_a_body_that_neither_is_json_nor_says_so_is_refused(server: Server, content: bytes) -> None:
    response = server.http.post(COMPLETE, content=content, headers=FORM)

    assert response.status_code == 415
    assert response.json()["error"]["message"].endswith("with the header Content-Type: application/json")


@pytest.mark.parametrize("media_type", ["application/json; charset=utf-16", "text/plain; charset=latin-1"])
def test_a_body_of_another_charset_is_refused(server: Server, media_type: str) -> None:
    response = server.http.post(COMPLETE, content=b'{"prompt": "x"}', headers={"Content-Type": media_type})

    assert response.status_code == 415


@pytest.mark.parametrize("encoding", ["gzip", "zstd", "gzip, br"])
def test_a_compressed_body_is_refused_in_clear_words(server: Server, encoding: str) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": encoding}

    response = server.http.post("/v1/responses", content=gzip.compress(b"{}"), headers=headers)

    assert response.status_code == 415
    assert repr(encoding) in response.json()["error"]["message"]


@pytest.mark.parametrize("rest", ["; charset=utf-8; foo=bar", ';foo=bar; Charset="UTF-8"', "; foo=charset=utf-16", ";"])
def test_a_content_type_may_have_further_parameters(server: Server, rest: str) -> None:
    headers = {"Content-Type": "application/json" + rest}

    assert server.http.post(COMPLETE, content=b'{"prompt": "x"}', headers=headers).status_code == 200


class Bad(NamedTuple):
    path: str
    fields: dict[str, Any]
    param: str | None
    code: str | None = None


def everywhere(param: str, *values: Any, **others: Any) -> list[Bad]:
    """The same bad values of a field that both endpoints have."""
    return [Bad(path, {param: value, **others}, param) for path in (CHAT, COMPLETE) for value in values]


def later(param: str, *values: Any) -> list[Bad]:
    return [bad._replace(code="not_supported") for bad in everywhere(param, *values)]


def chat(param: str, *bodies: dict[str, Any], code: str | None = None) -> list[Bad]:
    return [Bad(CHAT, body, param, code) for body in bodies]


def complete(param: str, *bodies: dict[str, Any], code: str | None = None) -> list[Bad]:
    return [Bad(COMPLETE, body, param, code) for body in bodies]


def strict_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}


def deep_schema(levels: int) -> dict[str, Any]:
    return {"type": "array", "items": deep_schema(levels - 1)} if levels else {}


def prompts(*values: Any) -> list[Bad]:
    return [Bad(COMPLETE, {"prompt": value}, "prompt") for value in values]


def tools(*names: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": name}} for name in names]}


def custom(definition: Any) -> dict[str, Any]:
    return {"tools": [{"type": "custom", "custom": definition}]}


def choose_custom(name: Any) -> dict[str, Any]:
    return {"tool_choice": {"type": "custom", "custom": {"name": name}}}


XML_GRAMMAR = {"type": "grammar", "grammar": {"syntax": "xml", "definition": "<a/>"}}
TOO_LONG = "context_length_exceeded"
BAD: list[Bad] = [
    *everywhere("temperature", -1, 2.01, "hot", True, [1], -1e-9),
    *everywhere("top_p", 0, 1.1, -0.1, "0.5", False),
    *everywhere("top_k", -2, 1.5, 2**31),
    *everywhere("min_p", -1, 2),
    *everywhere("typical_p", 0, 1.01),
    *everywhere("n", 0, -1, 129, 10**9, True, 1.0, "2"),
    *everywhere("max_tokens", -1, True, 1.5, "5"),
    *everywhere("max_completion_tokens", 0, -1, True),
    *everywhere("min_tokens", -1, True, 10**6),
    *everywhere("min_tokens", 6, max_tokens=5),
    *everywhere("presence_penalty", 2.0001, -2.0001, "a"),
    *everywhere("frequency_penalty", 2.0001, -2.0001),
    *everywhere("repetition_penalty", 0, -1, 1e300),
    *everywhere("seed", 2**63, 1.5, True, "7"),
    *everywhere("stop", [str(i) for i in range(17)], ["x"] * 100_000, 5, {"a": 1}, "", "x" * 1_000_000),
    *everywhere("stop.0", ["", "a"], [1]),
    *everywhere("stop_token_ids", [LIMITS.vocab_size], "1", 5),
    *everywhere("stop_token_ids.0", [2**70], [-1], [True]),
    *everywhere("allowed_token_ids", [], [LIMITS.vocab_size], 5),
    *everywhere("first_allowed_token_ids", [], [LIMITS.vocab_size], 5),
    *everywhere("no_repeat_ngram_size", -1, 101, True, 1.5),
    *everywhere("exponential_decay_length_penalty", 5),
    *everywhere("exponential_decay_length_penalty.0", [-1, 1.5], [2.0, 1.5]),
    *everywhere("exponential_decay_length_penalty.1", [1, 0.5], [1, 101], [1]),
    *everywhere("watermark", 1, "yes"),
    *everywhere("bad_words", ["x"] * 10_000, "x", [" "]),
    *everywhere("logit_bias", {str(LIMITS.vocab_size): 1}, {str(i): 1 for i in range(2000)}, [1]),
    *everywhere("logit_bias.5", {"5": 101}, {"5": True}, {"5": "1"}),
    *everywhere("stream", "yes", 1),
    *everywhere("stream_options", {"include_usage": True}, 1),
    *everywhere("stream_options", {}, stream=False),
    *everywhere("ignore_eos", 1, "true"),
    *everywhere("truncate_prompt_tokens", 0, -2, True),
    *everywhere("request_id", "", "a b", "x" * 129, "a\nb", 5),
    *everywhere("model", 5),
    *everywhere("chat_template", "{{ 1 }}", ""),
    *complete("tools", {"tools": []}, {"tools": [{"type": "function", "function": {"name": "f"}}]}),
    *complete("tool_choice", *({"tool_choice": choice} for choice in ("auto", "required", {"type": "function"}))),
    *chat("tools", {"tools": []}, {"tools": "f"}, tools("f", "f"), tools(*(f"f{i}" for i in range(1000))), tools("f")),
    *chat("tools.0.function.name", tools("two words"), tools(""), tools("f" * 129), tools(5)),
    *chat("tools.0.function", {"tools": [{"type": "function"}]}),
    *chat("tools.0.type", {"tools": [{"type": "web_search"}]}),
    *chat(
        "tools.0.custom", {"tools": [{"type": "custom"}]}, {"tools": [{"type": "custom", "function": {"name": "f"}}]}
    ),
    *chat("tools.0.custom.name", custom({}), custom({"name": "a b"}), custom({"name": None})),
    *chat("tools.0.custom.format.type", custom({"name": "f", "format": {}})),
    *chat("tools.0.custom.format.grammar", custom({"name": "f", "format": {"type": "grammar"}})),
    *chat("tools.0.custom.format.grammar.syntax", custom({"name": "f", "format": XML_GRAMMAR})),
    *chat("tool_choice", *(custom({"name": "f"}) | choose_custom(name) for name in ("other", None))),
    *chat("tools.0.function.parameters", {"tools": [{"type": "function", "function": {"name": "f", "parameters": 1}}]}),
    *chat("tool_choice", *(tools("f") | {"tool_choice": choice} for choice in ("any", 5, {"type": "function"}))),
    *chat("tool_choice", tools("f") | {"tool_choice": {"type": "function", "function": {"name": "g"}}}),
    *chat("tool_choice", {"tool_choice": "required"}),
    *chat("parallel_tool_calls", {"parallel_tool_calls": "no"}),
    *chat("include_reasoning", {"include_reasoning": 1}),
    *everywhere("thinking_budget", 5),
    *everywhere("thinking_token_budget", 5),
    *everywhere("max_reasoning_tokens", 5),
    *later("functions", [{"name": "f"}]),
    *everywhere("response_format.type", {"type": "xml"}, {"type": None}, {}),
    *everywhere("response_format", {"type": "json_schema"}, {"type": "json_schema", "json_schema": {}}, "json_object"),
    *everywhere("response_format", strict_schema({"type": "nothing"}), strict_schema({"uniqueItems": True})),
    *everywhere("response_format", strict_schema({"$ref": "#/nowhere"}), strict_schema(deep_schema(100))),
    *everywhere("response_format", {"type": "structural_tag"}),
    *everywhere("structured_outputs.regex", {"regex": "(a"}, {"regex": "a" * 100_000}, {"regex": 5}),
    *everywhere("structured_outputs.json", {"json": "{"}, {"json": "[]"}, {"json": {"type": "nothing"}}),
    *everywhere("structured_outputs.choice", {"choice": []}, {"choice": ["a"] * 5000}),
    *everywhere("structured_outputs.regex", {"json": {}, "regex": "a"}),
    *everywhere("structured_outputs.structural_tag", {"structural_tag": {"triggers": ["<"]}}),
    *everywhere("guided_json", {"type": 5}, "no JSON"),
    *everywhere("guided_regex", "(?=a)b", r"a\b"),
    *everywhere("regular_constraint", "a)"),
    *everywhere("guided_grammar", "root ::= (", "start: x", "(" * 10_000, "x" * 300_000),
    *everywhere("prompt_logprobs", -1, 21, True, "5"),
    *later("suffix", "end"),
    *later("stop_regex", "a+"),
    *later("custom_logit_processor", "x"),
    *later("return_hidden_states", True, "last"),
    *later("return_prompt_text", True),
    *later("web_search_options", {}),
    *later("role_settings", {"user": "a"}),
    *later("mirostat", 2),
    *later("repeat_penalty", 1.1),
    *later("modalities", ["text", "audio"]),
    *later("lora_request", {"name": "a"}),
    *later("adapter_id", "a"),
    *chat("messages", {"messages": []}, {"messages": None}, {"messages": "Hi"}, {"messages": [USER] * 10_000}),
    *chat("messages.0.role", {"messages": [{"content": "Hi"}]}, say("Hi", ""), say("Hi", "a b"), say("Hi", "a" * 65)),
    *chat("messages.0.role", say("Hi", "<|im_start|>"), {"messages": [{"role": 5, "content": "Hi"}]}),
    *chat("documents", {"documents": [{"text": "a"}]}, {"documents": "a"}, {"documents": [{}] * 2000}),
    *complete("documents", {"documents": [{"text": "a"}]}),
    *chat("enable_thinking", {"enable_thinking": 1}),
    *chat("thinking", {"thinking": "on"}),
    *chat("thinking.type", {"thinking": {}}, {"thinking": {"type": "on"}}),
    *chat("reasoning", {"reasoning": "high"}),
    *chat("reasoning.effort", {"reasoning": {"effort": 5}}),
    *chat("messages.0.content", say(5), say([]), say(["Hi"]), say([{"type": "text"}]), say([{"type": "poem"}])),
    *chat("messages.0", say(None), say(None, "assistant"), say(None, "assistant", tool_calls=[]), say("x", "tool")),
    *chat(
        "messages.0", part("input_audio"), say([{"type": "input_audio", "input_audio": {"data": "", "format": "aac"}}])
    ),
    *chat("messages", *map(part, ["image_url", "audio_url", "video_url", "file"]), code="not_supported"),
    *chat("messages.0.tool_calls.0.function", say("", "assistant", tool_calls=[{"id": "1"}])),
    *chat("messages.0.tool_calls.0.custom", say("", "assistant", tool_calls=[{"id": "1", "type": "custom"}])),
    *chat("logprobs", {"logprobs": 5}, {"logprobs": "true"}),
    *chat("top_logprobs", *({"logprobs": True, "top_logprobs": k} for k in (21, -1, 10**6, True))),
    *chat("top_logprobs", {"top_logprobs": 2}, {"logprobs": False, "top_logprobs": 2}),
    *chat("continue_final_message", {"continue_final_message": True, "add_generation_prompt": True}),
    *chat("chat_template_kwargs", {"chat_template_kwargs": "x"}),
    *chat("max_tokens", {"max_tokens": 0}),
    *chat("echo", {"echo": "yes"}),
    *chat("tool_choice", tools("f") | {"tool_choice": "g"}, {"tool_choice": {"function": {}}}, {"tool_choice": 5}),
    *everywhere("truncation_side", "both", 1),
    *everywhere("return_token_ids", "yes", 1),
    *prompts("", [], [[]], [""], ["a", ""], None, 5, True, {"a": 1}),
    *prompts(
        [1, "a"],
        [1.5],
        [True],
        [1, True],
        [[True]],
        [[1], [1.5]],
        [-1],
        [2**70],
        [LIMITS.vocab_size],
        ["x"] * 5000,
        ["x"] * 129,
    ),
    *complete("n", {"prompt": ["x"] * 65, "n": 2}),
    *complete("best_of", {"best_of": 0}, {"best_of": 129}, {"best_of": 1, "n": 2}, {"best_of": 2, "stream": True}),
    *complete("n", {"prompt": ["x"] * 65, "best_of": 2}),
    *complete("logprobs", {"logprobs": 10**6}, {"logprobs": -2}, {"logprobs": 21}, {"logprobs": True}),
    *complete("max_tokens", {"max_tokens": 0}, {"max_tokens": 0, "logprobs": 1}),
    *complete("min_tokens", {"max_tokens": 0, "min_tokens": 1, "echo": True}),
    *complete("echo", {"echo": "yes"}),
    *complete("max_tokens", {"max_tokens": 10**12}, code=TOO_LONG),
    *chat("max_completion_tokens", {"max_completion_tokens": LIMIT}, code=TOO_LONG),
    *complete("max_tokens", {"prompt": [1] * (LIMIT - 4), "max_tokens": 5}, code=TOO_LONG),
    *complete("None", {"prompt": [1] * LIMIT}, {"prompt": [1] * LIMIT * 10}, {"prompt": "x " * LIMIT}, code=TOO_LONG),
    *complete("None", {"prompt": "x" * 10_000_000}, code=TOO_LONG),
    *chat("None", say("x " * LIMIT), say("x" * 10_000_000), code=TOO_LONG),
]


def label(bad: Bad) -> str:
    return f"{bad.path.split('/')[2]}-{reprlib.repr(bad.fields)[:60]}"  # the text of some would take seconds


@pytest.mark.parametrize("bad", BAD, ids=label)
def test_a_bad_field_is_refused_by_name_before_a_request_reaches_the_engine(server: Server, bad: Bad) -> None:
    needed = {"messages": [USER]} if bad.path == CHAT else {"prompt": "x"}
    first, _, rest = (bad.param or "").partition(".")
    fields = {first if name == bad.param and rest else name: value for name, value in bad.fields.items()}
    server.engine.received.clear()

    response = server.post(bad.path, needed | fields)

    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert str(error["param"]) == bad.param, error
    assert (error["type"], error["code"]) == ("invalid_request_error", bad.code)
    assert len(error["message"]) < 500
    assert server.engine.received == []


FINE: list[tuple[str, dict[str, Any]]] = [
    *((path, {"repeat_penalty": 1.0, "stop_regex": [], "return_meta_info": False}) for path in (CHAT, COMPLETE)),
    *((path, {"session_id": "a", "stream_interval": 4, "media_io_kwargs": {}}) for path in (CHAT, COMPLETE)),
    *((path, {"temperature": value}) for path in (CHAT, COMPLETE) for value in (0, -0.0, 1e-9, 2)),
    *((path, {"tool_choice": "none", "function_call": "none"}) for path in (CHAT, COMPLETE)),
    *((path, {"response_format": {"type": "text"}, "modalities": ["text"]}) for path in (CHAT, COMPLETE)),
    *((path, {"priority": 0, "suffix": "", "num_beams": 1, "use_beam_search": False}) for path in (CHAT, COMPLETE)),
    *((path, {"stop": stop}) for path in (CHAT, COMPLETE) for stop in ([], "x", ["a"] * 16, "\u0000", "x" * 1024)),
    *((path, {"top_k": k}) for path in (CHAT, COMPLETE) for k in (-1, 0, 1)),
    *((path, {"stream": True, "stream_options": {"include_usage": None}}) for path in (CHAT, COMPLETE)),
    *((path, {"n": 3, "temperature": 0}) for path in (CHAT, COMPLETE)),
    (CHAT, {"logprobs": False, "top_logprobs": 0}),
    (CHAT, say("")),
    (CHAT, say("", "assistant", tool_calls=[{"function": {"name": "f", "arguments": "{"}}])),
    (CHAT, tools("f") | {"tool_choice": "none", "parallel_tool_calls": True}),
    (CHAT, {"tool_choice": "auto", "include_reasoning": False, "reasoning_effort": "none"}),
    (CHAT, say("x", "tool", tool_call_id="1")),
    (CHAT, say("<|im_end|><|image_pad|>\u0000")),
    (COMPLETE, {"prompt": "<|im_start|>"}),
    (COMPLETE, {"prompt": "<|im_end|>"}),
    (COMPLETE, {"prompt": "a\u0000b"}),
    (COMPLETE, {"prompt": [1] * (LIMIT - 5), "max_tokens": 5}),
    (COMPLETE, {"best_of": 1, "stream": True}),
    (COMPLETE, {"prompt": ["x"] * 128}),
]


@pytest.mark.parametrize(("path", "fields"), FINE, ids=lambda value: str(value)[:60])
def test_unusual_but_valid_requests_are_served(server: Server, path: str, fields: dict[str, Any]) -> None:
    needed = {"messages": [USER]} if path == CHAT else {"prompt": "x"}

    response = server.post(path, needed | fields)

    assert response.status_code == 200, response.text


def test_a_prompt_one_short_of_the_context_gets_one_token(server: Server) -> None:
    server.engine.received.clear()

    response = server.complete(prompt=[1] * (LIMIT - 1))

    assert response.status_code == 200
    assert server.engine.received[0].params.stopping.max_new_tokens == 1


def test_an_error_for_a_long_prompt_has_both_counts(server: Server) -> None:
    message = server.complete(prompt=[1] * (LIMIT + 1)).json()["error"]["message"]

    assert f"{LIMIT + 1} tokens" in message
    assert f"the limit is {LIMIT - 1}" in message


def test_a_prompt_that_is_not_encoded_has_at_least_so_many_tokens(server: Server) -> None:
    message = server.complete(prompt="x" * 10_000_000).json()["error"]["message"]

    assert re.search(r"the prompt has at least \d{4,} tokens; the limit is", message)


def test_a_part_that_is_not_text_is_named(server: Server) -> None:
    error = server.chat(**part("image_url")).json()["error"]

    assert error["message"] == "an image is not supported yet: this model reads and answers text only"
    assert error["param"].startswith("messages")


def test_n_choices_at_temperature_0_are_n_equal_texts(server: Server) -> None:
    response = server.complete(n=3, temperature=-0.0).json()

    assert [choice["text"] for choice in response["choices"]] == ["ok"] * 3
    assert all(req.params.sampling.is_greedy for req in server.engine.received[-3:])


def test_a_model_without_a_tokenizer_completes_token_ids(tmp_path_factory: pytest.TempPathFactory) -> None:
    with running(tmp_path_factory.mktemp("run")) as server:
        object.__setattr__(server.context, "optional_tokenizer", None)

        text, ids = server.complete(), server.complete(prompt=[1, 2])

    assert (text.status_code, ids.status_code) == (400, 200)
    assert "no tokenizer" in text.json()["error"]["message"]


def test_seed_minus_one_is_a_random_one(server: Server) -> None:
    server.complete(seed=-1)

    assert server.engine.received[-1].params.sampling.seed is None


def test_special_tokens_are_added_to_a_prompt_by_default(server: Server) -> None:
    server.complete(prompt="Hi", add_special_tokens=False)

    assert server.engine.received[-1].prompt_ids == smol().encode("Hi", add_special_tokens=False)
