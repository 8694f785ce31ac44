"""``--deterministic`` over HTTP: the same bits alone, in a batch, and from a warm cache."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from test.api.server import ServerProcess, running_server
from test.real_model import PROMPTS

pytestmark = pytest.mark.slow


def logprobs(server: ServerProcess, prompt: str, **options: Any) -> Any:
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "logprobs": 3, **options}
    status, response = server.post("/v1/completions", body)
    assert status == 200, response
    return response["choices"][0]["logprobs"]


def test_results_do_not_depend_on_other_requests_or_the_cache(tmp_path: Path) -> None:
    asked = PROMPTS[-3][:250]
    with running_server(tmp_path / "log", "--deterministic", "--max_total_token_num", "4096") as server:
        alone = logprobs(server, asked)
        cached = logprobs(server, asked)
        with ThreadPoolExecutor(5) as clients:
            others = [clients.submit(logprobs, server, prompt) for prompt in PROMPTS[:4]]
            among_others = clients.submit(logprobs, server, asked, cache_salt="not in the cache").result()
            for other in others:
                other.result()

    assert len(alone["token_logprobs"]) == 4
    assert cached == alone
    assert among_others == alone
