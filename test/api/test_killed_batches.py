"""A batch of requests to a real model, and a server that is killed three times at random moments meanwhile."""

from __future__ import annotations

import json
import random
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from test.api.server import RESPONSE_S, ServerProcess, running_server
from test.small_text import save_small_model
from test.waiting import has_ended, wait_until

pytestmark = pytest.mark.slow

KILLS = 3
WRONG = 50  # every so many requests, one that is refused when it runs
ENDPOINT = "/v1/completions"


def request(number: int) -> dict[str, Any]:
    body = {"prompt": [1] * prompt_len(number), "max_tokens": 8, "ignore_eos": True}
    if is_wrong(number):
        body["temperature"] = -1
    return {"custom_id": f"request-{number}", "method": "POST", "url": ENDPOINT, "body": body}


def prompt_len(number: int) -> int:
    return 1 + number % 13


def is_wrong(number: int) -> bool:
    return number % WRONG == 7


def client_of(server: ServerProcess) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=RESPONSE_S)


def start(client: Any, count: int) -> str:
    content = "\n".join(json.dumps(request(number)) for number in range(count)).encode()
    file_id = client.files.create(file=("in.jsonl", content), purpose="batch").id
    return str(client.batches.create(input_file_id=file_id, endpoint=ENDPOINT, completion_window="24h").id)


def num_ended(client: Any, batch_id: str) -> int:
    counts = client.batches.retrieve(batch_id).request_counts
    return int(counts.completed + counts.failed)


def kill_all(server: ServerProcess) -> None:
    """All processes of the server at once, as when the machine runs out of memory or is switched off."""
    root = psutil.Process(server.process.pid)
    processes = [root, *root.children(recursive=True)]
    for process in processes:
        with suppress(psutil.NoSuchProcess):  # it has followed its parent
            process.kill()
    wait_until(lambda: all(map(has_ended, processes)))
    server.process.wait()


def results(client: Any, file_id: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.long)])
def test_a_server_that_is_killed_three_times_runs_every_request_once(tmp_path: Path, count: int) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    moments = sorted(random.Random(seed).sample(range(1, count), KILLS))
    flags = ("--model_dir", save_small_model(tmp_path / "model"), "--batch_dir", str(tmp_path / "batches"))
    batch_id = ""
    for number, moment in enumerate(moments):
        with running_server(tmp_path / f"log-{number}", *flags, "--batch_concurrency", "16") as server:
            client = client_of(server)
            batch_id = batch_id or start(client, count)
            wait_until(lambda: num_ended(client, batch_id) >= moment)  # noqa: B023  awaited at once
            kill_all(server)

    with running_server(tmp_path / "log", *flags) as server:
        client = client_of(server)
        wait_until(lambda: client.batches.retrieve(batch_id).status == "completed", pause_s=0.1)
        batch = client.batches.retrieve(batch_id)
        output, errors = results(client, batch.output_file_id), results(client, batch.error_file_id)

        wrong = [number for number in range(count) if is_wrong(number)]
        right = sorted({*range(count)} - {*wrong})
        assert [line["custom_id"] for line in output] == [f"request-{number}" for number in right]
        assert [line["custom_id"] for line in errors] == [f"request-{number}" for number in wrong]
        usages = [line["response"]["body"]["usage"] for line in output]
        assert [usage["prompt_tokens"] for usage in usages] == [prompt_len(number) for number in right]
        assert {usage["completion_tokens"] for usage in usages} == {8}
        assert {line["response"]["status_code"] for line in errors} == {400}
        assert len({line["id"] for line in output + errors}) == count
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (count, len(right), len(wrong))
        assert server.stop() == 0
