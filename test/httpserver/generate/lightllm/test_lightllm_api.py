"""LightLLM's own schema on /generate, /generate_stream and /, over a socket."""

from __future__ import annotations

import asyncio
import random
import socket
from pathlib import Path
from typing import Any

import orjson
import pytest
import requests

from lightserve.config import HttpConfig
from lightserve.httpserver.engine_client import PromptRequest
from lightserve.httpserver.generate.lightllm.request import LightllmRequest
from lightserve.httpserver.generate.lightllm.response import LightllmEventWriter, lightllm_json
from lightserve.messages.output import StrOut
from lightserve.messages.params import FinishReason, GenerationParams
from lightserve.messages.request import GenerateReq
from lightserve.messages.step import ReqFailed, Token
from test.httpserver.fake_engine import Script, spell
from test.httpserver.generate_server import Served, serve
from test.real_model import smollm2_tokenizer as smol
from test.waiting import DEADLINE_S, until

TEXT = 'naïve 日本 👩‍👩‍👧 "q" \\ \n\x00.'


def rows_of(text: str, rng: random.Random, req_id: int = 0, end: int | str | None = None) -> list[StrOut]:
    """``text`` cut anywhere, with rows that bring none, as a detokenizer that holds text back would."""
    cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randrange(1, 12)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    rows = [StrOut(req_id, piece, Token(rng.randrange(49152), logprob=-rng.random())) for piece in pieces[:-1]]
    last = StrOut(req_id, pieces[-1], Token(2, logprob=-0.25), finish_reason=FinishReason.STOP, stop_reason=end)
    return [*rows, last]


def scripted(*answers: list[StrOut | ReqFailed]) -> Script:
    """The i-th request gets the i-th output."""
    left = list(answers)

    def script(req: GenerateReq) -> list[StrOut | ReqFailed]:
        return [type(out)(req.req_id, *_rest(out)) for out in left.pop(0)]

    return script


def _rest(out: StrOut | ReqFailed) -> list[Any]:
    return [getattr(out, name) for name in type(out).__struct_fields__[1:]]


def test_a_response_has_lightllms_fields_and_greedy_defaults(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        response = await served.post("/generate", {"inputs": "What is AI?", "parameters": {"ignore_eos": True}})

        assert response.status == 200
        assert response.json == {
            "generated_text": ["hello"],
            "count_output_tokens": 5,
            "finish_reason": "length",
            "prompt_tokens": 4,
        }
        (received,) = served.fake.received
        assert received.prompt_ids == smol().encode("What is AI?")
        assert received.params == GenerationParams.of(max_new_tokens=16, temperature=0.0, ignore_eos=True)

    serve(scenario, tmp_path, spell("hello", FinishReason.LENGTH))


def test_parameters_may_be_left_out(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        for body in ({"inputs": "x"}, {"inputs": "x", "parameters": None}, {"inputs": "x", "parameters": {"n": None}}):
            assert (await served.post("/generate", body)).json["generated_text"] == ["hi"]

    serve(scenario, tmp_path, spell("hi"))


def test_an_event_of_the_stream_has_these_exact_bytes(tmp_path: Path) -> None:
    rows = [
        StrOut(0, " What", Token(3555, logprob=-1.83)),
        StrOut(0, "é/\n", Token(17, logprob=None)),
        StrOut(0, "", Token(2, logprob=float("-inf")), finish_reason=FinishReason.STOP),
    ]

    async def scenario(served: Served) -> None:
        response = await served.post("/generate_stream", {"inputs": "What is AI?", "parameters": {"ignore_eos": True}})

        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.body.decode() == (
            'data:{"token":{"id":3555,"text":" What","logprob":-1.83,"special":false,"count_output_tokens":1,'
            '"prompt_tokens":4},"generated_text":null,"finished":false,"finish_reason":null,"details":null}\n\n'
            'data:{"token":{"id":17,"text":"é/\\n","logprob":null,"special":false,"count_output_tokens":2,'
            '"prompt_tokens":4},"generated_text":null,"finished":false,"finish_reason":null,"details":null}\n\n'
            'data:{"token":{"id":2,"text":"","logprob":-9999.0,"special":true,"count_output_tokens":3,'
            '"prompt_tokens":4},"generated_text":null,"finished":true,"finish_reason":"stop","details":null}\n\n'
        )
        assert served.fake.received[0].params.sampling.logprobs == 0

    serve(scenario, tmp_path, scripted([*rows]))


def test_lightllms_benchmark_client_counts_one_line_a_token(tmp_path: Path) -> None:
    def drive(url: str) -> int:
        data = {"inputs": "x" * 50, "parameters": {"do_sample": False, "ignore_eos": True, "max_new_tokens": 9}}
        headers = {"Content-Type": "application/json"}
        response = requests.post(
            f"{url}/generate_stream", headers=headers, data=orjson.dumps(data), stream=True, timeout=DEADLINE_S
        )
        assert response.status_code == 200
        return sum(1 for line in response.iter_lines() if line)

    async def scenario(served: Served) -> None:
        assert await asyncio.to_thread(drive, served.url) == 9

    serve(scenario, tmp_path, spell("123456789", FinishReason.LENGTH))


def test_lightllms_accuracy_client_reads_the_first_text(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        data = {"inputs": "问 1+1", "parameters": {"do_sample": False, "ignore_eos": True, "max_new_tokens": 1}}
        async with served.session.post(
            f"{served.url}/generate", headers={"User-Agent": "Benchmark Client"}, json=data
        ) as response:
            chunks = [chunk async for chunk, _ in response.content.iter_chunks()]

        output = orjson.loads(b"".join(chunks))
        assert output["generated_text"][0] == "答"
        assert "error" not in output

    serve(scenario, tmp_path, spell("答", FinishReason.LENGTH))


@pytest.mark.parametrize("seed", range(20))
def test_the_events_of_a_stream_fold_to_the_whole_response(seed: int) -> None:
    rows = rows_of(TEXT * 2, random.Random(seed))
    prompt_request = LightllmRequest(
        PromptRequest([1, 2, 3], GenerationParams.of()), n=1, best_of=1, return_details=True
    )
    lines = LightllmEventWriter(prompt_tokens=3, special=smol().special_ids)

    events = [orjson.loads(lines.line(row).removeprefix(b"data:")) for row in rows]
    whole = lightllm_json(prompt_request, [rows], smol().special_ids)

    assert ["".join(event["token"]["text"] for event in events)] == whole["generated_text"] == [TEXT * 2]
    assert events[-1]["token"]["count_output_tokens"] == whole["count_output_tokens"]
    assert [event["finished"] for event in events] == [False] * (len(rows) - 1) + [True]
    assert events[-1]["finish_reason"] == whole["finish_reason"]
    for event, token in zip(events, whole["tokens"], strict=True):
        assert event["token"].items() <= token.items()


def test_stream_and_response_agree_over_the_socket(tmp_path: Path) -> None:
    rows = rows_of(TEXT, random.Random(7))

    async def scenario(served: Served) -> None:
        body = {"inputs": "x", "parameters": {"add_special_tokens": False}}
        whole = await served.post("/", body | {"stream": False})
        stream = await served.post("/", body | {"stream": True})

        assert "".join(event["token"]["text"] for event in stream.events) == TEXT
        assert whole.json["generated_text"] == [TEXT]
        assert whole.json["count_output_tokens"] == len(stream.events) == len(rows)

    serve(scenario, tmp_path, scripted([*rows], [*rows]))


def test_every_parameter_reaches_the_engine(tmp_path: Path) -> None:
    parameters = {
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "ignore_eos": True,
        "max_new_tokens": 20,
        "min_new_tokens": 2,
        "stop_sequences": ["END", [7], smol().encode("two words")],
        "print_eos_token": True,
        "skip_special_tokens": False,
        "allowed_token_ids": [1, 2, 3],
        "invalid_token_ids": [4, 5],
        "logit_bias": {"9": -3.5},
        "seed": 42,
        "return_details": True,
        "an_unknown_one": {"is": "let through"},
        "guided_json": "",
        "no_repeat_ngram_size": 3,
        "exponential_decay_length_penalty": [5, 1.2],
        "first_allowed_token_ids": [2, 3, 2],
        "input_penalty": None,
    }

    async def scenario(served: Served) -> None:
        response = await served.post("/generate", {"inputs": [1, 2, 3], "parameters": parameters})

        assert response.status == 200, response.body
        (received,) = served.fake.received
        assert received.prompt_ids == [1, 2, 3]
        assert received.params == GenerationParams.of(
            max_new_tokens=20,
            min_new_tokens=2,
            temperature=0.7,
            top_p=0.9,
            top_k=40,
            min_p=0.05,
            repetition_penalty=1.1,
            presence_penalty=0.5,
            frequency_penalty=0.25,
            logit_bias={9: -3.5},
            bad_words_ids=((4,), (5,)),
            no_repeat_ngram_size=3,
            allowed_token_ids=(1, 2, 3),
            first_allowed_token_ids=(2, 3),
            exponential_decay_length_penalty=(5, 1.2),
            seed=42,
            ignore_eos=True,
            stop=("END", "two words"),
            stop_token_ids=(7,),
            include_stop=True,
            skip_special_tokens=False,
            logprobs=0,
        )

    serve(scenario, tmp_path, spell("ok"))


def test_a_length_penalty_of_factor_one_has_no_effect(tmp_path: Path) -> None:
    """LightLLM's own clients send it."""

    async def scenario(served: Served) -> None:
        await served.post("/generate", {"inputs": "x", "parameters": {"exponential_decay_length_penalty": [1, 1.0]}})

        (received,) = served.fake.received
        assert received.params.sampling.exponential_decay_length_penalty is None

    serve(scenario, tmp_path, spell("ok"))


@pytest.mark.parametrize("more", [{"ignore_eos": True}, {"ignore_eos_token": True}], ids=["LightLLM", "TGI"])
def test_drafts_can_be_switched_off(tmp_path: Path, more: dict[str, Any]) -> None:
    async def scenario(served: Served) -> None:
        for speculative in (None, True, False):
            parameters = {"speculative": speculative, "max_new_tokens": 2, **more}
            assert (await served.post("/generate", {"inputs": "a", "parameters": parameters})).status == 200

        assert [req.params.sampling.speculative for req in served.fake.received] == [True, True, False]

    serve(scenario, tmp_path, spell("ok"))


def test_do_sample_false_is_greedy_whatever_the_temperature(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        parameters = {"do_sample": False, "temperature": 0.7, "ignore_eos": False}
        await served.post("/generate", {"inputs": "x", "parameters": parameters})
        await served.post("/generate", {"inputs": "x", "parameters": {"do_sample": True, "ignore_eos": False}})

        assert [req.params.sampling.is_greedy for req in served.fake.received] == [True, False]

    serve(scenario, tmp_path, spell("ok"))


def test_the_seed_minus_one_is_a_random_one(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        await served.post("/generate", {"inputs": "x", "parameters": {"seed": -1, "ignore_eos": False}})

        assert served.fake.received[0].params.sampling.seed is None

    serve(scenario, tmp_path, spell("ok"))


def test_details_list_every_token(tmp_path: Path) -> None:
    rows = [
        StrOut(0, "a", Token(64, logprob=-1.0)),
        StrOut(0, "b", Token(2, logprob=-3.0), finish_reason=FinishReason.STOP),
    ]

    async def scenario(served: Served) -> None:
        response = await served.post("/generate", {"inputs": [5], "parameters": {"return_details": True}})

        common = {"prompt_tokens": 1, "mtp_accepted_token_num": 0}
        first = {"id": 64, "text": "a", "logprob": -1.0, "cumlogprob": -1.0, "special": False, "count_output_tokens": 1}
        second = {"id": 2, "text": "b", "logprob": -3.0, "cumlogprob": -2.0, "special": True, "count_output_tokens": 2}
        assert response.json["tokens"] == [first | common, second | common]

    serve(scenario, tmp_path, scripted([*rows]))


def test_several_choices_come_as_lists(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        parameters = {"n": 2, "best_of": 2, "do_sample": True, "seed": 3, "return_details": True}
        response = await served.post("/generate", {"inputs": "x", "parameters": parameters})

        assert response.json["generated_text"] == ["ab", "ab"]
        assert response.json["count_output_tokens"] == [2, 2]
        assert response.json["finish_reason"] == ["stop", "stop"]
        assert response.json["prompt_tokens"] == 1
        assert [len(tokens) for tokens in response.json["tokens"]] == [2, 2]
        assert [req.params.sampling.seed for req in served.fake.received] == [3, 4]

    serve(scenario, tmp_path, spell("ab"))


def test_best_of_more_than_n_returns_the_most_likely(tmp_path: Path) -> None:
    answers: list[list[StrOut | ReqFailed]] = [
        [StrOut(0, text, Token(1, logprob=p), finish_reason=FinishReason.STOP)]
        for text, p in (("a", -2.0), ("b", -1.0))
    ]

    async def scenario(served: Served) -> None:
        parameters = {"n": 1, "best_of": 2, "do_sample": True}
        response = await served.post("/generate", {"inputs": "x", "parameters": parameters})

        assert response.json["generated_text"] == ["b"]
        assert response.json["count_output_tokens"] == 1
        assert served.fake.received[0].params.sampling.logprobs == 0

    serve(scenario, tmp_path, scripted(*answers))


def test_the_default_length_is_limited_by_the_context_but_an_explicit_one_is_refused(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        ids = [5] * 1020
        whole = await served.post("/generate", {"inputs": ids})
        wish = await served.post("/generate", {"inputs": ids, "parameters": {"max_new_tokens": 5}})
        full = await served.post("/generate", {"inputs": [5] * 1023})
        over = await served.post("/generate", {"inputs": [5] * 1024})

        assert (whole.status, full.status) == (200, 200)
        assert [req.params.stopping.max_new_tokens for req in served.fake.received] == [4, 1]
        assert (wish.status, over.status) == (400, 400)
        assert wish.json["error"]["message"].endswith("prompt 1020 + max_new_tokens 5 > 1024; use max_new_tokens <= 4")
        assert wish.json["error"]["code"] == over.json["error"]["code"] == "context_length_exceeded"

    serve(scenario, tmp_path, spell("ok"))


BAD: list[tuple[str, Any]] = [
    ("no inputs", {"parameters": {"ignore_eos": True}}),
    ("inputs null", {"inputs": None}),
    ("inputs empty", {"inputs": ""}),
    ("inputs no ids", {"inputs": []}),
    ("inputs number", {"inputs": 5}),
    ("inputs mixed", {"inputs": [1, "a"]}),
    ("inputs bools", {"inputs": [True, False]}),
    ("inputs nested", {"inputs": [[1, 2]]}),
    ("id negative", {"inputs": [-1]}),
    ("id beyond vocabulary", {"inputs": [49152]}),
    ("id huge", {"inputs": [10**30]}),
    ("parameters list", {"inputs": "x", "parameters": []}),
    ("parameters string", {"inputs": "x", "parameters": "hot"}),
    ("max_new_tokens 0", {"max_new_tokens": 0}),
    ("max_new_tokens -1", {"max_new_tokens": -1}),
    ("max_new_tokens huge", {"max_new_tokens": 10**12}),
    ("max_new_tokens bool", {"max_new_tokens": True}),
    ("max_new_tokens string", {"max_new_tokens": "5"}),
    ("max_new_tokens float", {"max_new_tokens": 1.5}),
    ("min over max", {"max_new_tokens": 3, "min_new_tokens": 4}),
    ("min negative", {"min_new_tokens": -1}),
    ("temperature -1", {"temperature": -1}),
    ("temperature -1 sampled", {"temperature": -1, "do_sample": True}),
    ("temperature string", {"temperature": "hot"}),
    ("temperature bool", {"temperature": True}),
    ("top_p 0", {"top_p": 0}),
    ("top_p 1.1", {"top_p": 1.1}),
    ("top_k -2", {"top_k": -2}),
    ("min_p 2", {"min_p": 2}),
    ("repetition_penalty 0", {"repetition_penalty": 0}),
    ("presence_penalty 2.1", {"presence_penalty": 2.1}),
    ("frequency_penalty -2.1", {"frequency_penalty": -2.1}),
    ("n 0", {"n": 0}),
    ("n over best_of", {"n": 3, "best_of": 2}),
    ("best_of huge", {"best_of": 10**9}),
    ("best_of -1", {"best_of": -1}),
    ("stop empty", {"stop_sequences": [""]}),
    ("stop empty string", {"stop_sequences": ""}),
    ("stop no ids", {"stop_sequences": [[]]}),
    ("stop number", {"stop_sequences": 5}),
    ("stop too many", {"stop_sequences": ["a"] * 11}),
    ("stop 100k", {"stop_sequences": ["a"] * 100_000}),
    ("stop long", {"stop_sequences": ["a" * 1_000_000]}),
    ("stop id out of range", {"stop_sequences": [[49152]]}),
    ("stop ids out of range", {"stop_sequences": [[5, -5]]}),
    ("stop many ids", {"stop_sequences": [[5] * 257]}),
    ("stop half a character", {"stop_sequences": [smol().encode("日")[:1] * 2]}),
    ("allowed none", {"allowed_token_ids": []}),
    ("allowed out of range", {"allowed_token_ids": [49152]}),
    ("allowed too many", {"allowed_token_ids": [1] * 20_000}),
    ("invalid out of range", {"invalid_token_ids": [-1]}),
    ("invalid too many", {"invalid_token_ids": [1] * 2000}),
    ("bias word", {"logit_bias": {"hello": 1.0}}),
    ("bias out of range", {"logit_bias": {"49152": 1.0}}),
    ("bias huge", {"logit_bias": {"1": 101}}),
    ("bias list", {"logit_bias": [1]}),
    ("bias too many", {"logit_bias": {str(i): 0.5 for i in range(2000)}}),
    ("seed too large", {"seed": 2**63, "ignore_eos": False}),
    ("seed string", {"seed": "1", "ignore_eos": False}),
    ("ignore_eos number", {"ignore_eos": 1}),
    ("regex", {"regular_constraint": "(a"}),
    ("guided_json", {"guided_json": {"type": "nothing"}}),
    ("guided_json text", {"guided_json": "{"}),
    ("guided_grammar", {"guided_grammar": "root ::= ("}),
    ("two grammars", {"guided_json": {}, "regular_constraint": "a"}),
    ("length penalty factor", {"exponential_decay_length_penalty": [5, 0.9]}),
    ("length penalty start", {"exponential_decay_length_penalty": [-1, 1.2]}),
    ("length penalty alone", {"exponential_decay_length_penalty": [5]}),
    ("ngram size", {"no_repeat_ngram_size": -1}),
    ("first none", {"first_allowed_token_ids": []}),
    ("first out of range", {"first_allowed_token_ids": [49152]}),
    ("input_penalty", {"input_penalty": True}),
    ("image patches", {"image_max_patch_num": 4}),
    ("prompt_logprobs", {"prompt_logprobs": 3}),
    ("images", {"inputs": "x", "multimodal_params": {"images": [{"type": "url", "data": "http://x"}]}}),
    ("multimodal list", {"inputs": "x", "multimodal_params": [1]}),
    ("not an object", b"[1, 2]"),
    ("null", b"null"),
    ("empty", b""),
    ("truncated", b'{"inputs": "x"'),
    ("NaN", b'{"inputs": "x", "parameters": {"temperature": NaN}}'),
    ("infinite", b'{"inputs": "x", "parameters": {"temperature": 1e400}}'),
    ("not UTF-8", b'{"inputs": "\xff"}'),
    ("half a surrogate pair", b'{"inputs": "\\ud800"}'),
    ("deep", b"[" * 100_000),
]


def test_bad_input_is_refused_with_400_and_nothing_reaches_the_engine(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        for name, bad in BAD:
            is_whole = isinstance(bad, bytes) or {"inputs", "parameters"} & set(bad)
            body = bad if is_whole else {"inputs": "x", "parameters": {"ignore_eos": False} | bad}
            for path in ("/generate", "/generate_stream", *(() if is_whole else ("/",))):  # at / it may be TGI's
                response = await served.post(path, body)
                assert response.status == 400, (name, path, response.status, response.body[:300])
                assert set(response.json["error"]) == {"message", "type", "param", "code"}, name
        assert (await served.post("/", {"inputs": [1], "stream": "yes"})).status == 400
        assert served.fake.received == []
        assert (await served.post("/generate", {"inputs": "x"})).status == 200

    serve(scenario, tmp_path, spell("ok"))


def test_several_choices_in_a_stream_are_refused(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        body = {"inputs": "x", "parameters": {"n": 2, "do_sample": True}}

        assert (await served.post("/generate_stream", body)).status == 400
        assert (await served.post("/", body | {"stream": True})).status == 400
        assert (await served.post("/", body)).status == 200

    serve(scenario, tmp_path, spell("ok"))


@pytest.mark.parametrize(("status", "expected"), [(429, 429), (400, 400), (500, 500), (503, 503)])
def test_an_error_before_the_first_token_is_a_status_even_for_a_stream(
    tmp_path: Path, status: int, expected: int
) -> None:
    async def scenario(served: Served) -> None:
        for path in ("/generate", "/generate_stream"):
            response = await served.post(path, {"inputs": "x"})
            assert response.status == expected
            assert isinstance(response.json["error"]["message"], str)

    serve(scenario, tmp_path, lambda req: [ReqFailed(req.req_id, status, "no")])


def test_an_error_in_the_middle_of_a_stream_is_its_last_event(tmp_path: Path) -> None:
    rows: list[StrOut | ReqFailed] = [StrOut(0, "a", Token(64)), ReqFailed(0, 599, "a secret path /root/x")]

    async def scenario(served: Served) -> None:
        response = await served.post("/generate_stream", {"inputs": "x"})

        first, last = response.events
        assert first["token"]["text"] == "a"
        assert last["error"]["type"] == "server_error"
        assert b"/root" not in response.body

    serve(scenario, tmp_path, scripted(rows))


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
@pytest.mark.parametrize("parameters", [{"ignore_eos": True}, {"details": True}])
def test_a_client_that_disconnects_aborts_its_request(tmp_path: Path, path: str, parameters: dict[str, Any]) -> None:
    async def scenario(served: Served) -> None:
        served.fake.hold.clear()
        port = int(served.url.rpartition(":")[2])
        body = orjson.dumps({"inputs": "x", "parameters": parameters})
        lines = (f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json")
        head = "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""])
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(head.encode() + body)
            await until(lambda: len(served.fake.received) == 1)

        await until(lambda: served.fake.aborted == [served.fake.received[0].req_id])
        assert served.context.manager.running_requests == 0

    serve(scenario, tmp_path, spell("hello"))


def test_use_tgi_api_reads_an_ambiguous_body_as_tgis(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        assert (await served.post("/generate", {"inputs": "x"})).json == {"generated_text": "hi"}
        marked = await served.post("/generate", {"inputs": "x", "parameters": {"ignore_eos": True}})
        assert marked.json["generated_text"] == ["hi"]

    serve(scenario, tmp_path, spell("hi"), HttpConfig(use_tgi_api=True))
