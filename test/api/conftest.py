from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from test.api.server import ServerProcess, running_server

KV_TOKENS = 16384


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One server with the real default model for all tests that only send requests.

    Its weights are expanded, so that it generates the text of transformers, and it samples with the API's own defaults.
    LIGHTSERVE_TEST_FLAGS adds flags, such as ``--model_dir ANOTHER --model_name SmolLM2-135M-Instruct``.
    """
    log = tmp_path_factory.mktemp("server") / "log"
    more = os.environ.get("LIGHTSERVE_TEST_FLAGS", "").split()
    model_flags = ("--quantization", "none", "--generation_config", "none")
    flags = ("--max_total_token_num", str(KV_TOKENS), "--max_queue_size", "64")
    with running_server(log, *model_flags, *flags, *more) as server:
        yield server
