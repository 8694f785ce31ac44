"""Models with KV groups, whose prefixes leave all KV pools, and come back from host memory and a disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightserve.offline.llm import LLM
from test.api.server import ServerProcess, running_server
from test.api.test_restart import kill_worker
from test.hybrid_model import save_hybrid_model
from test.waiting import wait_until
from test.worker.kv.test_windowed_pool import prompt, save_model

pytestmark = pytest.mark.slow

LENGTH = 250  # of a prompt: the pool of all tokens holds three


def ask(server: ServerProcess, ids: list[int], **options: Any) -> tuple[str, int]:
    """The text, and how many tokens of the prompt were cached."""
    body = {"prompt": ids, "max_tokens": 12, "temperature": 0, "ignore_eos": True} | options
    status, response = server.post("/v1/completions", body)
    assert status == 200, response
    return response["choices"][0]["text"], response["usage"]["prompt_tokens_details"]["cached_tokens"]


def ask_until_loaded(server: ServerProcess, ids: list[int], expected: str) -> int:
    """On a loaded machine a load may be late, and the prompt is computed."""
    for again in range(20):
        for number in range(5):
            ask(server, prompt(LENGTH, seed=100 + number), cache_salt=f"{again}")
        text, cached = ask(server, ids)
        assert text == expected
        if cached:
            return cached
    raise AssertionError("the prompt was never loaded")


def windowed(folder: Path) -> tuple[str, list[str]]:
    return save_model("gemma3_text", folder), ["--max_windowed_token_num", "400"]


def recurrent(folder: Path) -> tuple[str, list[str]]:
    return save_hybrid_model(folder)[0], ["--max_state_rows", "12"]


@pytest.mark.parametrize("make_model", [windowed, pytest.param(recurrent, marks=pytest.mark.long)])
def test_prefixes_come_back_with_the_text_of_a_server_without_tiers_also_after_a_crash(
    make_model: Callable[[Path], tuple[str, list[str]]], tmp_path: Path
) -> None:
    folder, group_flags = make_model(tmp_path)
    ids = prompt(LENGTH, seed=1)
    turn = ids + prompt(60, seed=2)
    llm = LLM(folder, device="cpu", data_type="float32", max_total_token_num=1024, max_req_total_len=600)
    options: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
    expected = [one.text for one in llm.generate([ids, turn], **options)]
    flags = ("--device", "cpu", "--dtype", "float32", "--max_total_token_num", "1024", "--max_req_total_len", "600")
    tiers = ("--kv_ram_gb", "0.02", "--kv_disk_gb", "0.1", "--kv_disk_dir", str(tmp_path / "kv"))

    with running_server(tmp_path / "log", "--model_dir", folder, *flags, *group_flags, *tiers) as server:
        assert ask(server, ids) == (expected[0], 0)
        assert ask_until_loaded(server, ids, expected[0]) == LENGTH // 64 * 64
        assert ask_until_loaded(server, turn, expected[1]) >= LENGTH // 64 * 64 - 64
        assert server.settled_metrics()["kv_tier_hits_total/ram"] > 0

        kill_worker(server)
        wait_until(lambda: server.metrics()["worker_restarts_total"] == 1)

        assert ask_until_loaded(server, ids, expected[0]) == LENGTH // 64 * 64
        metrics = server.settled_metrics()
        assert metrics["kv_tier_hits_total/disk"] > 0
        assert metrics["kv_tier_errors_total/disk"] == 0
        assert server.stop() == 0
