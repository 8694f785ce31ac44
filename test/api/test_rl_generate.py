"""Tokens in, tokens out, over a real server with a tiny model: SGLang's /generate and vLLM's /inference/v1/generate."""

from __future__ import annotations

import base64
import io
import json
import math
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmark.models import TINY, save_model
from test.api.server import ServerProcess, running_server
from test.waiting import wait_until

pytestmark = pytest.mark.slow

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
LONG = 1500
TEMPERATURE = 1.7


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model(folder, None, TINY)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).float()
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) * 0.05
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    flags = ("--max_total_token_num", "8192", "--max_req_total_len", "2048", "--data_type", "float32")
    log = tmp_path_factory.mktemp("server") / "log"
    with running_server(log, "--model_dir", str(model), *flags, "--enable_rl") as server:
        yield server


def logprobs_of(model: Path, ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    """[tokens, vocab] of what follows each token, by transformers."""
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.inference_mode():
        logits: torch.Tensor = reference(torch.tensor([ids])).logits[0]
        return (logits / temperature).log_softmax(-1)


def sglang(server: ServerProcess, sampling: dict[str, Any], **fields: Any) -> Any:
    body = {"input_ids": PROMPT, "sampling_params": sampling, **fields}
    status, response = server.post("/generate", body)
    assert status == 200, response
    return response


def vllm(server: ServerProcess, sampling: dict[str, Any], **fields: Any) -> Any:
    status, response = server.post(
        "/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": sampling, **fields}
    )
    assert status == 200, response
    return response


def test_sglangs_logprobs_are_those_after_temperature_as_transformers_computes_them(
    server: ServerProcess, model: Path
) -> None:
    sampling = {"max_new_tokens": 12, "temperature": TEMPERATURE, "top_p": 1, "top_k": -1, "sampling_seed": 7}

    response = sglang(server, sampling | {"ignore_eos": True}, return_logprob=True, top_logprobs_num=2)

    ids, meta = response["output_ids"], response["meta_info"]
    expected = logprobs_of(model, PROMPT + ids, TEMPERATURE)[len(PROMPT) - 1 : -1]
    assert len(ids) == meta["completion_tokens"] == 12
    assert meta["finish_reason"] == {"type": "length", "length": 12}
    assert [entry[1:] for entry in meta["output_token_logprobs"]] == [[token, None] for token in ids]
    assert [entry[0] for entry in meta["output_token_logprobs"]] == pytest.approx(
        [float(row[token]) for row, token in zip(expected, ids, strict=True)], abs=1e-3
    )
    top = [[entry[0] for entry in entries] for entries in meta["output_top_logprobs"]]
    assert torch.allclose(torch.tensor(top), expected.topk(2).values, atol=1e-3)


def test_sglangs_prompt_is_scored_without_output(server: ServerProcess, model: Path) -> None:
    response = sglang(server, {"max_new_tokens": 0, "temperature": 0}, return_logprob=True, logprob_start_len=0)

    expected = logprobs_of(model, PROMPT)
    first, *others = response["meta_info"]["input_token_logprobs"]
    assert response["output_ids"] == []
    assert first == [None, PROMPT[0], None]
    assert [entry[0] for entry in others] == pytest.approx(
        [float(row[token]) for row, token in zip(expected, PROMPT[1:], strict=False)], abs=1e-3
    )


def test_vllms_endpoint_gives_raw_logprobs_and_those_of_the_prompt(server: ServerProcess, model: Path) -> None:
    vocab = AutoModelForCausalLM.from_pretrained(model).config.vocab_size
    sampling = {"max_tokens": 5, "temperature": TEMPERATURE, "seed": 3, "logprobs": -1, "prompt_logprobs": 30}

    response = vllm(server, sampling | {"ignore_eos": True}, return_token_ids=True)

    [choice] = response["choices"]
    ids, content = choice["token_ids"], choice["logprobs"]["content"]
    expected = logprobs_of(model, PROMPT + ids)
    assert response["prompt_token_ids"] == PROMPT
    assert choice["finish_reason"] == "length"
    assert [entry["token_id"] for entry in content] == ids
    assert all(len(entry["top_logprobs"]) == vocab for entry in content)
    assert [entry["logprob"] for entry in content] == pytest.approx(
        [float(row[token]) for row, token in zip(expected[len(PROMPT) - 1 :], ids, strict=False)], abs=1e-3
    )
    first, *others = response["prompt_logprobs"]
    assert first is None
    assert all(len(entries) >= 30 for entries in others)
    assert [entries[str(token)]["logprob"] for entries, token in zip(others, PROMPT[1:], strict=True)] == pytest.approx(
        [float(row[token]) for row, token in zip(expected, PROMPT[1:], strict=False)], abs=1e-3
    )


def test_a_teacher_scores_the_tokens_of_a_student(server: ServerProcess, model: Path) -> None:
    prompt = [(7 * number) % 60 for number in range(700)]  # several chunks
    start, width = 400, 5
    rows = [[(row * column + 1) % 60 for column in range(1 + row % width)] for row in range(len(prompt) - 1 - start)]
    sampling = {"max_tokens": 1, "prompt_logprob_token_ids": rows, "prompt_logprob_start": start}
    with ThreadPoolExecutor(2) as clients:  # one of them wants none
        plain = clients.submit(vllm, server, {"max_tokens": 1, "prompt_logprobs": 3}, token_ids=prompt)
        response = clients.submit(vllm, server, sampling, token_ids=prompt).result()

    scores = np.load(io.BytesIO(base64.b64decode(response["prompt_token_id_logprobs"])))

    expected = logprobs_of(model, prompt)[start:-1]
    assert (scores.dtype, scores.shape) == (np.float32, (len(rows), width))
    for row, ids, reference in zip(scores, rows, expected, strict=True):
        assert row[: len(ids)].tolist() == pytest.approx(reference[ids].tolist(), abs=1e-3)
        assert np.isneginf(row[len(ids) :]).all()
    assert response["prompt_logprobs"] is None
    assert plain.result()["prompt_token_id_logprobs"] is None


@pytest.mark.parametrize(
    ("sampling", "fields", "message"),
    [
        ({"prompt_logprob_token_ids": [[1]] * 6}, {}, "needs 7 scored rows, found 6 of 1 ids"),
        ({"prompt_logprob_token_ids": [[1]] * 7, "prompt_logprob_start": 1}, {}, "needs 6 scored rows"),
        ({"prompt_logprob_token_ids": [[]] * 7}, {}, "found 7 of 0 ids"),
        ({"prompt_logprob_token_ids": [[10**6]] * 7}, {}, "token id 1000000 is not in the range"),
        ({"prompt_logprob_token_ids": [[-2]] * 7}, {}, "token id -2 is not in the range"),
        ({"prompt_logprob_token_ids": [["a"]] * 7}, {}, "prompt_logprob_token_ids"),
        ({"prompt_logprob_start": 3}, {}, "prompt_logprob_start: needs prompt_logprob_token_ids"),
        ({"prompt_logprob_token_ids": [[1]] * 7}, {"stream": True}, "streams do not return them"),
    ],
)
def test_candidates_that_do_not_fit_the_prompt_are_refused(
    server: ServerProcess, sampling: dict[str, Any], fields: dict[str, Any], message: str
) -> None:
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 1, **sampling}, **fields}

    status, response = server.post("/inference/v1/generate", body)

    assert status == 400
    assert message in response["error"]["message"]


def test_an_aborted_request_goes_on_with_the_tokens_it_had(server: ServerProcess) -> None:
    """A partial rollout, as slime does it: abort, then the prompt with the partial output."""
    sampling = {"max_new_tokens": LONG, "temperature": 1.0, "sampling_seed": 11, "ignore_eos": True}
    whole = sglang(server, sampling, return_logprob=True)
    with ThreadPoolExecutor(1) as clients:
        before = server.metrics()["generation_tokens_total"]
        running = clients.submit(sglang, server, sampling, return_logprob=True, rid="roll-1")
        wait_until(lambda: server.metrics()["generation_tokens_total"] > before or running.done())

        server.post("/abort_request", {"rid": "roll-1"})

        partial = running.result()
    meta, ids = partial["meta_info"], partial["output_ids"]
    rest = sampling | {"max_new_tokens": LONG - len(ids)}
    continued = sglang(server, rest, input_ids=PROMPT + ids, return_logprob=True)
    assert meta["finish_reason"]["type"] == "abort"
    assert meta["id"] == "roll-1"
    assert 0 < len(ids) == len(meta["output_token_logprobs"]) < LONG
    assert ids + continued["output_ids"] == whole["output_ids"]


def test_an_abort_before_the_first_token_says_so(server: ServerProcess) -> None:
    server.post("/pause", {})
    server.post("/continue_generation", {})
    server.post("/pause_generation", {})
    with ThreadPoolExecutor(1) as clients:
        waiting = clients.submit(sglang, server, {"max_new_tokens": 4}, return_logprob=True)
        wait_until(lambda: server.metrics()["num_requests_waiting"] == 1)

        assert server.post("/abort_requests", {})[1]["aborted"] == 1

        meta = waiting.result()["meta_info"]
    server.post("/continue_generation", {})
    assert meta["finish_reason"]["message"].startswith("Abort before prefill")
    assert "output_token_logprobs" not in meta


def test_a_batch_and_several_choices_are_lists(server: ServerProcess) -> None:
    several = sglang(server, {"max_new_tokens": 3, "temperature": 0, "n": 2}, input_ids=[PROMPT, PROMPT[:3]])
    one = sglang(server, {"max_new_tokens": 3, "temperature": 0})

    assert [len(response["output_ids"]) <= 3 for response in several] == [True] * 4
    assert several[0]["output_ids"] == several[1]["output_ids"] == one["output_ids"]
    assert [response["meta_info"]["prompt_tokens"] for response in several] == [8, 8, 3, 3]


@pytest.mark.parametrize("path", ["/generate", "/inference/v1/generate"])
def test_a_stream_has_the_tokens_of_the_whole_response(server: ServerProcess, path: str) -> None:
    sampling = {"max_new_tokens": 20, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    key = "input_ids" if path == "/generate" else "token_ids"
    whole = sglang(server, sampling)["output_ids"]
    body = json.dumps({key: PROMPT, "sampling_params": sampling, "stream": True}).encode()
    request = urllib.request.Request(server.url + path, body, {"Content-Type": "application/json"})

    with urllib.request.urlopen(request) as response:
        lines = [line.removeprefix(b"data: ") for line in response.read().split(b"\n\n") if line]

    events = [json.loads(line) for line in lines[:-1]]
    assert lines[-1] == b"[DONE]"
    if path == "/generate":
        assert events[-1]["output_ids"] == whole
        assert events[-1]["meta_info"]["finish_reason"]["type"] == "length"
    else:
        choices = [event["choices"][0] for event in events if event["choices"]]
        assert [token for choice in choices for token in choice["token_ids"]] == whole
        assert choices[-1]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"sampling_params": {}}, "input_ids"),
        ({"input_ids": [], "sampling_params": {}}, "must not be empty"),
        ({"input_ids": [10**7], "sampling_params": {}}, "input_ids"),
        ({"input_ids": PROMPT, "sampling_params": {"max_new_tokens": -1}}, "max_new_tokens"),
        ({"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 10**6}}, "max_new_tokens"),
        ({"input_ids": PROMPT, "sampling_params": {"stop_regex": "a"}}, "stop_regex"),
        ({"input_ids": PROMPT, "sampling_params": {}, "image_data": ["x"]}, "image_data"),
        ({"input_ids": PROMPT, "sampling_params": {}, "return_logprob": True, "top_logprobs_num": 10**6}, "vocabulary"),
    ],
)
def test_a_wrong_body_names_the_field(server: ServerProcess, body: dict[str, Any], named: str) -> None:
    status, response = server.post("/generate", body)

    assert status == 400
    assert named in response["error"]["message"]


def test_trls_batch_of_completions(server: ServerProcess) -> None:
    """The body of TRL 1.16: token ids, n, and logprobs that name tokens by their ids."""
    prompts = [[PROMPT[0], number % 100, 5] for number in range(80)]
    body = {"prompt": prompts, "n": 2, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_tokens": 2}
    body |= {"logprobs": 0, "return_token_ids": True, "return_tokens_as_token_ids": True, "repetition_penalty": 1.0}

    status, response = server.post("/v1/completions", body)

    assert status == 200, response
    assert len(response["choices"]) == 160
    for index, choice in enumerate(response["choices"]):
        assert choice["prompt_token_ids"] == prompts[index // 2]
        assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
        assert all(math.isfinite(logprob) for logprob in choice["logprobs"]["token_logprobs"])
