"""A model with sliding windows and two KV pools through the server: two ranks, a worker that dies, and the metrics.

A stage of the pipeline may have no layer with a window, or only such layers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from test.api.server import running_server
from test.api.test_restart import clients_of, kill_worker
from test.waiting import wait_until
from test.worker.kv.test_windowed_pool import make, prompt, save_model

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.tp]


def body(ids: list[int]) -> dict[str, Any]:
    return {"prompt": ids, "max_tokens": 60, "temperature": 0, "ignore_eos": True, "stream": True}


@pytest.mark.parametrize("kind", ["--tp", "--pp"])
def test_two_ranks_with_two_pools_give_the_text_of_one_pool_also_if_a_worker_dies(kind: str, tmp_path: Path) -> None:
    folder = save_model("gemma3_text", tmp_path)
    one_pool = make(folder, 0)
    prompts = [prompt(150, seed=n % 2) + prompt(20, seed=n) for n in range(6)]
    expected = [one.text for one in one_pool.generate(prompts, max_new_tokens=60, temperature=0, ignore_eos=True)]
    flags = (
        "--model_dir",
        folder,
        "--device",
        "cpu",
        kind,
        "2",
        "--dtype",
        "float32",
        "--max_total_token_num",
        "4096",
    )

    with running_server(tmp_path / "log", *flags, "--max_windowed_token_num", "500") as server:
        assert "4,096 tokens; 500 in layers with a window of 16 tokens" in server.log
        with clients_of(server) as clients:
            responses = clients.ask([body(ids) for ids in prompts])
            wait_until(lambda: clients.events > 100)
            kill_worker(server, "ls-worker-1")
            texts = [response.result()[0]["text"] for response in responses]

        assert texts == expected
        server.wait_until_idle()
        wait_until(lambda: server.metrics()["kv_group_used_slots/sliding_window_16"] == 0)
        assert server.metrics()["kv_group_slots/sliding_window_16"] == 500
        assert server.metrics()["worker_restarts_total"] == 1
        assert server.stop() == 0
