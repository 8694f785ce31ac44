"""One prefill engine and two decode engines behind one port: the same text as one engine, whatever dies."""

from __future__ import annotations

import json
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from test.api.server import ServerProcess, running_server
from test.api.test_restart import KINDS, clients_of

pytestmark = pytest.mark.slow

PROMPT_TOKENS = 600
KV_TOKENS = "16384"
BACK_S = 120.0  # for an engine to come back on a loaded machine
SPLIT = ("--dp", "3", "--roles", "prefill,decode,decode", "--min_split_tokens", "128")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose context has room for long prompts."""
    from test.small_text import save_small_model  # here, because it imports transformers

    folder = Path(save_small_model(tmp_path_factory.mktemp("model")))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    return folder


def serve(folder: Path, log: Path, *flags: str) -> Any:
    common = ("--deterministic", "--max_total_token_num", KV_TOKENS, "--batch_max_tokens", "256")
    return running_server(log, "--model_dir", str(folder), *common, *flags)


@pytest.fixture(scope="module")
def split(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serve(model, tmp_path_factory.mktemp("split") / "log", *SPLIT) as server:
        yield server


def bodies(round_: int) -> list[dict[str, Any]]:
    """Every kind of sampling, with prompts that no earlier round has cached."""
    return [
        {"prompt": prompt(round_, number), "max_tokens": 60, "ignore_eos": True, "stream": True} | kind
        for number, kind in enumerate(KINDS)
    ]


def prompt(round_: int, number: int) -> list[int]:
    return [(round_ * 7 + number * 3 + i * i) % 40 for i in range(PROMPT_TOKENS + number)]


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """The responses of a single engine in each round."""
    with serve(model, tmp_path_factory.mktemp("one") / "log") as server, clients_of(server) as clients:
        return [[answer.result() for answer in clients.ask(bodies(round_))] for round_ in range(5)]


def kill(server: ServerProcess, name: str) -> None:
    server.processes()[name][0].send_signal(signal.SIGKILL)


def events_of(server: ServerProcess, request_id: str) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"{server.url}/debug/requests?id={request_id}") as response:
        found: list[dict[str, Any]] = json.load(response)["requests"][0]["events"]
        return found


def test_text_is_that_of_one_engine_and_prompts_are_computed_by_the_prefill_engine(
    split: ServerProcess, expected: list[list[Any]]
) -> None:
    with clients_of(split) as clients:
        found = [answer.result() for answer in clients.ask(bodies(0))]

    assert found == expected[0]
    metrics = split.settled_metrics()
    print({k: v for k, v in metrics.items() if "kv_split" in k or "prefix" in k or "dp_" in k or "success" in k})
    assert metrics["kv_split_received_tokens_total"] > 0
