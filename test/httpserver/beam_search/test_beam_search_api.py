"""Beam search over HTTP: LightLLM's API, completions and chats."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import httpx2
import msgspec
import pytest

from lightserve.config import HttpConfig
from lightserve.messages.output import Admission, StrOut
from lightserve.messages.params import FinishReason
from lightserve.messages.request import GenerateReq
from lightserve.messages.step import ReqFailed, Token
from test.httpserver.fake_engine import LIMITS
from test.httpserver.openai_server import LEAVE_S, Server, fails, running
from test.real_model import smollm2_tokenizer as smol
from test.waiting import wait_until

END = 0  # of the model, and special
YES, NO = (smol().encode(word, add_special_tokens=False)[0] for word in (" yes", " no"))
# after a prompt that ends in other tokens: greedy takes yes, two beams find that no is followed by the end
AFTER = {END: [0.1, 0.5, 0.4], YES: [0.4, 0.35, 0.25], NO: [0.9, 0.06, 0.04]}
PROMPT = [700, 701]
COMPLETE = {"prompt": PROMPT, "use_beam_search": True, "best_of": 2, "max_tokens": 2}
LIGHTLLM = {"num_beams": 2, "max_new_tokens": 2}


def toy(req: GenerateReq) -> list[StrOut | ReqFailed]:
    row = AFTER.get(req.prompt_ids[-1], AFTER[END])
    top = sorted(zip((END, YES, NO), map(math.log, row), strict=True), key=lambda pair: -pair[1])
    token, logprob = top[0]
    reason = FinishReason.STOP if token == END else FinishReason.LENGTH
    wanted = top[: req.params.sampling.logprobs]
    return [
        StrOut(
            req.req_id,
            "x",
            Token(token, logprob=logprob, top_logprobs=wanted),
            finish_reason=reason,
            admission=Admission(0.001, 1),
        )
    ]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("run")) as server:
        server.context.manager.engine_info(msgspec.structs.replace(LIMITS, eos_token_ids=(END,)))
        yield server


@pytest.fixture
def server(started: Server) -> Server:
    started.engine.script = toy
    started.engine.received.clear()
    return started


def lightllm(server: Server, path: str = "/generate", **parameters: Any) -> Any:
    return server.post(path, {"inputs": PROMPT, "parameters": LIGHTLLM | parameters})


def test_a_completion_is_the_best_beam(server: Server) -> None:
    response = server.post("/v1/completions", COMPLETE).json()

    [choice] = response["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (" no", "stop", None)
    assert response["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 2,  # the end token counts
        "total_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    assert [req.prompt_ids for req in server.engine.received] == [PROMPT, [*PROMPT, YES], [*PROMPT, NO]]


def test_n_beams_of_each_prompt_come_best_first(server: Server) -> None:
    body = COMPLETE | {"prompt": [PROMPT, [800]], "n": 2, "echo": True, "early_stopping": "never"}

    response = server.post("/v1/completions", body).json()

    echoes = [smol().decode(PROMPT)] * 2 + [smol().decode([800])] * 2
    texts = [choice["text"] for choice in response["choices"]]
    assert texts == [echo + text for echo, text in zip(echoes, [" no", " yes"] * 2, strict=True)]
    assert [choice["index"] for choice in response["choices"]] == [0, 1, 2, 3]


def test_the_length_penalty_changes_what_is_best(server: Server) -> None:
    short = server.post("/v1/completions", COMPLETE | {"best_of": None, "num_beams": 3, "length_penalty": -3.0}).json()

    assert short["choices"][0]["text"] == ""
    assert short["usage"]["completion_tokens"] == 1  # the end at once


def test_without_best_of_there_are_as_many_beams_as_choices(server: Server) -> None:
    response = server.post("/v1/completions", COMPLETE | {"best_of": None, "n": 2}).json()

    assert len(response["choices"]) == 2
    assert len(server.engine.received) == 3


def test_a_stop_token_ends_a_beam_and_may_stay_in_the_text(server: Server) -> None:
    body = COMPLETE | {"stop_token_ids": [NO], "ignore_eos": True, "length_penalty": -1.0}

    cut = server.post("/v1/completions", body).json()["choices"][0]
    kept = server.post("/v1/completions", body | {"include_stop_str_in_output": True}).json()["choices"][0]

    assert (cut["text"], cut["stop_reason"]) == ("", NO)
    assert (kept["text"], kept["stop_reason"]) == (" no", NO)


def test_a_chat_can_use_beam_search(server: Server) -> None:
    response = server.chat(num_beams=2, max_tokens=2).json()

    assert response["choices"][0]["message"]["content"] == " no"


def test_lightllms_api_has_beam_search(server: Server) -> None:
    one, both = lightllm(server).json(), lightllm(server, n=2, best_of=2).json()

    assert one == {"generated_text": [" no"], "count_output_tokens": 2, "finish_reason": "stop", "prompt_tokens": 2}
    assert both["generated_text"] == [" no", " yes"]
    assert both["finish_reason"] == ["stop", "stop"]


def test_the_steps_of_a_beam_search_share_prefixes_and_scheduling(server: Server) -> None:
    lightllm(server, disable_prompt_cache=True, priority=3, timeout=60.0)

    received = server.engine.received
    assert len({req.group for req in received}) == 1
    assert {(req.scheduling.use_cache, req.scheduling.priority, req.scheduling.timeout_s) for req in received} == {
        (False, 3, 60.0)
    }
    assert len({req.arrived_s for req in received}) == 1


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("stream", {"stream": True}),
    ("logprobs", {"logprobs": 1}),
    ("stop", {"stop": ["a"]}),
    ("min_tokens", {"min_tokens": 1}),
    ("presence_penalty", {"presence_penalty": 0.5}),
    ("frequency_penalty", {"frequency_penalty": 0.5}),
    ("repetition_penalty", {"repetition_penalty": 1.1}),
    ("logit_bias", {"logit_bias": {"5": 1}}),
    ("bad_words", {"bad_words": ["x"]}),
    ("allowed_token_ids", {"allowed_token_ids": [5]}),
    ("first_allowed_token_ids", {"first_allowed_token_ids": [5]}),
    ("watermark", {"watermark": True}),
    ("no_repeat_ngram_size", {"no_repeat_ngram_size": 2}),
    ("exponential_decay_length_penalty", {"exponential_decay_length_penalty": [5, 1.5]}),
    ("best_of", {"best_of": 3}),
    ("n", {"n": 3}),
    ("num_beams", {"num_beams": 21}),
    ("num_beams", {"num_beams": 0}),
    ("num_beams", {"stop_token_ids": list(range(1, 30))}),
    ("length_penalty", {"length_penalty": 11}),
    ("early_stopping", {"early_stopping": "always"}),
    ("use_beam_search", {"use_beam_search": 1}),
]


@pytest.mark.parametrize(("name", "fields"), REFUSED, ids=lambda value: str(value))
def test_what_does_not_combine_is_refused_by_name(server: Server, name: str, fields: dict[str, Any]) -> None:
    body = {"prompt": PROMPT, "max_tokens": 2, "use_beam_search": True, "num_beams": 2}

    response = server.post("/v1/completions", body | fields)

    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].split(".")[0] == name
    assert server.engine.received == []


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("do_sample", {"do_sample": True}),
        ("return_details", {"return_details": True}),
        ("stop_sequences", {"stop_sequences": ["a"]}),
        ("min_new_tokens", {"min_new_tokens": 1}),
        ("repetition_penalty", {"repetition_penalty": 1.1}),
        ("invalid_token_ids", {"invalid_token_ids": [5]}),
        ("best_of", {"best_of": 3}),
        ("n", {"n": 3}),
        ("num_beams", {"num_beams": 21}),
    ],
)
def test_lightllms_api_names_what_does_not_combine_with_beam_search(
    server: Server, name: str, fields: dict[str, Any]
) -> None:
    response = lightllm(server, **fields)

    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].endswith(name)
    assert server.engine.received == []


def test_a_beam_search_cannot_be_streamed(server: Server) -> None:
    response = lightllm(server, "/generate_stream")

    assert response.status_code == 400
    assert "use /generate" in response.json()["error"]["message"]


def test_more_beams_than_max_choices_are_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    with running(tmp_path_factory.mktemp("run"), config=HttpConfig(max_choices=3)) as server:
        answers = [server.post("/v1/completions", COMPLETE | {"best_of": 4}), lightllm(server, num_beams=4)]

    assert [response.status_code for response in answers] == [400, 400]


@pytest.mark.parametrize("status", [429, 504])
def test_an_error_in_a_beam_search_is_a_status(server: Server, status: int) -> None:
    server.engine.script = fails(status, "no")

    assert server.post("/v1/completions", COMPLETE).status_code == lightllm(server).status_code == status


def test_one_beam_is_an_ordinary_request(server: Server) -> None:
    response = lightllm(server, num_beams=1, length_penalty=2.0).json()

    assert response["generated_text"] == ["x"]
    assert len(server.engine.received) == 1


def test_a_client_that_disconnects_ends_its_beam_search(server: Server) -> None:
    server.engine.script = lambda req: toy(req) if req.prompt_ids == PROMPT else []
    server.engine.aborted.clear()

    with pytest.raises(httpx2.ReadTimeout):
        server.http.post("/v1/completions", json=COMPLETE, timeout=LEAVE_S)

    wait_until(lambda: len(server.engine.aborted) == 2)
