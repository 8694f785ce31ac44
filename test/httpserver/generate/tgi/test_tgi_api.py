"""TGI's schema on /generate, /generate_stream, / and /info, over a socket."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from lightserve.httpserver.engine_client import PromptRequest
from lightserve.httpserver.generate.tgi.request import TgiRequest
from lightserve.httpserver.generate.tgi.response import TgiEventWriter, tgi_json
from lightserve.messages.output import StrOut
from lightserve.messages.params import FinishReason, GenerationParams
from lightserve.messages.step import PromptLogprobs, ReqFailed, Token
from test.httpserver.fake_engine import LIMITS, spell
from test.httpserver.generate.lightllm.test_lightllm_api import TEXT, rows_of, scripted
from test.httpserver.generate_server import Answer, Served, serve
from test.real_model import smollm2_tokenizer as smol
from test.waiting import until

END = 2  # <|im_end|>


def tgi(parameters: dict[str, Any] | None = None, **body: Any) -> dict[str, Any]:
    """A body that is surely TGI's."""
    return {"inputs": "What is AI?", "parameters": {"details": True} | (parameters or {})} | body


def test_a_response_has_tgis_fields(tmp_path: Path) -> None:
    rows = [
        StrOut(0, "Hi", Token(64, logprob=-0.5)),
        StrOut(0, "", Token(END, logprob=-0.25), finish_reason=FinishReason.STOP),
    ]

    async def scenario(served: Served) -> None:
        response = await served.post("/generate", tgi())

        assert response.status == 200
        assert response.json == {
            "generated_text": "Hi",
            "details": {
                "finish_reason": "eos_token",
                "generated_tokens": 2,
                "seed": None,
                "prefill": [],
                "tokens": [
                    {"id": 64, "text": "Hi", "logprob": -0.5, "special": False},
                    {"id": END, "text": "", "logprob": -0.25, "special": True},
                ],
            },
        }

    serve(scenario, tmp_path, scripted([*rows]))


def test_without_details_there_is_only_the_text(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        response = await served.post("/generate", tgi({"details": False}))

        assert response.json == {"generated_text": "ok"}
        assert served.fake.received[0].params.sampling.logprobs is None

    serve(scenario, tmp_path, spell("ok"))


def test_the_root_path_returns_a_list_or_a_stream(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        whole = await served.post("/", tgi({"details": False}))
        stream = await served.post("/", tgi(stream=True))
        ignored = await served.post("/generate", tgi({"details": False}, stream=True))

        assert whole.json == [{"generated_text": "ok"}]
        assert [event["token"]["text"] for event in stream.events] == ["o", "k"]
        assert ignored.json == {"generated_text": "ok"}

    serve(scenario, tmp_path, spell("ok"))


def test_an_event_of_the_stream_has_these_exact_bytes(tmp_path: Path) -> None:
    rows = [
        StrOut(0, "é", Token(64, logprob=-0.5)),
        StrOut(0, "", Token(END, logprob=None), finish_reason=FinishReason.LENGTH),
    ]

    async def scenario(served: Served) -> None:
        response = await served.post("/generate_stream", tgi())

        assert response.body.decode() == (
            'data: {"index":1,"token":{"id":64,"text":"é","logprob":-0.5,"special":false},'
            '"generated_text":null,"details":null}\n\n'
            'data: {"index":2,"token":{"id":2,"text":"","logprob":null,"special":true},"generated_text":"é",'
            '"details":{"finish_reason":"length","generated_tokens":2,"seed":null,"input_length":4}}\n\n'
        )

    serve(scenario, tmp_path, scripted([*rows]))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("before", ["", "The prompt: "])
def test_the_events_of_a_stream_fold_to_the_whole_response(seed: int, before: str) -> None:
    rng = random.Random(seed)
    rows = rows_of(TEXT * 2, rng, end=rng.choice([None, 7, "."]))
    received = TgiRequest(
        PromptRequest([1, 2], GenerationParams.of(logprobs=0)), best_of=1, seed=seed, details=True, before=before
    )
    lines = TgiEventWriter(received, smol())

    events = [orjson.loads(lines.line(row).removeprefix(b"data:")) for row in rows]
    whole = tgi_json(received, [rows], 0, smol())

    assert events[-1]["generated_text"] == whole["generated_text"] == before + TEXT * 2
    assert [event["token"] for event in events] == whole["details"]["tokens"]
    shown = [event["token"]["text"] for event in events if not event["token"]["special"]]  # as TGI's clients do
    assert "".join(shown) == TEXT * 2
    assert all(event["generated_text"] is None and event["details"] is None for event in events[:-1])
    for name in ("finish_reason", "generated_tokens", "seed"):
        assert events[-1]["details"][name] == whole["details"][name]


@pytest.mark.parametrize(
    ("finish_reason", "stop_reason", "expected"),
    [
        (FinishReason.STOP, None, "eos_token"),
        (FinishReason.STOP, "END", "stop_sequence"),
        (FinishReason.STOP, 7, "stop_sequence"),
        (FinishReason.LENGTH, None, "length"),
    ],
)
def test_the_finish_reason_has_tgis_names(
    tmp_path: Path, finish_reason: FinishReason, stop_reason: int | str | None, expected: str
) -> None:
    row = StrOut(0, "x", Token(64, logprob=0.0), finish_reason=finish_reason, stop_reason=stop_reason)

    async def scenario(served: Served) -> None:
        assert (await served.post("/generate", tgi())).json["details"]["finish_reason"] == expected

    serve(scenario, tmp_path, scripted([row]))


def test_every_parameter_reaches_the_engine(tmp_path: Path) -> None:
    parameters = {
        "temperature": 0.7,
        "repetition_penalty": 1.1,
        "frequency_penalty": -0.5,
        "top_k": 40,
        "top_p": 0.9,
        "typical_p": 0.95,
        "do_sample": True,
        "max_new_tokens": 20,
        "stop": ["END", "."],
        "truncate": 2,
        "seed": 2**64 - 1,
        "top_n_tokens": 3,
        "ignore_eos_token": True,
        "watermark": True,
        "decoder_input_details": False,
        "grammar": None,
        "adapter_id": None,
    }

    async def scenario(served: Served) -> None:
        response = await served.post("/generate", tgi(parameters))

        assert response.status == 200, response.body
        (received,) = served.fake.received
        assert received.prompt_ids == smol().encode("What is AI?")[-2:]
        assert received.params == GenerationParams.of(
            max_new_tokens=20,
            temperature=0.7,
            top_p=0.9,
            top_k=40,
            typical_p=0.95,
            repetition_penalty=1.1,
            frequency_penalty=-0.5,
            watermark=True,
            seed=-1,
            ignore_eos=True,
            stop=("END", "."),
            include_stop=True,
            logprobs=3,
        )
        assert response.json["details"]["seed"] == 2**64 - 1
        assert response.json["details"]["top_tokens"][0] == [
            {"id": i, "text": smol().decode([i], False), "logprob": -1.0 - i, "special": True} for i in range(3)
        ]

    serve(scenario, tmp_path, spell("ok"))


@pytest.mark.parametrize(
    ("parameters", "samples"),
    [
        ({}, False),
        ({"do_sample": False}, False),
        ({"repetition_penalty": 1.2}, False),
        ({"seed": 5}, False),
        ({"do_sample": True}, True),
        ({"temperature": 1.0}, True),
        ({"top_k": 5}, True),
        ({"top_p": 0.5}, True),
        ({"typical_p": 0.5}, True),
    ],
)
def test_sampling_is_on_when_requested_or_implied(tmp_path: Path, parameters: dict[str, Any], samples: bool) -> None:
    async def scenario(served: Served) -> None:
        response = await served.post("/generate", tgi(parameters))

        (received,) = served.fake.received
        reported = response.json["details"]["seed"]
        assert received.params.sampling.is_greedy is not samples
        assert (reported is not None) is samples
        if samples:  # a random seed is reported, so that it can be used again
            assert received.params.sampling.seed is not None
            assert received.params.sampling.seed % 2**64 == reported

    serve(scenario, tmp_path, spell("ok"))


def test_top_tokens_come_with_every_event(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        response = await served.post("/generate_stream", tgi({"top_n_tokens": 2}))

        assert [[token["id"] for token in event["top_tokens"]] for event in response.events] == [[0, 1], [0, 1]]

    serve(scenario, tmp_path, spell("ok"))


def test_the_full_text_begins_with_the_prompt(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        body = tgi({"return_full_text": True})

        assert (await served.post("/generate", body)).json["generated_text"] == "What is AI?ok"
        assert (await served.post("/generate_stream", body)).events[-1]["generated_text"] == "What is AI?ok"

    serve(scenario, tmp_path, spell("ok"))


def test_max_new_tokens_is_the_rest_of_the_context(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        await served.post("/generate", tgi())

        assert served.fake.received[0].params.stopping.max_new_tokens == LIMITS.max_req_total_len - 4

    serve(scenario, tmp_path, spell("ok"))


def test_truncate_takes_the_last_tokens_of_a_text_that_is_far_too_long(tmp_path: Path) -> None:
    text = "one two three " * 200_000

    async def scenario(served: Served) -> None:
        assert (await served.post("/generate", tgi(inputs=text))).status == 422
        assert (await served.post("/generate", tgi({"truncate": 9}, inputs=text))).status == 200
        assert served.fake.received[0].prompt_ids == smol().encode(text[-1400:])[-9:]

    serve(scenario, tmp_path, spell("ok"))


def test_best_of_returns_the_most_likely_and_lists_the_others(tmp_path: Path) -> None:
    answers: list[list[StrOut | ReqFailed]] = [
        [StrOut(0, text, Token(64, logprob=logprob), finish_reason=FinishReason.STOP)]
        for text, logprob in (("a", -2.0), ("b", -1.0), ("c", -3.0))
    ]

    async def scenario(served: Served) -> None:
        response = await served.post("/generate", tgi({"best_of": 3, "do_sample": True}))

        details = response.json["details"]
        seeds = [req.params.sampling.seed for req in served.fake.received]
        assert response.json["generated_text"] == "b"
        assert [one["generated_text"] for one in details["best_of_sequences"]] == ["a", "c"]
        reported = [details["best_of_sequences"][0]["seed"], details["seed"], details["best_of_sequences"][1]["seed"]]
        assert [seed is not None and seed % 2**64 for seed in seeds] == reported
        assert len(set(reported)) == 3

    serve(scenario, tmp_path, scripted(*answers))


def test_headers_have_times_and_counts(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        whole = (await served.post("/generate", tgi())).headers
        stream = (await served.post("/generate_stream", tgi())).headers

        assert whole["x-compute-characters"] == stream["x-compute-characters"] == "11"
        assert whole["x-compute-type"] == stream["x-compute-type"]
        assert (whole["x-prompt-tokens"], whole["x-generated-tokens"]) == ("4", "2")
        assert 0 < float(whole["x-compute-time"]) < 30
        for name in ("total", "validation", "queue", "inference"):
            assert 0 <= int(whole[f"x-{name}-time"]) < 30_000
        assert int(whole["x-time-per-token"]) >= 0
        assert int(whole["x-queue-time"]) == 1
        assert stream["x-accel-buffering"] == "no"

    serve(scenario, tmp_path, spell("ok"))


def test_info_has_the_model_and_the_limits(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        info = orjson.loads((await served.get("/info")).body)

        assert info["model_id"] == "tiny"
        assert (info["max_input_tokens"], info["max_total_tokens"]) == (1023, 1024)
        assert (info["max_best_of"], info["max_stop_sequences"]) == (128, 4)
        assert info["router"] == "lightserve"
        assert info["version"]

    serve(scenario, tmp_path, spell("ok"))


BAD: list[tuple[dict[str, Any], str]] = [
    ({"best_of": 2}, "you must use sampling when `best_of` is > 1"),
    ({"best_of": 0}, "`best_of` must be > 0 and <= 128. Given: 0"),
    ({"best_of": 129, "do_sample": True}, "`best_of` must be > 0 and <= 128. Given: 129"),
    ({"best_of": 2, "do_sample": True, "seed": 1}, "`seed` must not be set when `best_of` > 1"),
    ({"temperature": 0}, "`temperature` must be strictly positive"),
    ({"temperature": -1.0}, "`temperature` must be strictly positive"),
    ({"repetition_penalty": 0.0}, "`repetition_penalty` must be strictly positive"),
    ({"frequency_penalty": 2.1}, "`frequency_penalty` must be >= -2.0 and <= 2.0"),
    ({"top_p": 1.0}, "`top_p` must be > 0.0 and < 1.0"),
    ({"top_p": 0.0}, "`top_p` must be > 0.0 and < 1.0"),
    ({"typical_p": 1.0}, "`typical_p` must be > 0.0 and < 1.0"),
    ({"top_k": 0}, "`top_k` must be strictly positive"),
    ({"top_k": -1}, "`top_k` must be strictly positive"),
    ({"max_new_tokens": 0}, "`max_new_tokens` must be strictly positive"),
    (
        {"max_new_tokens": 1021},
        "`inputs` tokens + `max_new_tokens` must be <= 1024. Given: 4 `inputs` tokens and 1021 `max_new_tokens`; "
        "use `max_new_tokens` <= 1020",
    ),
    ({"stop": ["a", "b", "c", "d", "e"]}, "`stop` supports up to 4 stop sequences. Given: 5"),
    ({"stop": [""]}, "`stop`: a stop string must have 1..1024 characters"),
    ({"stop": ["a" * 1_000_000]}, "`stop`: a stop string must have 1..1024 characters"),
    ({"truncate": 0}, "`truncate` must be strictly positive and less than 1023. Given: 0"),
    ({"truncate": 1024}, "`truncate` must be strictly positive and less than 1023. Given: 1024"),
    ({"top_n_tokens": 6}, "`top_n_tokens` must be >= 0 and <= 5. Given: 6"),
    ({"top_n_tokens": -1}, "`top_n_tokens` must be >= 0 and <= 5. Given: -1"),
    ({"seed": -1}, "`seed` must be >= 0 and < 2^64"),
    ({"grammar": {"type": "regex", "value": "(a"}}, "grammar: the grammar cannot be used: "),
    ({"grammar": {"type": "regex", "value": {}}}, "grammar: the value of a regex must be a string"),
    ({"grammar": {"type": "json", "value": {"type": "nothing"}}}, "grammar: the grammar cannot be used: "),
    ({"grammar": {"type": "xml", "value": ""}}, "parameters.grammar.type: "),
    ({"adapter_id": "x"}, "`adapter_id`: this server has no LoRA adapters (--lora_modules)"),
    ({"max_new_tokens": True}, "parameters.max_new_tokens: "),
    ({"temperature": "hot"}, "parameters.temperature: "),
    ({"stop": "END"}, "parameters.stop: "),
    ({"seed": 2**70}, "parameters.seed: "),
    ({"do_sample": 1}, "parameters.do_sample: "),
]


def test_bad_parameters_are_refused_with_tgis_messages(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        for parameters, text in BAD:
            for path in ("/generate", "/"):
                assert_invalid(await served.post(path, tgi(parameters)), text)
        for inputs in ("", None, 5):
            response = await served.post("/generate", tgi(inputs=inputs))
            assert (response.status, response.json["error_type"]) == (422, "validation")
        assert_invalid(await served.post("/generate", tgi(inputs="")), "`inputs` cannot be empty")
        long = tgi(inputs="word " * 1100)
        assert_invalid(await served.post("/generate", long), "`inputs` must have less than 1024 tokens. Given: 1101")
        assert served.fake.received == []

    serve(scenario, tmp_path, spell("ok"))


def assert_invalid(response: Answer, text: str) -> None:
    assert response.status == 422, (text, response.body[:300])
    assert response.json["error_type"] == "validation"
    assert response.json["error"].startswith(f"Input validation error: {text}"), response.json
    assert set(response.json) == {"error", "error_type"}


def test_what_a_stream_does_not_support_is_refused(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        best = await served.post("/generate_stream", tgi({"best_of": 2, "do_sample": True}))
        assert_invalid(best, "`best_of` != 1 is not supported when streaming tokens")
        details = await served.post("/", tgi({"decoder_input_details": True}, stream=True))
        assert_invalid(details, "`decoder_input_details` == true is not supported when streaming tokens")

    serve(scenario, tmp_path, spell("ok"))


@pytest.mark.parametrize(
    ("failed", "status", "kind"),
    [
        (ReqFailed(0, 429, "the queue is full"), 429, "overloaded"),
        (ReqFailed(0, 400, "bad"), 422, "validation"),
        (ReqFailed(0, 599, "a secret path /root/x"), 424, "generation"),
        (ReqFailed(0, 503, "the engine died"), 503, "generation"),
    ],
)
def test_errors_have_tgis_status_and_type_before_a_stream_and_its_format_in_it(
    tmp_path: Path, failed: ReqFailed, status: int, kind: str
) -> None:
    first = StrOut(0, "a", Token(64, logprob=-0.5))

    async def scenario(served: Served) -> None:
        for path in ("/generate", "/generate_stream"):
            response = await served.post(path, tgi())
            assert (response.status, response.json["error_type"]) == (status, kind)
            assert ("retry-after" in response.headers) is (status in (429, 503))
            assert b"/root" not in response.body
        late = await served.post("/generate_stream", tgi())
        assert late.status == 200
        assert late.events[0]["token"]["text"] == "a"
        assert late.events[1]["error_type"] == kind
        assert len(late.events) == 2

    serve(scenario, tmp_path, scripted([failed], [failed], [first, failed]))


def test_an_aborted_request_is_an_incomplete_generation(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        served.fake.hold.clear()
        async with served.session.post(f"{served.url}/generate_stream", json=tgi()) as response:
            await until(lambda: served.context.manager.running_requests == 1)
            served.context.manager._abort_own_requests(None)
            events = [orjson.loads(line[5:]) for line in (await response.read()).split(b"\n\n")[:-1]]
        assert events[-1]["error_type"] == "incomplete_generation"

    serve(scenario, tmp_path, spell("ok"))


def test_a_draining_server_responds_with_503(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        served.context.manager.drain()

        response = await served.post("/generate", tgi())

        assert response.status == 503
        assert response.json["error"] == "the server is shutting down"

    serve(scenario, tmp_path, spell("ok"))


def test_decoder_input_details_has_the_tokens_of_the_prompt(tmp_path: Path) -> None:
    logprobs, ranks = np.array([-1, -2, -3], dtype=np.float32), np.ones(3, dtype=np.int32)
    prompt = PromptLogprobs(logprobs.tobytes(), ranks.tobytes(), b"", b"")
    rows = [StrOut(0, "Hi", Token(64, logprob=-0.5, prompt_logprobs=prompt), finish_reason=FinishReason.LENGTH)]

    async def scenario(served: Served) -> None:
        response = await served.post("/generate", tgi({"details": False, "decoder_input_details": True}))

        assert response.json["details"]["prefill"] == [
            {"id": token_id, "text": smol().decode([token_id]), "logprob": logprob}
            for token_id, logprob in zip(smol().encode("What is AI?"), (None, -1, -2, -3), strict=True)
        ]
        assert len(response.json["details"]["tokens"]) == 1
        assert served.fake.received[0].params.sampling.prompt_logprobs == 0

    serve(scenario, tmp_path, scripted([*rows]))
