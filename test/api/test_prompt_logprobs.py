"""Prompt logprobs over HTTP, with chunked prefill, compared with transformers."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from functools import cache, partial
from typing import Any

import pytest
import torch

from test.api.server import ServerProcess, running_server
from test.real_model import PROMPTS, smollm2_tokenizer, transformers_smollm2

pytestmark = pytest.mark.slow

TOLERANCE = 2e-4  # float32 in transformers is up to 1.4e-4 off
K = 5
N_NEW = 3
BATCH = [PROMPTS[i] for i in (0, 4, 8, 9, 16, 17)]  # the last is longer than a step


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("server") / "log"
    with running_server(log, "--max_total_token_num", "4096", "--batch_max_tokens", "100") as server:
        yield server


@cache
def exact_model() -> Any:
    return deepcopy(transformers_smollm2()).double()


def true_logprobs(ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = exact_model()(torch.tensor([ids])).logits
    return logits[0].log_softmax(-1)


def complete(server: ServerProcess, **fields: Any) -> dict[str, Any]:
    status, response = server.post("/v1/completions", {"temperature": 0, **fields})
    assert status == 200, response
    return dict(response)


def test_echoed_logprobs_of_prompt_and_output_equal_transformers_in_a_batch(server: ServerProcess) -> None:
    asks = [partial(complete, server, prompt=BATCH, echo=True, logprobs=K, max_tokens=N_NEW) for _ in range(2)]
    asks += [partial(complete, server, prompt=prompt, max_tokens=40) for prompt in PROMPTS[:4]]

    with ThreadPoolExecutor(len(asks)) as pool:
        responses = [future.result() for future in [pool.submit(ask) for ask in asks]]

    for response in responses[:2]:
        for choice, prompt in zip(response["choices"], BATCH, strict=True):
            assert_true(choice, prompt)


def assert_true(choice: dict[str, Any], prompt: str) -> None:
    """The logprobs of an echo equal those of transformers."""
    logprobs, ids = choice["logprobs"], smollm2_tokenizer().encode(choice["text"])
    assert choice["text"].startswith(prompt)
    assert len(logprobs["tokens"]) == len(smollm2_tokenizer().encode(prompt)) + N_NEW == len(ids)
    for i, row in enumerate(true_logprobs(ids)[:-1], start=1):
        top = sorted(logprobs["top_logprobs"][i].values(), reverse=True)[:K]
        assert logprobs["token_logprobs"][i] == pytest.approx(row[ids[i]].item(), abs=TOLERANCE)
        assert top == pytest.approx(row.topk(K).values.tolist(), abs=TOLERANCE)


def test_scoring_ids_twice_gives_the_same_and_no_output(server: ServerProcess) -> None:
    ids = [smollm2_tokenizer().encode(prompt) for prompt in BATCH]
    ask = partial(complete, server, prompt=ids, echo=True, logprobs=1, max_tokens=0)

    first, again = ask(), ask()

    assert first["usage"]["completion_tokens"] == 0
    for choice, other, one in zip(first["choices"], again["choices"], ids, strict=True):
        assert choice["finish_reason"] == "length"
        logprobs = choice["logprobs"]["token_logprobs"]
        expected = true_logprobs(one)[range(len(one) - 1), one[1:]].tolist()
        assert logprobs == [None, *(pytest.approx(value, abs=TOLERANCE) for value in expected)]
        assert other["logprobs"]["token_logprobs"] == [
            None,
            *(pytest.approx(value, abs=TOLERANCE) for value in logprobs[1:]),
        ]


def test_prompt_logprobs_of_a_chat_contain_the_top_tokens(server: ServerProcess) -> None:
    messages = [{"role": "user", "content": PROMPTS[1]}]
    body = {"messages": messages, "max_tokens": 1, "prompt_logprobs": K}

    status, response = server.post("/v1/chat/completions", body)

    assert status == 200, response
    first, *entries = response["prompt_logprobs"]
    assert first is None
    tokenizer = smollm2_tokenizer()
    ids = tokenizer.encode(tokenizer.apply_chat_template(messages), add_special_tokens=False)
    assert len(entries) == len(ids) - 1
    for entry, token_id, row in zip(entries, ids[1:], true_logprobs(ids), strict=False):
        ranks = {logprobs["rank"]: logprobs["logprob"] for logprobs in entry.values()}
        assert entry[str(token_id)]["logprob"] == pytest.approx(row[token_id].item(), abs=TOLERANCE)
        assert [ranks[i] for i in range(1, K + 1)] == pytest.approx(row.topk(K).values.tolist(), abs=TOLERANCE)


def test_tgi_returns_the_prefill(server: ServerProcess) -> None:
    body = {"inputs": PROMPTS[0], "parameters": {"decoder_input_details": True, "max_new_tokens": 2}}

    status, response = server.post("/generate", body)

    assert status == 200, response
    prefill = response["details"]["prefill"]
    ids = smollm2_tokenizer().encode(PROMPTS[0])
    assert [token["id"] for token in prefill] == ids
    assert "".join(token["text"] for token in prefill) == PROMPTS[0]
    expected = true_logprobs(ids)[range(len(ids) - 1), ids[1:]].tolist()
    assert [token["logprob"] for token in prefill] == [
        None,
        *(pytest.approx(value, abs=TOLERANCE) for value in expected),
    ]
