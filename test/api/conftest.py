from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from test.api.server import ServerProcess, running_server

KV_TOKENS = 16384


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One server with the real default model for all tests that only send requests.

    Its weights are packed, as users have them, and it samples with the API's own defaults. LIGHTSERVE_TEST_FLAGS adds
    flags, such as ``--model_dir ANOTHER --model_name SmolLM2-135M-Instruct``.
    """
    yield from _serve(tmp_path_factory, "gguf")


@pytest.fixture(scope="session")
def exact_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The same with expanded weights, which generate the text of transformers, but take twice the time."""
    yield from _serve(tmp_path_factory, "none")


def _serve(tmp_path_factory: pytest.TempPathFactory, quantization: str) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("server") / "log"
    more = os.environ.get("LIGHTSERVE_TEST_FLAGS", "").split()
    model_flags = ("--quantization", quantization, "--generation_config", "none")
    flags = ("--max_total_token_num", str(KV_TOKENS), "--max_queue_size", "64")
    with running_server(log, *model_flags, *flags, *more) as server:
        yield server


@pytest.fixture(scope="session")
def spoilt_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    from test.test_numerics import save_spoilt_model  # here, because it imports transformers

    return save_spoilt_model(tmp_path_factory.mktemp("spoilt"))


@pytest.fixture(scope="session")
def of_one_rank(spoilt_model: str, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What one rank answers to the requests of test_restart.py."""
    from test.api.test_restart import answers  # here, because it imports transformers

    flags = ("--device", "cpu", "--max_total_token_num", "4096", "--model_dir", spoilt_model)
    with running_server(tmp_path_factory.mktemp("one") / "log", *flags) as server:
        return answers(server)
