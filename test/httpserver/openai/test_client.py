"""Chat and completions through the openai client, on a real socket."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from lightserve.messages.output import StrOut
from lightserve.messages.params import FinishReason, GenerationParams
from lightserve.messages.request import GenerateReq
from lightserve.messages.step import ReqFailed, Token
from test.httpserver.openai_server import CACHED, LEAVE_S, Server, fails, rows, running, tokens
from test.real_model import smollm2_tokenizer as smol
from test.waiting import wait_until

MESSAGES: list[Any] = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("run")) as server:
        yield server


@pytest.fixture
def server(shared: Server) -> Server:
    shared.engine.script = rows("Hel", "", "lo", " 😀")
    shared.engine.received.clear()
    shared.engine.aborted.clear()
    return shared


def test_a_chat_response_can_be_one_body(server: Server) -> None:
    response = server.openai.chat.completions.create(model="tiny", messages=MESSAGES)

    prompt = smol().apply_chat_template(MESSAGES)
    assert server.engine.received[0].prompt_ids == smol().encode(prompt, add_special_tokens=False)
    assert response.id.startswith("chatcmpl-")
    assert (response.object, response.model) == ("chat.completion", "tiny")
    [choice] = response.choices
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "stop", None)
    assert (choice.message.role, choice.message.content, choice.message.tool_calls) == ("assistant", "Hello 😀", None)
    assert response.usage is not None
    assert response.usage.prompt_tokens == len(server.engine.received[0].prompt_ids)
    assert response.usage.completion_tokens == 4
    assert response.usage.total_tokens == response.usage.prompt_tokens + 4
    assert response.usage.prompt_tokens_details is not None
    assert response.usage.prompt_tokens_details.cached_tokens == CACHED


def test_a_chat_response_can_be_streamed(server: Server) -> None:
    chunks = list(
        server.openai.chat.completions.create(
            model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
    )

    *body, usage = chunks
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert [chunk.choices[0].delta.role for chunk in body] == ["assistant", None, None, None]
    assert [chunk.choices[0].delta.content for chunk in body] == ["", "Hel", "lo", " 😀"]
    assert [chunk.choices[0].finish_reason for chunk in body] == [None, None, None, "stop"]
    assert (usage.choices, [chunk.usage for chunk in body]) == ([], [None] * 4)
    assert usage.usage is not None
    assert usage.usage.completion_tokens == 4


def test_a_completion_can_be_one_body(server: Server) -> None:
    response = server.openai.completions.create(model="tiny", prompt="Once")

    assert response.id.startswith("cmpl-")
    assert response.object == "text_completion"
    assert [(choice.index, choice.text, choice.finish_reason) for choice in response.choices] == [
        (0, "Hello 😀", "stop")
    ]
    assert server.engine.received[0].prompt_ids == smol().encode("Once")
    assert server.engine.received[0].params == GenerationParams.of(max_new_tokens=16)


def test_a_completion_can_be_streamed(server: Server) -> None:
    chunks = list(server.openai.completions.create(model="tiny", prompt="Once", stream=True))

    assert [chunk.choices[0].text for chunk in chunks] == ["Hel", "lo", " 😀"]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, "stop"]
    assert {chunk.object for chunk in chunks} == {"text_completion"}


@pytest.mark.parametrize("is_stream", [False, True])
def test_three_choices_have_three_indices_and_seeds(server: Server, is_stream: bool) -> None:
    create: Any = server.openai.chat.completions.create
    response = create(model="tiny", messages=MESSAGES, n=3, seed=7, stream=is_stream)

    texts = {0: "", 1: "", 2: ""}
    for one in response if is_stream else [response]:
        for choice in one.choices:
            texts[choice.index] += (choice.delta if is_stream else choice.message).content or ""
    assert set(texts.values()) == {"Hello 😀"}
    assert [req.params.sampling.seed for req in server.engine.received] == [7, 8, 9]


def test_the_usage_of_several_choices_is_their_sum_and_the_prompts_counts_once(server: Server) -> None:
    usage = server.openai.chat.completions.create(model="tiny", messages=MESSAGES, n=3).usage

    assert usage is not None
    assert usage.completion_tokens == 12
    assert usage.prompt_tokens == len(server.engine.received[0].prompt_ids)
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == CACHED


def test_several_prompts_are_answered_in_order(server: Server) -> None:
    server.engine.script = lambda req: rows(f"<{len(req.prompt_ids)}>")(req)

    response = server.openai.completions.create(model="tiny", prompt=[[5, 6], [7], [8, 9, 10]], n=2)

    assert [choice.text for choice in response.choices] == ["<2>", "<2>", "<1>", "<1>", "<3>", "<3>"]
    assert [choice.index for choice in response.choices] == list(range(6))
    assert response.usage is not None
    assert response.usage.prompt_tokens == 6


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("One two", [smol().encode("One two")]),
        (["One", "two"], [smol().encode("One"), smol().encode("two")]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_a_prompt_may_be_text_or_ids_or_several_of_them(server: Server, prompt: Any, expected: list[list[int]]) -> None:
    server.openai.completions.create(model="tiny", prompt=prompt)

    assert [req.prompt_ids for req in server.engine.received] == expected


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("prompt", ["Once upon", smol().encode("Once upon")])
def test_echo_puts_the_prompt_before_the_output(server: Server, prompt: Any, is_stream: bool) -> None:
    response: Any = server.openai.completions.create(model="tiny", prompt=prompt, echo=True, n=2, stream=is_stream)

    texts = ["", ""]
    for one in response if is_stream else [response]:
        for choice in one.choices:
            texts[choice.index] += choice.text
    assert texts == ["Once uponHello 😀"] * 2


def test_an_echo_keeps_the_special_tokens_of_the_prompt(server: Server) -> None:
    ids = smol().encode("<|im_start|>user\nHi<|im_end|>")

    response = server.openai.completions.create(model="tiny", prompt=ids, echo=True)

    assert response.choices[0].text == "<|im_start|>user\nHi<|im_end|>Hello 😀"


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(("last", "shown"), [("assistant", "So: "), ("user", "")])
def test_a_chat_may_echo_the_message_that_it_continues(server: Server, is_stream: bool, last: str, shown: str) -> None:
    messages: Any = [*MESSAGES, {"role": last, "content": "So: "}]
    fields = {"echo": True, "continue_final_message": True, "add_generation_prompt": False}

    response: Any = server.openai.chat.completions.create(
        model="tiny", messages=messages, stream=is_stream, extra_body=fields
    )

    whole = response if is_stream else [response]
    texts = [choice.delta.content if is_stream else choice.message.content for one in whole for choice in one.choices]
    assert "".join(texts) == f"{shown}Hello 😀"


def test_sglangs_and_lightllms_names_of_fields_have_an_effect(server: Server) -> None:
    fields = {"no_stop_trim": True, "do_sample": False, "rid": "mine-7", "extra_key": "tenant", "cache_salt": "s"}

    response = server.complete(**fields)

    req = server.engine.received[0]
    assert response.headers["x-request-id"] == "mine-7"
    assert req.params == GenerationParams.of(max_new_tokens=16, include_stop=True, temperature=0.0)
    assert req.scheduling.cache_salt not in ("", "s", "tenant")


@pytest.mark.parametrize(("side", "kept"), [(None, slice(-3, None)), ("left", slice(-3, None)), ("right", slice(3))])
def test_a_prompt_is_truncated_on_the_requested_side(server: Server, side: str | None, kept: slice) -> None:
    ids = list(range(100, 110))

    server.complete(prompt=ids, truncate_prompt_tokens=3, truncation_side=side)

    assert server.engine.received[0].prompt_ids == ids[kept]


def test_best_of_returns_the_most_likely_by_mean_logprob(server: Server) -> None:
    by_seed = {1: [-3.0], 2: [-2.0, -0.1], 3: [-1.2, -1.2, -1.2], 4: [-9.0, -9.0]}  # means -3, -1.05, -1.2, -9

    def script(req: GenerateReq) -> list[StrOut | ReqFailed]:
        logprobs = by_seed[req.params.sampling.seed or 0]
        ends = [None] * (len(logprobs) - 1) + [FinishReason.LENGTH]
        return [
            StrOut(
                req.req_id,
                f"{req.params.sampling.seed}",
                Token(100, logprob=logprob, top_logprobs=[]),
                finish_reason=end,
            )
            for logprob, end in zip(logprobs, ends, strict=True)
        ]

    server.engine.script = script
    response = server.openai.completions.create(model="tiny", prompt="x", n=2, best_of=4, seed=1)

    assert [(choice.index, choice.text, choice.logprobs) for choice in response.choices] == [
        (0, "22", None),
        (1, "333", None),
    ]
    assert response.usage is not None
    assert response.usage.completion_tokens == 8
    assert {req.params.sampling.logprobs for req in server.engine.received} == {0}


def test_every_sampling_field_reaches_the_engine(server: Server) -> None:
    server.openai.completions.create(
        model="tiny",
        prompt="x",
        max_tokens=9,
        temperature=0.5,
        top_p=0.25,
        presence_penalty=1.5,
        frequency_penalty=-0.5,
        stop=["\n", "END"],
        seed=11,
        logit_bias={"5": -100, "6": 2},
        user="someone",
        extra_body={
            "top_k": 3,
            "min_p": 0.125,
            "typical_p": 0.75,
            "repetition_penalty": 1.25,
            "min_tokens": 2,
            "ignore_eos": True,
            "stop_token_ids": [7, 8],
            "skip_special_tokens": False,
            "include_stop_str_in_output": True,
            "allowed_token_ids": [5, 6, 7],
            "first_allowed_token_ids": [5, 6],
            "no_repeat_ngram_size": 4,
            "watermark": True,
            "exponential_decay_length_penalty": [3, 2],
            "no_such_field": {"is": "ignored"},
        },
    )

    assert server.engine.received[0].params == GenerationParams.of(
        max_new_tokens=9,
        min_new_tokens=2,
        temperature=0.5,
        top_p=0.25,
        top_k=3,
        min_p=0.125,
        typical_p=0.75,
        repetition_penalty=1.25,
        presence_penalty=1.5,
        frequency_penalty=-0.5,
        logit_bias={5: -100.0, 6: 2.0},
        no_repeat_ngram_size=4,
        watermark=True,
        allowed_token_ids=(5, 6, 7),
        first_allowed_token_ids=(5, 6),
        exponential_decay_length_penalty=(3, 2.0),
        seed=11,
        ignore_eos=True,
        stop=("\n", "END"),
        stop_token_ids=(7, 8),
        include_stop=True,
        skip_special_tokens=False,
    )


def test_null_is_as_good_as_absent_in_every_optional_field(server: Server) -> None:
    for path, needed in (("chat/completions", {"messages": MESSAGES}), ("completions", {"prompt": "x"})):
        schema = server.http.get("/openapi.json").json()["paths"][f"/v1/{path}"]["post"]["requestBody"]["content"]
        names = schema["application/json"]["schema"]["properties"]
        nulls = dict.fromkeys((*names, "tools", "response_format", "functions", "suffix", "priority"))

        response = server.post(f"/v1/{path}", nulls | needed)

        assert response.status_code == 200, response.text
        assert len(names) > 25
    assert [req.params.stopping.max_new_tokens for req in server.engine.received] == [
        1024 - len(server.engine.received[0].prompt_ids),
        16,
    ]


def test_a_bad_word_is_forbidden_at_the_start_of_a_text_and_after_a_space(server: Server) -> None:
    server.openai.completions.create(model="tiny", prompt="x", extra_body={"bad_words": ["world"]})

    found = server.engine.received[0].params.sampling.bad_words_ids
    assert [smol().decode(ids) for ids in found] == ["world", " world"]


@pytest.mark.parametrize("is_stream", [False, True])
def test_the_stop_reason_is_reported(server: Server, is_stream: bool) -> None:
    server.engine.script = rows("a", "b", stop_reason="END")

    response: Any = server.openai.completions.create(model="tiny", prompt="x", stop="END", stream=is_stream)

    last = list(response)[-1] if is_stream else response
    assert (last.choices[0].finish_reason, last.choices[0].stop_reason) == ("stop", "END")


def test_chat_logprobs_have_tokens_bytes_and_alternatives(server: Server) -> None:
    ids = smol().encode("Hi 👍", add_special_tokens=False)
    server.engine.script = tokens([(token_id, "x") for token_id in ids])

    response = server.openai.chat.completions.create(model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=2)

    logprobs = response.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [entry.logprob for entry in logprobs.content] == [-0.5 - i for i in range(len(ids))]
    assert b"".join(bytes(entry.bytes or ()) for entry in logprobs.content).decode() == "Hi 👍"
    assert logprobs.content[0].token == "Hi"
    assert [(top.token, top.logprob) for top in logprobs.content[0].top_logprobs] == [
        (smol().decode([100]), -1.0),
        (smol().decode([101]), -2.0),
    ]
    assert server.engine.received[0].params.sampling.logprobs == 2


def test_completion_logprobs_are_four_parallel_lists(server: Server) -> None:
    pieces = [(token_id, smol().decode([token_id])) for token_id in smol().encode("one two three")]
    server.engine.script = tokens(pieces)

    logprobs = server.openai.completions.create(model="tiny", prompt="x", logprobs=1).choices[0].logprobs

    assert logprobs is not None
    assert logprobs.tokens == ["one", " two", " three"]
    assert logprobs.text_offset == [0, 3, 7]
    assert logprobs.token_logprobs == [-0.5, -1.5, -2.5]
    assert logprobs.top_logprobs is not None
    assert logprobs.top_logprobs[1] == {smol().decode([100]): -1.0, " two": -1.5}


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, openai.BadRequestError),
        (429, openai.RateLimitError),
        (500, openai.InternalServerError),
        (503, openai.InternalServerError),
        (599, openai.InternalServerError),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
def test_an_error_before_the_first_token_is_a_status(
    server: Server, status: int, kind: type[openai.APIStatusError], is_stream: bool
) -> None:
    server.engine.script = fails(status, "the queue is full")

    with pytest.raises(kind) as caught:
        server.openai.chat.completions.create(model="tiny", messages=MESSAGES, stream=is_stream)

    is_known = status != 599
    assert caught.value.status_code == (status if is_known else 500)
    assert ("the queue is full" in caught.value.message) is is_known


def test_an_error_after_the_first_token_is_an_event_and_the_stream_still_ends(server: Server) -> None:
    server.engine.script = fails(503, "the engine died", "Hel")

    chunks = server.openai.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
    assert next(chunks).choices[0].delta.role == "assistant"
    assert next(chunks).choices[0].delta.content == "Hel"
    with pytest.raises(openai.APIError, match="the engine died"):
        next(chunks)

    assert server.chat(stream=True).text.endswith('"code":"service_unavailable"}}\n\ndata: [DONE]\n\n')


def test_an_unknown_model_is_not_found(server: Server) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        server.openai.chat.completions.create(model="gpt-9", messages=MESSAGES)

    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_a_bad_field_is_named(server: Server) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        server.openai.chat.completions.create(model="tiny", messages=MESSAGES, temperature=3)

    assert caught.value.param == "temperature"


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_disconnects_aborts_its_sequences(server: Server, is_stream: bool) -> None:
    server.hold()
    try:
        if is_stream:
            stream = server.openai.completions.create(model="tiny", prompt=["x", "y"], stream=True)
            next(iter(stream))
            stream.close()
        else:
            with pytest.raises(openai.APITimeoutError):
                server.openai.with_options(timeout=LEAVE_S).completions.create(model="tiny", prompt=["x", "y"])
        wait_until(lambda: len(server.engine.aborted) == 2)
    finally:
        server.release()

    assert sorted(server.engine.aborted) == [req.req_id for req in server.engine.received]
    wait_until(lambda: server.context.manager.running_requests == 0)


def test_the_response_id_contains_the_request_id(server: Server) -> None:
    header = server.http.post(
        "/v1/completions", json={"prompt": "x", "request_id": "of-the-body"}, headers={"X-Request-Id": "of-the-header"}
    )

    body = server.complete(request_id="of-the-body")

    assert (header.json()["id"], header.headers["x-request-id"]) == ("cmpl-of-the-header", "of-the-header")
    assert (body.json()["id"], body.headers["x-request-id"]) == ("cmpl-of-the-body", "of-the-body")


def test_continuous_usage_grows_with_every_chunk(server: Server) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}

    chunks = list(
        server.openai.chat.completions.create(model="tiny", messages=MESSAGES, stream=True, stream_options=options)
    )

    assert [chunk.usage and chunk.usage.completion_tokens for chunk in chunks] == [0, 1, 3, 4, 4]


def test_a_prompt_can_be_truncated_to_its_last_tokens(server: Server) -> None:
    response = server.complete(prompt=[1, 2, 3, 4], truncate_prompt_tokens=2).json()
    fitting = server.complete(prompt=list(range(2000)), truncate_prompt_tokens=-1, max_tokens=24).json()

    assert server.engine.received[0].prompt_ids == [3, 4]
    assert response["usage"]["prompt_tokens"] == 2
    assert server.engine.received[1].prompt_ids == list(range(1000, 2000))
    assert fitting["usage"]["prompt_tokens"] == 1000
