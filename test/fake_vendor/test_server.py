"""A server on the device of another package computes what the CPU computes, and calls nothing of torch.cuda."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from test.api.server import ServerProcess, running_server
from test.fake_vendor import events, install

PROMPTS = ["abc 123", '{"xy": tr', "e" * 90, "ab " * 40, "0" * 90]
MAX_TOKENS = 12
ROOT = Path(__file__).parent.parent.parent


class Running(NamedTuple):
    server: ServerProcess
    events: Path

    def text(self, prompt: str) -> str:
        body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
        status, answer = self.server.post("/v1/completions", body)
        assert status == 200, answer
        text: str = answer["choices"][0]["text"]
        return text


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    install.install(folder)
    return folder


@pytest.fixture(scope="module")
def on_fake(installed: Path, small_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Two ranks, and so little KV that prefixes go to host memory and come back."""
    folder = tmp_path_factory.mktemp("fake")
    env = {"PYTHONPATH": os.pathsep.join((str(installed), str(ROOT))), events.VARIABLE: str(folder / "events")}
    flags = ("--device", "fake", "--tp", "2", "--ops_backend", "fake_norms")
    kv = ("--max_total_token_num", "160", "--max_req_total_len", "128", "--kv_ram_gb", "0.02")
    with running_server(folder / "log", "--model_dir", small_folder, *flags, *kv, env=env) as server:
        yield Running(server, folder / "events")


@pytest.fixture(scope="module")
def on_cpu(small_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("cpu")
    with running_server(folder / "log", "--model_dir", small_folder, "--device", "cpu") as server:
        yield Running(server, folder / "events")


@pytest.mark.slow
@pytest.mark.tp
def test_a_server_on_another_vendors_device_gives_the_text_of_the_cpu(on_fake: Running, on_cpu: Running) -> None:
    texts = [on_fake.text(prompt) for prompt in (*PROMPTS, *PROMPTS)]

    assert "in float32 on fake" in on_fake.server.log
    assert texts == [on_cpu.text(prompt) for prompt in (*PROMPTS, *PROMPTS)]


@pytest.mark.slow
@pytest.mark.tp
def test_such_a_server_uses_all_that_the_device_offers(on_fake: Running) -> None:
    for prompt in (*PROMPTS, *PROMPTS):
        on_fake.text(prompt)

    assert {*on_fake.events.read_text().splitlines()} == {
        "collectives",
        "copy down beside the steps",
        "copy to the host",
        "copy up beside the steps",
        "norm of a package of ops",
        "product with a weight in the layout of the device",
        "replay of a graph",
    }
