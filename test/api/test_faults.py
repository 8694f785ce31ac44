"""Invalid input of every kind against a real server: the right status and error format, and nothing is left behind."""

from __future__ import annotations

import http.client
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
from prometheus_client.parser import text_string_to_metric_families

from test.api.server import RESPONSE_S, ServerProcess
from test.waiting import wait_until

pytestmark = pytest.mark.slow

CHAT, COMPLETE, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
TOKENIZE, DETOKENIZE, COUNT, ABORT = "/tokenize", "/detokenize", "/tokens", "/abort_request"
EVERY_BODY = (CHAT, COMPLETE, GENERATE, "/generate_stream", "/", TOKENIZE, DETOKENIZE, COUNT, ABORT)
JSON = {"Content-Type": "application/json"}
HI = [{"role": "user", "content": "Hi"}]
HUGE = 10**400
HALF = "\ud83d"  # half of a surrogate pair: json.dumps writes it as an escape
MODEL = "SmolLM2-135M-Instruct"
CONTEXT = 8192
VOCAB = 49152
# A handler that does not block the event loop takes less CPU time in one piece than this share of parsing the largest
# body in one piece. Requests that block the loop take several times as much as that parse.
BLOCKING_SHARE = 0.6
IDLE_S = 30.0  # the server closes a connection that nobody uses for 75 s
TRIES = 3  # the CPU times of a process have a resolution of 10 ms, and its threads compute in parallel


class Client:
    """One connection to the server, opened again if the server may have closed it meanwhile."""

    def __init__(self, server: ServerProcess) -> None:
        self.place = urlsplit(server.url)
        self._connection = http.client.HTTPConnection(self.place.hostname or "", self.place.port, timeout=RESPONSE_S)
        self._used_s = time.monotonic()

    def send(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        if time.monotonic() - self._used_s > IDLE_S:
            self.close()
        try:
            self._connection.request(method, path, body, headers or {})
            response = self._connection.getresponse()
            return response.status, response.read()
        except BaseException:
            self.close()
            raise
        finally:
            self._used_s = time.monotonic()

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        status, response = self.send("POST", path, raw, JSON)
        return status, {} if response.startswith(b"data:") else json.loads(response)  # a stream is not an error

    def close(self) -> None:
        self._connection.close()

    def raw(self, data: bytes) -> bytes:
        """All bytes until the server ends the connection."""
        with self.open() as sock:
            sock.sendall(data)
            return b"".join(iter(lambda: sock.recv(65536), b""))

    def open(self) -> socket.socket:
        return socket.create_connection((self.place.hostname, self.place.port), timeout=RESPONSE_S)

    def metric(self, name: str) -> float:
        """The sum of the metric's samples. The server updates them once a second."""
        _, text = self.send("GET", "/metrics")
        families = text_string_to_metric_families(text.decode())
        return sum(sample.value for family in families for sample in family.samples if sample.name == name)

    def golden(self) -> Any:
        body = {"inputs": "The capital of France is", "parameters": {"max_new_tokens": 6, "return_details": True}}
        status, response = self.post(GENERATE, body)
        if status == 400 and "task" in str(response):  # the model computes embeddings
            status, response = self.post("/v1/embeddings", {"input": body["inputs"]})
            assert status == 200, response
            return response["data"]
        assert status == 200, response
        return [token["id"] for token in response["tokens"]]


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Client:
    return Client(server)


@pytest.fixture(scope="module")
def golden(client: Client) -> Any:
    return client.golden()


@pytest.fixture(autouse=True)
def server_unharmed(client: Client, golden: Any) -> Iterator[None]:
    """After each test the server is healthy and generates the same tokens as before."""
    yield
    assert client.send("GET", "/health")[0] == 200
    assert client.golden() == golden


def is_openai_error(response: Any) -> bool:
    error = response.get("error")
    return isinstance(error, dict) and set(error) == {"message", "type", "param", "code"} and len(str(error)) < 800


def is_tgi_error(response: Any) -> bool:
    return set(response) == {"error", "error_type"} and len(response["error"]) < 800


def check_refused(
    client: Client, cases: list[tuple[str, Any]], status: int = 400, has_shape: Callable[[Any], bool] = is_openai_error
) -> None:
    wrong = []
    for path, body in cases:
        found, response = client.post(path, body)
        if found != status or not has_shape(response):
            wrong.append(f"{path} {str(body)[:100]} -> {found} {str(response)[:300]}")
    assert not wrong, "\n".join(wrong)


def check_served(client: Client, cases: list[tuple[str, Any]]) -> None:
    responses = [(path, body, *client.post(path, body)) for path, body in cases]
    wrong = [
        f"{path} {str(body)[:100]} -> {status} {response}"
        for path, body, status, response in responses
        if status != 200
    ]
    assert not wrong, "\n".join(wrong)


# bodies


BODIES = [
    b"",
    b"{",
    b'{"prompt": "x',
    b"null",
    b"true",
    b"[]",
    b'"x"',
    b"1",
    b"{}}",
    b"{'prompt': 1}",
    b'{"a": 1,}',
    b'{"a": NaN}',
    b'{"a": Infinity}',
    b'{"a": -Infinity}',
    b'{"a": 1e400}',
    b'{"a": 01}',
    b'{"a": "\xff"}',
    b'{"a": "\\ud83d"}',
    b'{"a": "\\udc00\\ud800"}',
    b'{"\\ud83d": 1}',
    b'{"a": "\x00"}',  # a NUL that is not escaped
    b"\xef\xbb\xbf{}",
    '{"prompt": "x"}'.encode("utf-16"),
    b'{"a":' + b"[" * 2000 + b"]" * 2000 + b"}",
    b'{"a":' * 2000 + b"1" + b"}" * 2000,
]
LARGE_BODIES = [
    b'{"a":' + b"[" * 10_000_000,
    b'{"a":[' + b"[]," * 5_000_000 + b"0]}",
    b'{"a":[' + b'"",' * 5_000_000 + b"0]}",
    b'{"a":[' + b"1," * 8_000_000 + b"0]}",
    b'{"a":{' + b'"\\\\":1,' * 2_000_000 + b'"":1}}',
]


def test_a_body_that_is_not_a_json_object_is_refused_by_every_route(client: Client) -> None:
    check_refused(client, [(path, body) for path in EVERY_BODY for body in BODIES])
    check_refused(client, [(COMPLETE, body) for body in LARGE_BODIES])


def test_a_long_string_is_not_taken_for_deep_nesting(client: Client) -> None:
    text = '{"[,\\' * 250_000

    check_served(client, [(ABORT, {"request_id": text})])


def test_a_body_of_another_type_from_a_web_page_is_refused(client: Client) -> None:
    page = {"Origin": "http://example.com"}
    types = [None, "", "text/plain", "application/xml", "application/json; charset=utf-16", "application/jsonx"]
    fine = [
        "application/json",
        "Application/JSON",
        'application/json; charset="UTF-8"',
        "application/json;charset=utf8",
    ]

    def status(path: str, media_type: str | None) -> int:
        headers = page if media_type is None else page | {"Content-Type": media_type}
        return client.send("POST", path, b'{"prompt": 1}', headers)[0]

    assert {status(path, media_type) for path in EVERY_BODY for media_type in types} == {415}
    assert {status(path, media_type) for path in EVERY_BODY for media_type in fine} == {400, 422}  # TGI's on /


def test_a_body_that_is_too_large_is_refused_before_it_arrives(client: Client) -> None:
    head = b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    request = head + b"Content-Length: 17000000\r\nExpect: 100-continue\r\n\r\n"
    for path in EVERY_BODY:
        with client.open() as sock:
            sock.sendall(request % path.encode())
            assert sock.recv(65536).startswith(b"HTTP/1.1 413 ")

    with client.open() as sock:
        sock.sendall(head % COMPLETE.encode() + b"Transfer-Encoding: chunked\r\n\r\n")
        for _ in range(17):
            sock.sendall(b"%x\r\n%b\r\n" % (2**20, b" " * 2**20))
        assert sock.recv(65536).startswith(b"HTTP/1.1 413 ")


def test_text_that_is_not_unicode_is_refused_in_every_field(client: Client) -> None:
    fields = {"model": HALF, "user": HALF, "stop": HALF, "request_id": HALF, "bad_words": [HALF], HALF: 1}
    bodies = [{name: value} for name, value in fields.items()]
    messages = [{"role": HALF, "content": "x"}, {"role": "user", "content": HALF}, {**HI[0], "name": HALF}]

    check_refused(client, [(CHAT, {"messages": HI} | body) for body in bodies])
    check_refused(client, [(CHAT, {"messages": [message]}) for message in messages])
    check_refused(client, [(COMPLETE, {"prompt": "x"} | body) for body in bodies] + [(COMPLETE, {"prompt": [HALF]})])
    check_refused(client, [(GENERATE, {"inputs": HALF}), (TOKENIZE, {"prompt": HALF}), (TOKENIZE, {"inputs": HALF})])


# fields of OpenAI's schema


OPENAI_BAD: dict[str, list[Any]] = {
    "temperature": [-1, 2.01, "hot", True, [1], {}, HUGE, -1e-9],
    "top_p": [0, 1.1, -0.1, "0.5", False],
    "top_k": [-2, 1.5, 2**31, HUGE],
    "min_p": [-1, 2],
    "typical_p": [0, 1.01],
    "n": [0, -1, 129, 10**9, HUGE, True, 1.0, "2"],
    "max_tokens": [0, -1, 10**12, HUGE, True, 1.5, "5"],
    "max_completion_tokens": [0, -1, 10**12, True],
    "min_tokens": [-1, True, 10**6],
    "presence_penalty": [2.0001, -2.0001, "a", HUGE],
    "frequency_penalty": [2.0001, -2.0001],
    "repetition_penalty": [0, -1, 1e300],
    "seed": [2**63, -(2**63) - 1, 1.5, True, "7", HUGE],
    "stop": ["", [""], ["a", ""], ["x"] * 17, ["x"] * 100_000, "x" * 1_000_000, 5, [5], {"a": 1}, [None] * 1_000_000],
    "stop_token_ids": [[VOCAB], "1", 5, [2**70], [-1], [True], ["a"] * 100_000],
    "allowed_token_ids": [[], [VOCAB], [-1], 5, ["a"] * 16_384],
    "bad_words": [["x"] * 10_000, "x", [" "], [""], [5], ["x" * 1000]],
    "logit_bias": [
        {"5": 101},
        {"5": True},
        {"5": "1"},
        {str(VOCAB): 1},
        {"x": 1},
        {"-1": 1},
        {"x" * 1_000_000: 1},
        {str(i): 1 for i in range(100_000)},
        {f"x{i}": "a" for i in range(60_000)},
        [1],
    ],
    "stream": ["yes", 1],
    "stream_options": [{"include_usage": True}, 1],
    "ignore_eos": [1, "true"],
    "truncate_prompt_tokens": [0, -2, True],
    "request_id": ["", "a b", "x" * 129, "a\r\nb", "\0", 5],
    "user": [5, {}],
    "chat_template": ["{{ 1 }}"],
    "tools": [[], [{"type": "function", "function": {"name": "f"}}]],
    "response_format": [{"type": "xml"}, {"type": "json_schema"}, {"type": "json_object", "schema": {"type": "x"}}, 5],
    "structured_outputs": [
        {"regex": "(a"},
        {"json": "{"},
        {"choice": []},
        {"grammar": "(" * 50_000},
        {"regex": "a" * 10**6},
    ],
    "prompt_logprobs": [-1, 21, True, "1"],
}
BAD_MESSAGES: list[Any] = [
    [],
    None,
    "Hi",
    {},
    [None],
    ["Hi"],
    HI * 10_000,
    [{}] * 2048,
    [{"content": "Hi"}],
    [{"role": "two words", "content": "Hi"}],
    [{"role": "x" * 1_000_000, "content": "Hi"}],
    [{"role": None, "content": "Hi"}],
    [{"role": "user", "content": None}],
    [{"role": "user", "content": []}],
    [{"role": "user", "content": ["Hi"]}],
    [{"role": "user", "content": 5}],
    [{"role": "user", "content": [{"type": "poem", "text": "x"}]}],
    [{"role": "user", "content": [{"type": "text"}]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}],
    [{"role": "tool", "content": "x"}],
    [{"role": "assistant", "tool_calls": []}],
    [{"role": "assistant", "tool_calls": [None] * 1_000_000}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" + "[]," * 1_000_000 + "0]"}}]}],
]
BAD_PROMPTS: list[Any] = [
    "",
    [],
    [[]],
    [""],
    ["a", ""],
    None,
    5,
    True,
    {"a": 1},
    [1, "a"],
    ["a", 1],
    [1.5],
    [True],
    [[True]],
    [-1],
    [2**70],
    [HUGE],
    [VOCAB],
    ["x"] * 129,
    ["x"] * 5000,
    [[1]] * 60_000,
    [None] * 1_000_000,
    [1] * CONTEXT,
    [1] * 10 * CONTEXT,
    [1] * 1_900_000,
    "x " * CONTEXT,
    "x" * 15_000_000,
]


def test_a_bad_field_of_openai_is_refused(client: Client) -> None:
    fields = [{name: value} for name, values in OPENAI_BAD.items() for value in values]
    fields += [{"min_tokens": 6, "max_tokens": 5}, {"stream_options": {}, "stream": False}]
    chat: list[dict[str, Any]] = [{"top_logprobs": 2}, {"logprobs": 5}, {"chat_template_kwargs": "x"}, {"echo": 1}]
    chat += [{"logprobs": True, "top_logprobs": k} for k in (21, -1, 10**6, True)]
    complete = [{"logprobs": k} for k in (10**6, -2, 21, True)] + [{"best_of": 0}, {"best_of": 1, "n": 2}]

    check_refused(client, [(CHAT, {"messages": HI, "max_tokens": 1, **field}) for field in fields + chat])
    check_refused(client, [(COMPLETE, {"prompt": "x", "max_tokens": 1, **field}) for field in fields + complete])
    check_refused(client, [(CHAT, {"messages": messages, "max_tokens": 1}) for messages in BAD_MESSAGES])
    check_refused(client, [(COMPLETE, {"prompt": prompt}) for prompt in BAD_PROMPTS])
    check_refused(client, [(CHAT, {"messages": HI, "model": "gpt-4"}), (COMPLETE, {"prompt": "x", "model": ""})], 404)


def test_a_request_one_token_too_long_is_refused(client: Client) -> None:
    """A request that just fits takes this model minutes; tests with a scripted engine cover it."""
    one_more = client.post(COMPLETE, {"prompt": [1] * (CONTEXT - 1), "max_tokens": 2})[1]["error"]
    longer = client.post(COMPLETE, {"prompt": [1] * CONTEXT})[1]["error"]

    assert one_more["code"] == longer["code"] == "context_length_exceeded"
    told = f"prompt {CONTEXT - 1} + max_tokens 2 > {CONTEXT}; use max_tokens <= 1"
    assert one_more["message"].endswith(told)
    assert f"the prompt has {CONTEXT} tokens; the limit is {CONTEXT - 1}" in longer["message"]


ODD_PROMPTS = [
    "\0",
    "a\0b",
    "<|im_end|>",
    "<|image_pad|>",
    "\ufeff",
    "\u202e\ufffd",
    "\x7f\x1b[31m",
    "🦙" * 30,
    " ",
    [0],
]
ODD_FIELDS: list[dict[str, Any]] = [
    {"temperature": -0.0},
    {"temperature": 1e-9, "n": 2},
    {"temperature": 2, "top_p": 1e-300, "min_p": 1, "seed": -(2**63)},
    {"stop": ["\0", "\r\n", "x" * 1024]},
    {"stop": [chr(97 + i) * 1024 for i in range(16)]},
    {"logit_bias": {str(i): -100 for i in range(1024)}, "max_tokens": 1},
    {"allowed_token_ids": list(range(16_384))},
    {"user": "x" * 100_000, "unknown": [[[]]], "": "\0"},
    {"truncate_prompt_tokens": 1},
]


def test_unusual_but_valid_requests_are_served(client: Client) -> None:
    one = {"max_tokens": 1}

    check_served(client, [(COMPLETE, {"prompt": prompt} | one) for prompt in ODD_PROMPTS])
    check_served(client, [(CHAT, {"messages": [{"role": "user", "content": text}]} | one) for text in ODD_PROMPTS[:9]])
    check_served(client, [(COMPLETE, {"prompt": "x"} | one | fields) for fields in ODD_FIELDS])
    check_served(client, [(CHAT, {"messages": HI} | one | fields) for fields in ODD_FIELDS[:3]])
    check_served(client, [(GENERATE, {"inputs": "a\0b", "parameters": {"max_new_tokens": 1}})])
    check_served(client, [(GENERATE, {"inputs": "a\0b", "parameters": {"max_new_tokens": 1, "details": True}})])


def test_a_stop_string_matches_exactly_also_with_a_nul(client: Client) -> None:
    ids = client.post(TOKENIZE, {"prompt": "a\0b"})[1]["tokens"]
    text = client.post(DETOKENIZE, {"tokens": ids})[1]["prompt"]
    body = {"prompt": "The capital of France is", "temperature": 0, "max_tokens": 3}

    plain = client.post(COMPLETE, body)[1]["choices"][0]
    first = client.post(COMPLETE, body | {"stop": "\0"})[1]["choices"][0]
    longer = client.post(COMPLETE, body | {"stop": plain["text"] + "\0"})[1]["choices"][0]
    found = client.post(COMPLETE, body | {"stop": plain["text"]})[1]["choices"][0]

    assert text == "a\0b"
    assert plain["text"] == first["text"] == longer["text"]  # not cut where a C string would end
    assert (found["text"], found["stop_reason"]) == ("", plain["text"])


# LightLLM's schema and TGI's


LIGHTLLM_BAD: dict[str, list[Any]] = {
    "temperature": [-1, "hot", True, HUGE, 1e300],
    "top_p": [0, 1.1, -0.1],
    "top_k": [-2, 1.5, HUGE],
    "min_p": [-1, 2],
    "n": [0, -1, 10**9, HUGE, True, 1.0],
    "best_of": [0, -1, 10**9],
    "max_new_tokens": [0, -1, 10**12, HUGE, True, "5"],
    "min_new_tokens": [-1, 17, 10**12],
    "presence_penalty": [2.0001],
    "frequency_penalty": [-2.0001],
    "repetition_penalty": [0, -1],
    "seed": [2**63, 1.5, HUGE],
    "stop_sequences": [
        "",
        [""],
        [[]],
        ["x"] * 11,
        ["x"] * 100_000,
        "x" * 1_000_000,
        [[VOCAB]],
        [[1, VOCAB]],
        [[-1]],
        [[1] * 1_000_000],
        [None] * 1_000_000,
        [["a"] * 100_000],
        5,
    ],
    "allowed_token_ids": [[], [VOCAB], ["a"] * 100_000, [1] * 1_000_000],
    "invalid_token_ids": [[-1], [1] * 10_000],
    "logit_bias": [
        {"x": 1},
        {"1": 1e9},
        {str(VOCAB): 1},
        {str(i): 1 for i in range(100_000)},
        {"²": 1},
        {"9" * 5000: 1},
    ],
    "return_details": ["yes"],
    "ignore_eos": [1],
    "regular_constraint": ["(a", "a" * 1_000_000, 5],
    "guided_json": [{"type": "x"}, "{", 5],
}
LIGHTLLM_BAD_INPUTS: list[Any] = ["", [], None, 5, True, {}, [True], [1.5], ["a"], [VOCAB], [-1], [2**70], [HUGE]]
LIGHTLLM_BAD_INPUTS += [[1] * CONTEXT, [1] * 1_900_000, [None] * 1_000_000, "x " * CONTEXT, "x" * 15_000_000]
TGI_BAD: dict[str, list[Any]] = {
    "temperature": [0, -1, "hot", True, 10**30, 1e300],
    "top_p": [0, 1, 1.1, -0.1],
    "typical_p": [0, 1],
    "top_k": [0, -1, 10**30],
    "best_of": [0, -1, 2, 10**9],
    "max_new_tokens": [0, -1, 10**12, 10**30, True],
    "frequency_penalty": [2.0001],
    "repetition_penalty": [0, -1],
    "seed": [-1, 2**64, 10**30, 1.5],
    "stop": [[""], ["x"] * 5, ["x"] * 100_000, ["x" * 1_000_000], "x", [5], [5] * 1_000_000],
    "truncate": [0, -1, 10**9],
    "top_n_tokens": [-1, 6, True],
    "watermark": [1, "yes"],
    "grammar": [{"type": "regex", "value": "(a"}, {"type": "json", "value": "{"}, {"type": "xml", "value": ""}, 5],
    "decoder_input_details": [1, "yes"],
    "adapter_id": ["a"],
}
NO_PARAMETERS: list[Any] = [5, [], "x"]
TGI_BAD_INPUTS: list[Any] = ["", None, 5, True, {}, "x " * CONTEXT, "x" * 15_000_000]


@pytest.mark.parametrize("path", [GENERATE, "/generate_stream"])
def test_a_bad_field_of_lightllm_or_tgi_is_refused_in_its_own_shape(client: Client, path: str) -> None:
    one = {"max_new_tokens": 1, "return_details": False}  # what is wrongly served should at least be short
    tgi_one = {"max_new_tokens": 1, "details": True}
    lightllm = [{**one, name: value} for name, values in LIGHTLLM_BAD.items() for value in values]
    tgi = [{**tgi_one, name: value} for name, values in TGI_BAD.items() for value in values]

    check_refused(
        client, [(path, {"inputs": "x", "parameters": parameters}) for parameters in lightllm + NO_PARAMETERS]
    )
    check_refused(client, [(path, {"inputs": inputs, "parameters": one}) for inputs in LIGHTLLM_BAD_INPUTS])
    check_refused(client, [(path, {"inputs": "x", "parameters": {**tgi_one, "n": 1}}), (path, {})])
    check_refused(client, [(path, {"inputs": "x", "parameters": parameters}) for parameters in tgi], 422, is_tgi_error)
    tgi_inputs = [(path, {"inputs": inputs, "parameters": tgi_one}) for inputs in TGI_BAD_INPUTS]
    check_refused(client, tgi_inputs, 422, is_tgi_error)


def test_a_bad_field_of_the_token_routes_is_refused(client: Client) -> None:
    prompts: list[Any] = [None, 5, ["x"], {}, "x" * 15_000_000]
    tokens: list[Any] = [None, 5, "x", ["x"], [1.5], [True], [-1], [VOCAB], [2**70], [HUGE], {}]
    tokens += [[1] * 1_000_001, ["x"] * 100_000, [None] * 1_900_000]

    check_refused(client, [(TOKENIZE, {"prompt": prompt}) for prompt in prompts])
    check_refused(client, [(TOKENIZE, {"messages": messages}) for messages in BAD_MESSAGES])
    check_refused(client, [(TOKENIZE, {}), (TOKENIZE, {"prompt": "x", "messages": HI})])
    check_refused(client, [(TOKENIZE, {"prompt": "x", "add_special_tokens": 1})])
    check_refused(client, [(TOKENIZE, {"inputs": text}) for text in prompts], 422, is_tgi_error)
    check_refused(client, [(DETOKENIZE, {"tokens": ids}) for ids in tokens])
    check_refused(client, [(COUNT, {"text": text}) for text in prompts])
    check_refused(client, [(ABORT, body) for body in ({}, {"request_id": 5.5}, {"abort_all": 1}, {"request_id": ""})])
    check_served(client, [(TOKENIZE, {"prompt": ""}), (DETOKENIZE, {"tokens": []}), (TOKENIZE, {"inputs": ""})])


# paths, heads, connections


def test_wrong_paths_and_methods(client: Client) -> None:
    missing = ["/nothing", "/v1", "/V1/MODELS", "/health/", "//health", "/v1/models/%00", "/%ff", "/../etc/passwd"]
    found = [client.send("GET", path) for path in [*missing, "/v1/models/" + "x" * 10_000]]
    refused = [client.send(method, path) for path in EVERY_BODY for method in ("PUT", "DELETE", "PATCH")]

    assert [status for status, _ in found] == [404] * 9
    assert {status for status, _ in refused} == {405}
    assert all(is_openai_error(json.loads(response)) for _, response in found + refused)


def http_request(*lines: bytes, body: bytes = b"") -> bytes:
    return b"\r\n".join([*lines, b"Connection: close", b"", body])


GET = b"GET /health HTTP/1.1"
POST = b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json"
RAW: list[tuple[int, bytes]] = [
    (400, b"\0\1\2\r\n\r\n"),
    (400, b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03" + b"x" * 100),  # TLS
    (400, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    (400, http_request(b"GET /\xff HTTP/1.1")),
    (400, http_request(b"CONNECT a:1 HTTP/1.1")),
    (400, http_request(b"GET http://a HTTP/1.1")),
    (400, http_request(b"BREW / HTTP/1.1")),
    (400, http_request(b"GET /health HTTP/9.9")),
    (404, http_request(b"OPTIONS * HTTP/1.1")),
    (400, http_request(GET, b"X-Request-Id: a\rb")),
    (400, http_request(GET, b"X-Request-Id: a\0b")),
    (400, http_request(GET, b": x")),
    (431, http_request(GET, b"X-Request-Id: " + b"x" * 1_000_000)),
    (431, http_request(GET, *(b"a%d: b" % i for i in range(10_000)))),
    (431, http_request(GET, b"X: " + b"x" * 50_000_000)),
    (431, http_request(b"GET /" + b"x" * 1_000_000 + b" HTTP/1.1")),
    (400, http_request(POST, b"Content-Length: -1")),
    (400, http_request(POST, b"Content-Length: " + b"9" * 100)),
    (400, http_request(POST, b"Content-Length: 2", b"Content-Length: 3", body=b"{}")),
    (400, http_request(POST, b"Content-Length: 2", b"Transfer-Encoding: chunked", body=b"0\r\n\r\n")),
    (400, http_request(POST, b"Transfer-Encoding: chunked", body=b"zz\r\n")),
    (413, http_request(POST, b"Content-Length: 999999999999")),
    (400, http_request(POST)),  # no Content-Length: no body
    (400, http_request(POST, b"Content-Length: 0")),
    (400, http_request(POST, b"Content-Length: 5", body=b'{"prompt": "x"}')),  # it is longer
    (200, http_request(GET, b"Content-Length: 5", body=b"abcde")),
]


def test_malformed_http_is_refused(client: Client) -> None:
    wrong = []
    for status, data in RAW:
        response = client.raw(data)
        head, _, body = response.partition(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 %d " % status) or not (status == 200 or is_openai_error(json.loads(body))):
            wrong.append(f"{data[:80]!r} -> {response[:300]!r}, not {status}")
    assert not wrong, "\n".join(wrong)


def test_a_request_id_is_sanitised(client: Client) -> None:
    response = client.raw(http_request(GET, "X-Request-Id: é<b>\t;a=1".encode()))

    assert b"x-request-id: ba1\r\n" in response.lower() + b"\r\n"


def test_an_incomplete_body_leaves_nothing_behind(client: Client) -> None:
    for head in (b"Content-Length: 100", b"Transfer-Encoding: chunked"):
        with client.open() as sock:
            sock.sendall(http_request(POST, head, body=b'5\r\n{"pro\r\n'))
            sock.shutdown(socket.SHUT_WR)
            assert sock.recv(65536) == b""


def generate(**fields: Any) -> bytes:
    body = json.dumps({"prompt": "Once upon a time", "ignore_eos": True, **fields}).encode()
    return http_request(POST, b"Content-Length: %d" % len(body), body=body)


def read_until(sock: socket.socket, mark: bytes) -> None:
    seen = b""
    while mark not in seen:
        piece = sock.recv(65536)
        assert piece, seen
        seen += piece


def leave(sock: socket.socket, abruptly: bool) -> None:
    if abruptly:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset instead of an end
    sock.close()


def idle(client: Client) -> bool:
    names = ("kv_used_tokens", "num_requests_running", "num_requests_waiting")
    return all(client.metric(f"lightserve_{name}") == 0 for name in names)


def test_the_resources_of_a_client_that_disconnects_are_freed(client: Client) -> None:
    long: dict[str, Any] = {"max_tokens": 2000, "n": 2}
    marks = {"at once": None, "mid-stream": b'"text":" ', "before [DONE]": b'"finish_reason":"length"'}
    requests = {"at once": generate(stream=True, **long), "mid-stream": generate(stream=True, **long)}
    requests |= {"before [DONE]": generate(stream=True, max_tokens=2)}
    ended = client.metric("lightserve_request_success_total")

    for abruptly in (False, True):
        for name, mark in marks.items():
            sock = client.open()
            sock.sendall(requests[name])
            if mark is not None:
                read_until(sock, mark)
            leave(sock, abruptly)
        sock = client.open()
        sock.sendall(generate(**long))  # not streamed
        leave(sock, abruptly)

    # two of the eight disconnect at once, possibly before the server reads their request
    wait_until(lambda: idle(client) and client.metric("lightserve_request_success_total") >= ended + 6)
    wait_until(lambda: json.loads(client.send("GET", "/load")[1]) == {"server_load": 0})


# the same server, other clients


@contextmanager
def health_watched(server: ServerProcess, client: Client) -> Iterator[list[float]]:
    """Seconds that the HTTP processes compute while a client waits for /health, for each of many requests.

    A loaded machine makes the client wait, but does not let the server compute. So this is the time for which the
    server itself delays the client, at most the time that the client waits.
    """
    seconds: list[float] = []
    is_over = threading.Event()
    processes = [one for name, group in server.processes().items() if "httpserve" in name for one in group]
    assert processes

    def cpu_s() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    def ask() -> None:
        connection = http.client.HTTPConnection(client.place.hostname or "", client.place.port, timeout=60)
        while not is_over.is_set():
            begin_s, begin_cpu_s = time.perf_counter(), cpu_s()
            connection.request("GET", "/health")
            assert connection.getresponse().read()
            seconds.append(min(time.perf_counter() - begin_s, cpu_s() - begin_cpu_s))
        connection.close()

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        wait_until(lambda: len(seconds) > 3)
        seconds.clear()
        yield seconds
        wait_until(lambda: len(seconds) > 0)
    finally:
        is_over.set()
        thread.join()


def seconds_to_parse(raw: bytes) -> float:
    """CPU time of this process, on the machine that the server runs on."""
    begin_s = time.process_time()
    json.loads(raw)
    return time.process_time() - begin_s


TOOL_CALL = {"function": {"name": "f", "arguments": "[" + "[]," * 80_000 + "0]"}}
MANY_VALUES = b'{"prompt":[' + b"1," * 8_000_000 + b"1]}"
SLOW: dict[str, tuple[str, Any]] = {
    "deep nesting": (CHAT, b'{"messages":' + b"[" * 10_000_000),
    "many lists": (COMPLETE, b'{"prompt":[' + b"[]," * 5_000_000 + b"[]]}"),
    "many values": (COMPLETE, MANY_VALUES),
    "many wrong values": (GENERATE, {"inputs": "x", "parameters": {"stop_sequences": [None] * 1_900_000}}),
    "many wrong ids": (DETOKENIZE, {"tokens": [None] * 1_900_000}),
    "a long prompt": (COMPLETE, {"prompt": "a" * 15_000_000}),
    "a long number": (COMPLETE, {"prompt": "1" * 600_000}),
    "many characters": (TOKENIZE, {"prompt": "🦙" * 200_000, "return_token_strs": True}),
    "many tokens": (DETOKENIZE, {"tokens": [5] * 1_000_000}),
    "many messages": (CHAT, {"messages": [{"role": "user", "content": "x" * 5000}] * 2048}),
    "many empty messages": (CHAT, {"messages": [{"role": "user", "content": ""}] * 2048}),
    "JSON in JSON": (CHAT, {"messages": [{"role": "assistant", "content": "", "tool_calls": [TOOL_CALL]}] * 60}),
}


def longest_delay(server: ServerProcess, client: Client, path: str, body: bytes) -> float:
    """The longest time for which the server delays /health while it handles this request."""
    with health_watched(server, client) as seconds:
        client.post(path, body)
    return max(seconds)


def test_a_large_request_does_not_keep_others_waiting(server: ServerProcess, client: Client) -> None:
    bodies = {name: body if isinstance(body, bytes) else json.dumps(body).encode() for name, (_, body) in SLOW.items()}
    limit_s = BLOCKING_SHARE * min(seconds_to_parse(MANY_VALUES) for _ in range(TRIES))

    delays = {}
    for name, (path, _) in SLOW.items():
        tries = (longest_delay(server, client, path, bodies[name]) for _ in range(TRIES))
        if not any(delay < limit_s for delay in tries):
            delays[name] = longest_delay(server, client, path, bodies[name])

    assert not delays, f"the limit is {limit_s:.2f} s"


def test_many_bad_requests_leave_nothing_behind(server: ServerProcess, client: Client) -> None:
    bodies: list[tuple[str, Any]] = [(path, body) for path in EVERY_BODY for body in BODIES if len(body) < 1000]
    bodies += [(COMPLETE, {"prompt": "x", "n": 0}), (CHAT, {"messages": []}), (GENERATE, {"inputs": [-1]})]
    processes = [process for group in server.processes().values() for process in group]

    def ask(count: int) -> None:
        for i in range(count):
            client.post(*bodies[i % len(bodies)])
            if i % 5 == 0:
                client.raw(RAW[i % 4][1])

    def sizes() -> tuple[list[int], list[int]]:
        return [process.memory_info().rss for process in processes], [process.num_fds() for process in processes]

    ask(250)
    wait_until(lambda: idle(client))
    memory, fds = sizes()
    ask(500)

    wait_until(lambda: sizes()[1] == fds)
    grown = [(after - before) / 2**20 for after, before in zip(sizes()[0], memory, strict=True)]
    assert max(grown) < 2, f"{grown} MiB"
    assert "Traceback" not in server.log
