"""Tensor parallelism through the server gives the same text as one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from test.api.server import running_server

pytestmark = [pytest.mark.slow, pytest.mark.tp]

QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]


def test_three_ranks_give_the_same_text_as_one(tmp_path: Path) -> None:
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
        assert sum(len(children) for name, children in server.processes().items() if "worker" in name) == 3
        assert "3 ranks" in server.log
        workers = [process for name, group in server.processes().items() if "worker" in name for process in group]
        places = {place.laddr.ip for worker in workers for place in worker.net_connections("inet")}
        assert places == {"127.0.0.1"}  # the ranks connect over TCP, on loopback only
        assert server.stop() == 0
