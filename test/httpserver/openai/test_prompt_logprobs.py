"""The logprobs of prompts over HTTP, with a scripted engine: the fields that request them, and their formats."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from lightserve.httpserver.generate.tgi.response import prefill
from lightserve.httpserver.openai.logprobs import PromptLogprobsWriter
from lightserve.messages.output import EmbeddingOut, StrOut
from lightserve.messages.request import GenerateReq
from lightserve.messages.step import PromptLogprobs, ReqFailed
from test.httpserver.fake_engine import Script
from test.httpserver.openai_server import Server, events, rows, running
from test.real_model import smollm2_tokenizer as smol

PROMPT = "Once upon a time"
IDS = smol().encode(PROMPT)
TOKENS = ["Once", " upon", " a", " time"]
OUTPUT = (" there", ".")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("run")) as server:
        server.engine.script = with_prompt_logprobs(rows(*OUTPUT))
        yield server


def with_prompt_logprobs(script: Script) -> Script:
    """The same script, where prompt tokens have the logprobs -1, -2, ...; the top tokens are 100, then 101."""

    def with_prompt(req: GenerateReq) -> list[StrOut | ReqFailed | EmbeddingOut]:
        first, *rest = script(req)
        k = req.params.sampling.prompt_logprobs
        if k is not None:
            assert isinstance(first, StrOut)
            token = msgspec.structs.replace(first.token, prompt_logprobs=packed(len(req.prompt_ids) - 1, k))
            first = msgspec.structs.replace(first, token=token)
        return [first, *rest]

    return with_prompt


def packed(count: int, k: int) -> PromptLogprobs:
    logprobs = -np.arange(1, count + 1, dtype=np.float32)
    top_ids = np.tile(np.arange(100, 100 + k, dtype=np.int32), (count, 1))
    top_logprobs = np.tile(-np.arange(1, k + 1, dtype=np.float32) / 4, (count, 1))
    ranks = np.arange(7, 7 + count, dtype=np.int32)
    return PromptLogprobs(*(array.tobytes() for array in (logprobs, ranks, top_ids, top_logprobs)))


def word(token_id: int) -> str:
    return smol().decode([token_id])


def vllm_field(k: int) -> list[Any]:
    """vLLM's prompt_logprobs of PROMPT."""
    entries: list[Any] = [None]
    for i, token_id in enumerate(IDS[1:]):
        entry = {str(token_id): {"logprob": -1.0 - i, "rank": 7 + i, "decoded_token": word(token_id)}}
        for j in range(k):
            entry[str(100 + j)] = {"logprob": -(j + 1) / 4, "rank": j + 1, "decoded_token": word(100 + j)}
        entries.append(entry)
    return entries


def test_an_echo_has_the_logprobs_of_prompt_and_output_together(server: Server) -> None:
    choice = server.complete(prompt=PROMPT, echo=True, logprobs=1).json()["choices"][0]

    assert choice["text"] == PROMPT + "".join(OUTPUT)
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == [*TOKENS, *OUTPUT]
    assert logprobs["token_logprobs"] == [None, -1, -2, -3, -0.5, -1.5]
    assert logprobs["top_logprobs"][:2] == [None, {word(100): -0.25, " upon": -1.0}]
    assert [choice["text"][begin:] for begin in logprobs["text_offset"]] == [
        "".join([*TOKENS, *OUTPUT][i:]) for i in range(6)
    ]
    assert choice["prompt_logprobs"] is None
    assert server.engine.received[-1].params.sampling.prompt_logprobs == 1


@pytest.mark.parametrize("fields", [{}, {"echo": True}, {"logprobs": 3}], ids=str)
def test_a_request_without_prompt_logprobs_costs_nothing(server: Server, fields: dict[str, Any]) -> None:
    server.complete(**fields)

    assert server.engine.received[-1].params.sampling.prompt_logprobs is None


@pytest.mark.parametrize("logprobs", [None, 2])
def test_max_tokens_0_gives_no_output(server: Server, logprobs: int | None) -> None:
    response = server.complete(prompt=PROMPT, echo=True, logprobs=logprobs, max_tokens=0).json()

    (choice,) = response["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (PROMPT, "length", None)
    assert response["usage"]["completion_tokens"] == 0
    assert response["usage"]["total_tokens"] == response["usage"]["prompt_tokens"] == len(IDS)
    if logprobs is not None:
        assert choice["logprobs"]["token_logprobs"] == [None, -1, -2, -3]
    assert server.engine.received[-1].params.stopping.max_new_tokens == 1


def test_prompt_logprobs_are_in_each_choice_of_a_completion(server: Server) -> None:
    response = server.complete(prompt=[PROMPT, IDS], n=2, prompt_logprobs=2).json()

    assert [choice["prompt_logprobs"] for choice in response["choices"]] == [vllm_field(2)] * 4
    assert [choice["text"] for choice in response["choices"]] == ["".join(OUTPUT)] * 4
    assert response["choices"][0]["logprobs"] is None


def test_prompt_logprobs_are_beside_the_choices_of_a_chat(server: Server) -> None:
    response = server.chat(n=2, prompt_logprobs=1).json()
    ids = server.engine.received[-1].prompt_ids

    first, second, *_ = response["prompt_logprobs"]
    assert len(response["prompt_logprobs"]) == len(ids) == response["usage"]["prompt_tokens"]
    assert first is None
    assert list(second) == [str(ids[1]), "100"]
    assert all("prompt_logprobs" not in choice for choice in response["choices"])


def test_a_chat_with_max_tokens_0_returns_prompt_logprobs_only(server: Server) -> None:
    response = server.chat(prompt_logprobs=0, max_completion_tokens=0).json()

    assert response["choices"][0]["message"]["content"] == ""
    assert response["choices"][0]["finish_reason"] == "length"
    assert len(response["prompt_logprobs"]) == response["usage"]["total_tokens"]


def test_the_engine_returns_as_many_alternatives_as_the_larger_field_requests(server: Server) -> None:
    choice = server.complete(prompt=PROMPT, echo=True, logprobs=1, prompt_logprobs=3).json()["choices"][0]

    assert server.engine.received[-1].params.sampling.prompt_logprobs == 3
    assert len(choice["logprobs"]["top_logprobs"][1]) == 1 + 1
    assert choice["prompt_logprobs"] == vllm_field(3)


@pytest.mark.parametrize("max_tokens", [0, 5])
@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_has_prompt_logprobs_in_its_first_chunks_and_folds_to_the_response(
    server: Server, max_tokens: int, n: int
) -> None:
    body = {"prompt": PROMPT, "echo": True, "logprobs": 1, "prompt_logprobs": 2, "max_tokens": max_tokens, "n": n}
    whole = server.complete(**body).json()["choices"]

    chunks = [chunk["choices"][0] for chunk in events(server.complete(**body, stream=True))]

    for index in range(n):
        own = [chunk for chunk in chunks if chunk["index"] == index]
        assert own[0]["text"] == PROMPT
        assert own[0]["prompt_logprobs"] == whole[index]["prompt_logprobs"] == vllm_field(2)
        assert "".join(chunk["text"] for chunk in own) == whole[index]["text"]
        parts = [chunk["logprobs"] for chunk in own if chunk["logprobs"] is not None]
        for name, values in whole[index]["logprobs"].items():
            assert [value for part in parts for value in part[name]] == values
        assert own[-1]["finish_reason"] == whole[index]["finish_reason"]


def test_a_streamed_chat_has_prompt_logprobs_once(server: Server) -> None:
    whole = server.chat(n=2, prompt_logprobs=1).json()

    chunks = events(server.chat(n=2, prompt_logprobs=1, stream=True, stream_options={"include_usage": True}))

    telling = [chunk for chunk in chunks if "prompt_logprobs" in chunk]
    assert [chunk["prompt_logprobs"] for chunk in telling] == [whole["prompt_logprobs"]]
    assert telling[0]["choices"][0]["delta"]["role"] == "assistant"


def test_a_stream_without_an_echo_begins_with_the_prompt_logprobs(server: Server) -> None:
    first, *_ = events(server.complete(prompt=PROMPT, prompt_logprobs=0, stream=True))

    assert first["choices"][0] | {"prompt_logprobs": None} == {
        "index": 0,
        "text": OUTPUT[0],
        "logprobs": None,
        "finish_reason": None,
        "prompt_logprobs": None,
    }
    assert first["choices"][0]["prompt_logprobs"] == vllm_field(0)


def test_an_evaluation_harness_gets_logprobs_of_batches_of_token_ids(server: Server) -> None:
    """lm-eval's local-completions: contexts and continuations as ids, one more token, which it leaves out."""
    batch = [IDS, IDS[:2], IDS[:3]]
    body = {"model": "tiny", "prompt": batch, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1, "echo": True}

    response = server.complete(**body).json()

    for choice, ids in zip(sorted(response["choices"], key=lambda one: one["index"]), batch, strict=True):
        token_logprobs = choice["logprobs"]["token_logprobs"][1:-1]
        top_logprobs = choice["logprobs"]["top_logprobs"][1:-1]
        assert token_logprobs[: len(ids) - 1] == [-1.0 - i for i in range(len(ids) - 1)]
        assert all(isinstance(top, dict) for top in top_logprobs)


@pytest.mark.parametrize("fields", [{"prompt_logprobs": 1}, {"max_tokens": 0, "echo": True}], ids=str)
def test_a_beam_search_refuses_prompt_logprobs(server: Server, fields: dict[str, Any]) -> None:
    response = server.complete(num_beams=2, **fields)

    assert response.status_code == 400
    assert response.json()["error"]["param"] == next(iter(fields))


def test_offsets_count_special_tokens_only_where_the_echo_shows_them() -> None:
    ids = [1, *smol().encode("a"), 2, *smol().encode(" b")]

    def offsets(echo: str) -> list[int]:
        written = PromptLogprobsWriter(smol(), ids, echo, echo_k=0).echoed(packed(3, 0))
        assert written is not None
        return list(written["text_offset"])

    assert offsets("a b") == [0, 0, 1, 1]
    assert offsets("<|im_start|>a<|im_end|> b") == [0, 12, 13, 23]
    assert offsets("a<|im_end|> b") == [0, 0, 1, 11]


def test_the_logprob_of_an_impossible_token_is_a_json_number() -> None:
    never = np.array([-math.inf], dtype=np.float32).tobytes()
    rank = np.array([9], dtype=np.int32).tobytes()
    prompt = PromptLogprobsWriter(smol(), IDS[:2], "Once upon", field_k=0, echo_k=0)
    impossible = PromptLogprobs(never, rank, b"", b"")

    written, entries = prompt.echoed(impossible), prompt.field(impossible)

    assert written is not None
    assert entries is not None
    assert written["token_logprobs"] == [None, -9999.0]
    assert entries[1] == {str(IDS[1]): {"logprob": -9999.0, "rank": 9, "decoded_token": " upon"}}
    assert prefill(IDS[:2], impossible, smol())[1] == {"id": IDS[1], "text": " upon", "logprob": -9999.0}
