"""Limits and metrics of API keys, over two HTTP processes."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from test.api.server import ServerProcess, running_server
from test.waiting import wait_until

KEYS = "alpha name=tight requests_per_minute=2\nbeta name=one concurrency=1\ngamma\n"
MODEL = "SmolLM2-135M-Instruct"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(KEYS)
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, file: Path) -> Iterator[ServerProcess]:
    flags = ("--null_worker", "--httpserver_workers", "2", "--key_requests_per_minute", "1000", "--null_step_ms", "5")
    keys = ("--api_key_file", str(file), "--admin_key", "boss")
    with running_server(tmp_path_factory.mktemp("limits") / "log", *flags, *keys) as server:
        yield server


def client(server: ServerProcess, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


def complete(server: ServerProcess, key: str) -> None:
    with client(server, key) as one:  # a connection of its own: any process may get it
        one.completions.create(model=MODEL, prompt="Hello", max_tokens=3)


def metrics(server: ServerProcess, key: str) -> dict[tuple[str, str], float]:
    request = urllib.request.Request(f"{server.url}/metrics", headers={"x-api-key": key})
    text = urllib.request.urlopen(request).read().decode()
    rows = re.findall(r'^lightserve_key_(\w+)\{model_name="[^"]*",key="([^"]*)"[^}]*\} (\d+)$', text, re.MULTILINE)
    totals: dict[tuple[str, str], float] = {}
    for name, label, value in rows:
        totals[name, label] = totals.get((name, label), 0) + float(value)
    return totals


def test_a_key_beyond_its_rate_gets_429_and_a_time(server: ServerProcess) -> None:
    complete(server, "alpha")
    complete(server, "alpha")

    with pytest.raises(openai.RateLimitError) as refused:
        complete(server, "alpha")

    assert "2 requests a minute" in refused.value.message
    assert 1 <= int(refused.value.response.headers["retry-after"]) <= 30
    complete(server, "gamma")  # others go on


def test_a_key_with_a_running_stream_waits_for_its_end(server: ServerProcess) -> None:
    with client(server, "beta") as one:
        stream = one.completions.create(model=MODEL, prompt="Hello", max_tokens=4000, stream=True)
        next(iter(stream))

        with pytest.raises(openai.RateLimitError, match="1 requests of this API key are running"):
            complete(server, "beta")
        stream.close()

    def is_admitted() -> bool:
        try:
            complete(server, "beta")
        except openai.RateLimitError:
            return False
        return True

    wait_until(is_admitted)


def test_metrics_by_key_are_for_admins_and_the_key_itself(server: ServerProcess) -> None:
    complete(server, "gamma")

    everything, own = metrics(server, "boss"), metrics(server, "gamma")

    labels = {label for _, label in everything}
    assert labels > {"tight", "one"}
    assert {label for _, label in own} == labels - {"tight", "one"}
    [label] = labels - {"tight", "one"}
    assert label.startswith("key-")
    assert own["requests_total", label] >= 1
    assert own["generation_tokens_total", label] == 3 * own["requests_total", label]
    assert everything["refused_total", "tight"] >= 1


def test_limits_are_read_again_with_the_file(server: ServerProcess, file: Path) -> None:
    file.write_text(KEYS.replace("=2\n", "=1000\n"))

    def is_admitted() -> bool:
        try:
            complete(server, "alpha")
        except openai.RateLimitError:
            return False
        return True

    wait_until(is_admitted)


def test_a_wrong_line_ends_the_start_without_showing_the_key(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("alpha concurrency=lots\n")

    with (
        pytest.raises(AssertionError, match="API key 1: concurrency='lots'") as caught,
        running_server(tmp_path / "log", "--null_worker", "--api_key_file", str(path)),
    ):
        pass

    assert "alpha" not in str(caught.value)
