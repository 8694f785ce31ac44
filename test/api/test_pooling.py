"""A server with an encoder: the openai client, deadlines, metrics, and the death of its worker."""

from __future__ import annotations

import base64
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from transformers import AutoModel

from test.api.server import ServerProcess, running_server
from test.pooling.files import CLS, SEP, add_sentence_transformers, new_model, save
from test.pooling.test_parity import assert_parallel, hidden_of
from test.waiting import wait_until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def encoder() -> Any:
    return new_model(AutoModel, "bert", type_vocab_size=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, encoder: Any) -> Path:
    folder = save(encoder, tmp_path_factory.mktemp("bert"))
    add_sentence_transformers(folder, "pooling_mode_mean_tokens")
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[ServerProcess]:
    flags = ("--model_dir", str(folder), "--model_name", "tiny", "--device", "cpu", "--httpserver_workers", "2")
    with running_server(tmp_path_factory.mktemp("server") / "log", *flags) as running:
        yield running


@pytest.fixture
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)


@pytest.mark.parametrize("encoding_format", ["float", "base64"])
def test_the_openai_client_gets_the_embeddings_of_transformers(
    client: openai.OpenAI, encoder: Any, encoding_format: Any
) -> None:
    response = client.embeddings.create(model="tiny", input=["w5 w6", "w7"], encoding_format=encoding_format)

    expected = [hidden_of(encoder, ids).mean(0).numpy() for ids in ([CLS, 5, 6, SEP], [CLS, 7, SEP])]
    for one, vector in zip(response.data, expected, strict=True):
        found: Any = one.embedding
        if isinstance(found, str):
            found = np.frombuffer(base64.b64decode(found), dtype=np.float32)
        assert_parallel(np.array(found, dtype=np.float32), vector)
    assert response.usage.prompt_tokens == 7


def test_the_openai_client_gets_a_bad_request_for_a_chat(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="the task of this model is embed"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "w5"}])


def test_a_deadline_that_has_passed_ends_the_request(server: ServerProcess) -> None:
    status, body = server.post("/v1/embeddings", {"input": ["w5 " * 90] * 2000, "timeout": 1e-6})

    assert status == 504
    assert "timeout" in body["error"]["message"]
    assert server.post("/v1/embeddings", {"input": "w5"})[0] == 200


def test_metrics_count_the_tokens_of_texts_and_no_output(server: ServerProcess) -> None:
    before = server.settled_metrics()

    server.post("/v1/embeddings", {"input": ["w5", "w6"]})

    after = server.settled_metrics()
    assert after["prompt_tokens_total"] - before["prompt_tokens_total"] == 6
    assert after["generation_tokens_total"] == 0
    assert after["kv_used_tokens"] == 0


def test_requests_survive_the_death_of_the_worker(server: ServerProcess, encoder: Any) -> None:
    """The new worker computes them again: no client sees it."""
    answers: list[tuple[int, Any]] = []
    body = {"input": ["w5 " * 80] * 600, "normalize": False, "dimensions": 8}
    sender = threading.Thread(target=lambda: answers.append(server.post("/v1/embeddings", body)))
    sender.start()
    wait_until(lambda: server.metrics()["num_requests_running"] > 0 or not sender.is_alive())
    worker = server.processes()["ls-worker"][0]

    worker.send_signal(signal.SIGKILL)
    sender.join()

    status, found = answers[0]
    assert status == 200
    expected = hidden_of(encoder, [CLS, *[5] * 80, SEP]).mean(0).numpy()[:8]
    for one in found["data"]:
        np.testing.assert_allclose(one["embedding"], expected, atol=1e-4)


@pytest.mark.tp
def test_two_ranks_give_the_embeddings_of_transformers(folder: Path, encoder: Any, tmp_path: Path) -> None:
    with running_server(tmp_path / "log", "--model_dir", str(folder), "--device", "cpu", "--tp", "2") as server:
        status, response = server.post("/v1/embeddings", {"input": ["w5 w6", "w7", [CLS, 8, 9, SEP]]})

        assert status == 200
        expected = [hidden_of(encoder, ids).mean(0) for ids in ([CLS, 5, 6, SEP], [CLS, 7, SEP], [CLS, 8, 9, SEP])]
        for one, vector in zip(response["data"], expected, strict=True):
            assert_parallel(np.array(one["embedding"], dtype=np.float32), vector.numpy())
        assert sum(len(group) for name, group in server.processes().items() if "worker" in name) == 2
