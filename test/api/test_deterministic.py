"""The server with its default flags on a CPU: the same bits alone, in a batch, from a warm cache and in any chunks.

With the default model, whose weights stay packed.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from test.api.server import ServerProcess, running_server
from test.ops.cases import needs_library
from test.real_model import PROMPTS, transformers_smollm2

pytestmark = [pytest.mark.slow, needs_library]

DEFAULT_FLAGS = ("--device", "cpu", "--quantization", "gguf")  # what a CPU does with the default model
ASKED = PROMPTS[-3][:250]
QUESTIONS = ["What is the capital of France?", "Hello", "What is the capital of Italy?", "Who are you?"]
ANSWER_TOKENS = 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("server") / "log"
    with running_server(log, *DEFAULT_FLAGS, "--max_total_token_num", "4096") as server:
        yield server


def logprobs(server: ServerProcess, prompt: str, **options: Any) -> Any:
    body = {"prompt": prompt, "max_tokens": 16, "temperature": 0, "logprobs": 3, "ignore_eos": True, **options}
    status, response = server.post("/v1/completions", body)
    assert status == 200, response
    return response["choices"][0]["logprobs"]


def test_results_do_not_depend_on_other_requests_or_the_cache(server: ServerProcess) -> None:
    alone = logprobs(server, ASKED)

    cached = logprobs(server, ASKED)
    with ThreadPoolExecutor(5) as clients:
        others = [clients.submit(logprobs, server, prompt) for prompt in PROMPTS[:4]]
        among_others = clients.submit(logprobs, server, ASKED, cache_salt="not in the cache").result()
        for other in others:
            other.result()

    assert len(alone["token_logprobs"]) == 16
    assert cached == alone
    assert among_others == alone


@pytest.mark.long  # test/test_deterministic.py has chunks and small pools without a server
def test_results_do_not_depend_on_chunks_or_the_size_of_the_pool(server: ServerProcess, tmp_path: Path) -> None:
    expected = [logprobs(server, prompt, cache_salt="expected") for prompt in (ASKED, *PROMPTS[:5])]
    small = ("--batch_max_tokens", "24", "--max_total_token_num", "160", "--max_req_total_len", "150")

    with running_server(tmp_path / "log", *DEFAULT_FLAGS, *small) as other, ThreadPoolExecutor(6) as clients:
        answers = list(clients.map(lambda prompt: logprobs(other, prompt), (ASKED, *PROMPTS[:5])))

    assert answers == expected


def test_greedy_answers_are_those_of_transformers(server: ServerProcess) -> None:
    import torch

    model = transformers_smollm2()
    for question in QUESTIONS:
        body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": ANSWER_TOKENS}
        status, response = server.post("/v1/chat/completions", body | {"return_token_ids": True})
        assert status == 200, response

        prompt = torch.tensor([response["prompt_token_ids"]])
        whole = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=ANSWER_TOKENS, do_sample=False
        )
        assert response["choices"][0]["token_ids"] == whole[0, prompt.shape[1] :].tolist(), question


def test_the_default_models_sampling_defaults_are_served(server: ServerProcess) -> None:
    with urllib.request.urlopen(f"{server.url}/get_server_info") as response:
        info = json.load(response)

    assert info["sampling_defaults"] == {"temperature": 0.2, "top_p": 0.9}
