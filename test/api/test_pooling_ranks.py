"""Pooling models in several engines and pipeline stages: the numbers of transformers, whatever is killed."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModel

from lightserve.links.keys import generate
from test.api.server import START_S, ServerProcess, running_server, start_server
from test.pooling.files import CLS, SEP, add_sentence_transformers, new_model, save
from test.pooling.test_parity import hidden_of
from test.ports import free_port
from test.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.tp]

CLI = (sys.executable, "-m", "lightserve.cli.main")
BACK_S = 120.0  # for an engine to come back on a loaded machine
WORDS = range(5, 25)
TEXTS = [" ".join([f"w{word}"] * 80) for word in WORDS] * 20


@pytest.fixture(scope="module")
def encoder() -> Any:
    return new_model(AutoModel, "bert", type_vocab_size=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, encoder: Any) -> Path:
    folder = save(encoder, tmp_path_factory.mktemp("bert"))
    add_sentence_transformers(folder, "pooling_mode_mean_tokens")
    return folder


@pytest.fixture(scope="module")
def expected(encoder: Any) -> list[Any]:
    vectors = [hidden_of(encoder, [CLS, *[word] * 80, SEP]).mean(0).numpy() for word in WORDS]
    return vectors * 20


@pytest.fixture(scope="module")
def engines(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    flags = ("--model_dir", str(folder), "--device", "cpu", "--dp", "2")
    with running_server(tmp_path_factory.mktemp("dp") / "log", *flags) as server:
        yield server


def embed_while(server: ServerProcess, kill: Any) -> tuple[int, Any]:
    """The response to many texts. A process is killed while they are computed."""
    answers: list[tuple[int, Any]] = []
    body = {"input": TEXTS, "normalize": False}
    sender = threading.Thread(target=lambda: answers.append(server.post("/v1/embeddings", body)))
    sender.start()
    wait_until(lambda: server.metrics()["num_requests_running"] > 0 or not sender.is_alive())
    kill()
    sender.join()
    return answers[0]


def assert_equal(answer: tuple[int, Any], expected: list[Any]) -> None:
    status, body = answer
    assert status == 200, body
    found = [one["embedding"] for one in body["data"]]
    np.testing.assert_allclose(found, np.stack(expected), atol=2e-4)


def test_two_engines_compute_the_texts_of_a_request(engines: ServerProcess, expected: list[Any]) -> None:
    answer = engines.post("/v1/embeddings", {"input": TEXTS, "normalize": False})

    assert_equal(answer, expected)
    assert {"ls-router", "ls-router-1", "ls-dispatcher"} <= set(engines.processes())
    metrics = engines.settled_metrics()
    assert metrics["prompt_tokens_total"] == len(TEXTS) * 82
    assert metrics["num_requests_running"] == 0


def test_an_engine_whose_router_is_killed_loses_no_text(engines: ServerProcess, expected: list[Any]) -> None:
    router = engines.processes()["ls-router-1"][0]

    answer = embed_while(engines, lambda: router.send_signal(signal.SIGKILL))

    assert_equal(answer, expected)
    wait_until(lambda: "engine 1 is back" in engines.log, BACK_S)


def test_an_engine_whose_worker_is_killed_loses_no_text(engines: ServerProcess, expected: list[Any]) -> None:
    worker = engines.processes()["ls-worker"][0]

    answer = embed_while(engines, lambda: worker.send_signal(signal.SIGKILL))

    assert_equal(answer, expected)
    wait_until(lambda: "a new model worker is ready" in engines.log, BACK_S)


@contextmanager
def gateway_with_engine(folder: Path, tmp_path: Path) -> Iterator[tuple[ServerProcess, ServerProcess]]:
    generate(tmp_path / "keys")
    address, keys = f"tcp://127.0.0.1:{free_port()}", ("--cluster_keys", str(tmp_path / "keys"))
    started = []
    try:
        command = [*CLI, "engine", str(folder), "--device", "cpu", "--listen", address, *keys]
        started.append(start_server(tmp_path / "engine.log", command))
        command = [*CLI, "serve", str(folder), "--engines", address, "--port", "0", *keys]
        gateway = start_server(tmp_path / "gateway.log", command)
        started.append(gateway)
        wait_until(lambda: "ready at" in gateway.log or gateway.has_ended, START_S)
        yield gateway, started[0]
    finally:
        for process in started:
            process.stop()


@pytest.mark.long  # links are those of text, and --dp has the rest
def test_a_gateway_gets_the_numbers_of_its_engine(folder: Path, expected: list[Any], tmp_path: Path) -> None:
    with gateway_with_engine(folder, tmp_path) as (gateway, engine):
        worker = engine.processes()["ls-worker"][0]

        answer = embed_while(gateway, lambda: worker.send_signal(signal.SIGKILL))

        assert_equal(answer, expected)


def test_two_stages_give_the_numbers_of_one_rank_although_one_is_killed(
    folder: Path, expected: list[Any], tmp_path: Path
) -> None:
    flags = ("--model_dir", str(folder), "--device", "cpu", "--pp", "2")
    with running_server(tmp_path / "log", *flags) as server:
        assert_equal(server.post("/v1/embeddings", {"input": TEXTS, "normalize": False}), expected)
        worker = server.processes()["ls-worker-1"][0]

        answer = embed_while(server, lambda: worker.send_signal(signal.SIGKILL))

        assert_equal(answer, expected)
        server.wait_for_log("restarting the workers")
