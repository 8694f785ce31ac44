"""Token healing: how many tokens are removed, what reaches the engine, and what is shown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from lightserve.httpserver.fields.token_healing import _shown, tokens_to_remove
from lightserve.messages.params import GrammarSpec
from lightserve.messages.request import GenerateReq
from lightserve.model_files import Tokenizer
from lightserve.model_files.tokenizer.special_tokens import SpecialTokens
from test.httpserver.openai_server import Server, rows, running
from test.real_model import smollm2_tokenizer as smol

PROMPT = "Look at http:"
IDS = smol().encode(PROMPT)
TAKEN = " http:"


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("run")) as server:
        yield server


@pytest.fixture
def server(started: Server) -> Server:
    started.engine.script = rows("", "//", "example")
    started.engine.received.clear()
    return started


def received(server: Server) -> GenerateReq:
    (request,) = server.engine.received
    return request


def test_the_prompt_ends_as_these_tests_expect() -> None:
    assert smol().decode(IDS[-2:]) == TAKEN


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (PROMPT, 2),
        ("Hello", 0),  # a single token, before which there is nothing
        ("Hello!", 1),
        ("<|im_start|>user", 1),
        ("<|im_start|>", 0),
        ("x<|im_end|>", 0),
        ("I like 😀", None),
        ("日本の首都", None),
    ],
)
def test_whole_characters_are_removed_and_special_tokens_stay(text: str, count: int | None) -> None:
    ids = smol().encode(text)

    found = tokens_to_remove(smol(), ids)

    if count is not None:
        assert found == count
    else:
        assert found >= 2
        assert text == smol().decode(ids[:-found]) + smol().decode(ids[-found:])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": PROMPT, "max_tokens": 7, "token_healing": True}),
        ("/generate", {"inputs": PROMPT, "parameters": {"max_new_tokens": 7, "token_healing": True, "n": 1}}),
        ("/generate", {"inputs": PROMPT, "parameters": {"max_new_tokens": 7, "token_healing": True, "details": True}}),
    ],
)
def test_the_engine_generates_the_removed_text_again(server: Server, path: str, body: dict[str, Any]) -> None:
    response = server.post(path, body)

    assert response.status_code == 200, response.text
    request = received(server)
    assert request.prompt_ids == IDS[:-2]
    assert request.params.sampling.grammar == GrammarSpec("prefix", TAKEN)
    assert request.params.text.hidden_chars == len(TAKEN)
    assert request.params.stopping.max_new_tokens == 9


def test_without_token_healing_the_prompt_stays_whole(server: Server) -> None:
    server.complete(prompt=PROMPT, token_healing=False)

    assert received(server).prompt_ids == IDS
    assert received(server).params.sampling.grammar is None


def test_return_full_text_has_the_prompt_once(server: Server) -> None:
    echoed = server.complete(prompt=PROMPT, token_healing=True, echo=True).json()["choices"][0]["text"]
    truncated = server.complete(prompt=PROMPT, token_healing=True, echo=True, truncate_prompt_tokens=3).json()
    full = server.post(
        "/generate", {"inputs": PROMPT, "parameters": {"token_healing": True, "return_full_text": True}}
    ).json()

    assert echoed == f"{PROMPT}//example"
    assert truncated["choices"][0]["text"] == smol().decode(IDS[-3:]) + "//example"
    assert full["generated_text"] == f"{PROMPT}//example"
    assert [request.prompt_ids for request in server.engine.received] == [IDS[:-2], IDS[-3:-2], IDS[:-2]]


def test_every_prompt_of_several_is_healed_by_itself(server: Server) -> None:
    server.complete(prompt=[PROMPT, "Hello"], token_healing=True, n=2)

    assert [request.prompt_ids for request in server.engine.received] == [IDS[:-2]] * 2 + [smol().encode("Hello")] * 2
    assert [request.params.text.hidden_chars for request in server.engine.received] == [6, 6, 0, 0]


@pytest.mark.parametrize(("echo", "begin"), [(False, 0), (True, len(PROMPT))])
def test_offsets_point_to_the_text_of_each_token(server: Server, echo: bool, begin: int) -> None:
    server.engine.script = rows(" http", "://", "example")

    choice = server.complete(prompt=PROMPT, token_healing=True, logprobs=0, echo=echo).json()["choices"][0]

    assert choice["logprobs"]["text_offset"][-3:] == [begin - 6, begin - 1, begin + 2]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": IDS, "token_healing": True}),
        ("/v1/completions", {"prompt": PROMPT, "token_healing": True, "regex": "a"}),
        ("/v1/completions", {"prompt": PROMPT, "token_healing": True, "use_beam_search": True, "n": 2}),
        ("/v1/completions", {"prompt": PROMPT, "token_healing": True, "echo": True, "max_tokens": 0}),
        ("/v1/completions", {"prompt": PROMPT, "token_healing": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "token_healing": True}),
        ("/v1/responses", {"input": "x", "token_healing": True}),
        ("/generate", {"inputs": IDS, "parameters": {"token_healing": True}}),
        ("/generate", {"inputs": PROMPT, "parameters": {"token_healing": True, "num_beams": 2}}),
        ("/generate", {"inputs": PROMPT, "parameters": {"token_healing": True, "guided_json": {}}}),
    ],
)
def test_what_cannot_be_healed_is_refused(server: Server, path: str, body: dict[str, Any]) -> None:
    response = server.post(path, body)

    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].endswith("token_healing")
    assert not server.engine.received


def test_a_first_space_is_counted_as_hidden_because_the_output_shows_it() -> None:
    backend = tokenizers.Tokenizer(models.BPE({"▁": 0, "a": 1, "▁a": 2}, [("▁", "a")]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    tokenizer = Tokenizer(backend, SpecialTokens(), None)

    assert (_shown(tokenizer, [2]), _shown(tokenizer, [1, 2])) == (" a", "a a")
