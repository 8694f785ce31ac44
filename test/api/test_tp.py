"""Tensor parallelism through the server gives the same text as one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lightserve.offline.llm import LLM
from test.api.server import ServerProcess, running_server

pytestmark = [pytest.mark.slow, pytest.mark.tp]

QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
SAMPLING: list[dict[str, Any]] = [{"temperature": 0}, *({"temperature": 0.9, "seed": seed} for seed in range(3))]
NEW_TOKENS = 30


@pytest.fixture
def model_dir(tmp_path: Path) -> str:
    """The heads of SmolLM2-135M, of which each of three ranks has three, and a vocabulary that they cannot divide."""
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3}
    shape = {"hidden_size": 144, "intermediate_size": 96, "num_hidden_layers": 2, "max_position_embeddings": 256}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=131, tie_word_embeddings=True, **heads, **shape))
    for parameter in model.parameters():
        parameter.data.normal_(std=0.15)
    model.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def assert_three_ranks_on_loopback(server: ServerProcess) -> None:
    workers = [process for name, group in server.processes().items() if "worker" in name for process in group]
    assert len(workers) == 3
    assert "3 ranks" in server.log
    places = {place.laddr.ip for worker in workers for place in worker.net_connections("inet")}
    assert places == {"127.0.0.1"}  # the ranks connect over TCP, on loopback only


def test_three_ranks_give_the_same_tokens_as_one(tmp_path: Path, model_dir: str) -> None:
    llm = LLM(model_dir, device="cpu", max_total_token_num=1024)
    expected = [
        llm.generate([PROMPT], max_new_tokens=NEW_TOKENS, ignore_eos=True, **each)[0].token_ids for each in SAMPLING
    ]
    assert len(set(map(tuple, expected))) == len(SAMPLING)
    body = {"prompt": PROMPT, "max_tokens": NEW_TOKENS, "ignore_eos": True, "return_token_ids": True}

    flags = ("--model_dir", model_dir, "--device", "cpu", "--tp", "3", "--max_total_token_num", "1024")
    with running_server(tmp_path / "log", *flags) as server:
        found = [server.post("/v1/completions", body | each)[1]["choices"][0]["token_ids"] for each in SAMPLING]

        assert found == expected
        assert_three_ranks_on_loopback(server)
        assert server.stop() == 0


@pytest.mark.long  # 30 CPU seconds: three ranks of the default model; the test above has one with its heads
def test_three_ranks_of_the_default_model_give_the_text_of_one(tmp_path: Path) -> None:
    with running_server(tmp_path / "log", "--tp", "3", "--max_total_token_num", "2048") as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300)

        response = client.chat.completions.create(model="SmolLM2-135M-Instruct", messages=QUESTION, temperature=0)
        sampled = [
            client.chat.completions.create(model="SmolLM2-135M-Instruct", messages=QUESTION, seed=3, n=3, max_tokens=12)
            for _ in range(2)
        ]

        assert response.choices[0].message.content == "The capital of France is Paris."
        texts = [[choice.message.content for choice in one.choices] for one in sampled]
        assert texts[0] == texts[1]
        assert len(set(texts[0])) == 3
        assert_three_ranks_on_loopback(server)
