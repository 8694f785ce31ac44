"""Experts that are divided over ranks give the same text as one rank, through the server."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from test.api.server import ServerProcess, running_server
from test.api.test_restart import kill_worker, restarted
from test.models.architectures.case import build
from test.models.architectures.cases import CASES
from test.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.tp]

SAMPLING: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0.7, "seed": 5}]


def save_expert_model(folder: Path) -> str:
    tiny = build(CASES["qwen3_moe"])
    (folder / "config.json").write_text(json.dumps(tiny.config_json))
    save_file(tiny.tensors, folder / "model.safetensors")
    return str(folder)


def answers(server: ServerProcess) -> list[list[int]]:
    """The tokens of eight requests at once."""
    bodies = [
        {"prompt": [5 + i, 17, 3 + i], "max_tokens": 60, "ignore_eos": True, "return_token_ids": True} | sampling
        for i in range(4)
        for sampling in SAMPLING
    ]
    with ThreadPoolExecutor(len(bodies)) as threads:
        responses = list(threads.map(lambda body: server.post("/v1/completions", body)[1], bodies))
    return [response["choices"][0]["token_ids"] for response in responses]


def test_ranks_with_experts_of_their_own_give_the_text_of_one_rank(tmp_path: Path) -> None:
    flags = ("--model_dir", save_expert_model(tmp_path), "--device", "cpu", "--max_total_token_num", "2048")
    with running_server(tmp_path / "one", *flags) as server:
        alone = answers(server)
    with running_server(tmp_path / "ep", *flags, "--tp", "2", "--ep", "2") as server:
        together = answers(server)
        with ThreadPoolExecutor(1) as thread:
            again = thread.submit(answers, server)
            wait_until(lambda: server.metrics()["num_requests_running"] > 0)
            kill_worker(server, "ls-worker-1")
            although_killed = again.result()
        wait_until(restarted(server, 1))

    assert [len(tokens) for tokens in alone] == [60] * 8
    assert together == alone
    assert although_killed == alone
