"""The endpoints of --enable_rl over a real server with a tiny model: what a trainer asks, and what requests see."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmark.models import TINY, save_model
from test.api.server import ServerProcess, running_server

KEY = "for-trainers"
FLAGS = ("--load_format", "dummy", "--max_total_token_num", "4096", "--max_req_total_len", "2048", "--enable_rl")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    root = tmp_path_factory.mktemp("rl")
    model = root / "model"
    model.mkdir()
    save_model(model, None, TINY)
    with running_server(root / "log", "--model_dir", str(model), *FLAGS, "--admin_key", KEY) as server:
        yield server


def get(server: ServerProcess, path: str) -> Any:
    request = urllib.request.Request(server.url + path, headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def post(server: ServerProcess, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
    return server.post(path, body or {}, Authorization=f"Bearer {KEY}")


def test_a_trainer_reads_the_world_size_and_the_configuration(server: ServerProcess) -> None:
    info = get(server, "/server_info")

    assert get(server, "/get_world_size?include_dp=true") == {"world_size": 1}
    assert info["vllm_config"]["parallel_config"]["data_parallel_size"] == 1
    assert info["vllm_config"]["model_config"]["dtype"] == f"torch.{info['dtype']}"
    assert info["vllm_config"]["weight_transfer_config"] == {"backend": "nccl"}


def test_the_endpoints_of_trainers_need_the_admin_key(server: ServerProcess) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{server.url}/get_world_size")

    assert refused.value.code == 401
