"""Prefixes that leave the KV pool, and come back from a lower tier: the same text, with fewer tokens computed."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from test.api.server import ServerProcess, running_server
from test.api.test_restart import kill_worker
from test.waiting import wait_until
from test.worker.kv.block_store.redis_server import redis_server

pytestmark = pytest.mark.slow

COMPLETE = "/v1/completions"
KV_TOKENS = 1024
LENGTH = 450  # of a prompt: the pool holds two


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from test.small_text import save_small_model  # here, because it imports transformers

    return Path(save_small_model(tmp_path_factory.mktemp("model"), context_len=1024))


def serve(folder: Path, log: Path, *flags: str) -> Any:
    size = ("--max_total_token_num", str(KV_TOKENS))
    return running_server(log, "--model_dir", str(folder), "--device", "cpu", "--deterministic", *size, *flags)


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serve(model, tmp_path_factory.mktemp("ram") / "log", "--kv_ram_gb", "0.1") as server:
        yield server


def prompt(number: int) -> list[int]:
    return [3 + (7 * number + i * i) % 90 for i in range(LENGTH)]


def ask(server: ServerProcess, number: int, **options: Any) -> tuple[str, int]:
    """The text, and how many tokens of the prompt were cached."""
    body = {"prompt": prompt(number), "max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": 1} | options
    status, response = server.post(COMPLETE, body)
    assert status == 200, response
    text = json.dumps(response["choices"][0]["logprobs"]["token_logprobs"])
    return text, response["usage"]["prompt_tokens_details"]["cached_tokens"]


def evict(server: ServerProcess, salt: str) -> None:
    """Other prompts that need the whole pool."""
    for number in range(10, 14):
        ask(server, number, cache_salt=salt)


def ask_after_eviction(server: ServerProcess, number: int, expected: str, salt: str) -> int:
    """Evict a prompt and ask again, until it is loaded: on a loaded machine a load may be late, and is computed."""
    for again in range(20):
        evict(server, f"{salt} {again}")
        text, cached = ask(server, number)
        assert text == expected
        if cached:
            return cached
    raise AssertionError("the prompt was never loaded")


def test_an_evicted_prompt_is_loaded_with_the_same_text(server: ServerProcess) -> None:
    before = server.settled_metrics()
    expected, cached = ask(server, 0)
    assert cached == 0

    cached = ask_after_eviction(server, 0, expected, "a")

    assert cached >= LENGTH // 64 * 64 - 64
    after = server.settled_metrics()
    loaded = after["kv_tier_hits_total/ram"] - before["kv_tier_hits_total/ram"]
    assert 0 < loaded <= LENGTH
    assert after["kv_tier_stored_tokens_total/ram"] - before["kv_tier_stored_tokens_total/ram"] >= loaded
    assert after["prefix_cache_hits_total"] - before["prefix_cache_hits_total"] >= loaded
    assert after["kv_tier_used_bytes/ram"] > 0
    assert after["kv_tier_load_bytes_per_second/ram"] > 0


def test_requests_with_another_salt_do_not_find_what_was_evicted(server: ServerProcess) -> None:
    ask(server, 1, cache_salt="one")
    evict(server, "b")

    _, cached = ask(server, 1, cache_salt="two")

    assert cached == 0


def test_a_request_that_wants_no_cache_leaves_nothing(server: ServerProcess) -> None:
    ask(server, 2, disable_prompt_cache=True)
    evict(server, "c")

    _, cached = ask(server, 2)

    assert cached == 0


def test_after_a_crash_of_the_worker_the_prompt_is_computed_with_the_same_text(server: ServerProcess) -> None:
    expected, _ = ask(server, 3)
    evict(server, "d")
    restarts = server.metrics()["worker_restarts_total"]

    kill_worker(server)
    wait_until(lambda: server.metrics()["worker_restarts_total"] > restarts)
    text, cached = ask(server, 3)

    assert (text, cached) == (expected, 0)
    assert ask_after_eviction(server, 3, expected, "e") > 0


def disk_flags(folder: Path) -> tuple[str, ...]:
    return ("--kv_ram_gb", "0.1", "--kv_disk_gb", "0.1", "--kv_disk_dir", str(folder))


def wait_until_written(server: ServerProcess) -> None:
    """All whole blocks of the prompts so far: an idle server writes what is in the pool, too."""
    wait_until(lambda: server.metrics()["kv_tier_stored_tokens_total/disk"] > 0)
    server.settled_metrics()


@pytest.fixture(scope="module")
def written(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A folder with the prefixes of a server that has ended, and its texts of prompts 0 to 2."""
    folder = tmp_path_factory.mktemp("disk")
    with serve(model, folder / "log", *disk_flags(folder / "kv")) as server:
        texts = [ask(server, number, cache_salt="x")[0] for number in range(3)]
        wait_until_written(server)
        assert server.metrics()["kv_tier_used_bytes/disk"] > 0
        assert server.stop() == 0
    return folder / "kv", texts


def test_a_restarted_server_finds_its_prefixes_on_the_disk(
    model: Path, written: tuple[Path, list[str]], tmp_path: Path
) -> None:
    folder, texts = written
    with serve(model, tmp_path / "log", *disk_flags(folder)) as server:
        answers = [ask(server, number, cache_salt="x") for number in range(3)]  # one may be late on a loaded machine
        assert [text for text, _ in answers] == texts
        assert max(cached for _, cached in answers) == LENGTH // 64 * 64
        assert ask(server, 1, cache_salt="y")[1] == 0
        assert server.settled_metrics()["kv_tier_hits_total/disk"] >= LENGTH // 64 * 64
        assert server.stop() == 0


@pytest.mark.long
def test_damaged_and_missing_files_are_computed_again(
    model: Path, written: tuple[Path, list[str]], tmp_path: Path
) -> None:
    folder, texts = written
    shutil.copytree(folder, tmp_path / "kv")
    for number, path in enumerate(sorted((tmp_path / "kv").rglob("*.kv"))):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data if number % 3 else data[: number * 100])
    with serve(model, tmp_path / "log", *disk_flags(tmp_path / "kv")) as server:
        assert ask(server, 0, cache_salt="x") == (texts[0], 0)
        (tmp_path / "kv").rename(tmp_path / "elsewhere")  # while it runs
        assert ask(server, 1, cache_salt="x") == (texts[1], 0)
        assert ask(server, 2, cache_salt="x") == (texts[2], 0)
        metrics = server.settled_metrics()
        assert metrics["kv_tier_errors_total/disk"] >= LENGTH // 64
        assert metrics["kv_tier_hits_total/disk"] == 0
        assert server.is_healthy()
        assert server.stop() == 0


@pytest.mark.long
def test_two_servers_share_prefixes_through_redis_and_run_on_without_it(model: Path, tmp_path: Path) -> None:
    with redis_server(tmp_path) as address, ExitStack() as exits:
        flags = ("--kv_ram_gb", "0.1", "--kv_remote", f"redis://{address}")
        first, second = (exits.enter_context(serve(model, tmp_path / name, *flags)) for name in ("log1", "log2"))
        texts = [ask(first, number)[0] for number in range(3)]
        wait_until(lambda: first.metrics()["kv_tier_stored_tokens_total/remote"] >= 3 * (LENGTH // 64 * 64))

        answers = [ask(second, number) for number in range(3)]  # one may be late on a loaded machine

        assert [text for text, _ in answers] == texts
        assert max(cached for _, cached in answers) == LENGTH // 64 * 64
        assert second.settled_metrics()["kv_tier_hits_total/remote"] >= LENGTH // 64 * 64
        stop_redis(address)
        evict(second, "a")
        assert [ask(second, number)[0] for number in range(3)] == texts
        assert second.is_healthy()


def stop_redis(address: str) -> None:
    host, _, port = address.partition(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"SHUTDOWN NOSAVE\r\n")
        connection.recv(100)


@pytest.mark.tp
@pytest.mark.parametrize("ranks", ["--tp", pytest.param("--pp", marks=pytest.mark.long)])
def test_two_ranks_load_the_same_blocks(model: Path, tmp_path: Path, ranks: str) -> None:
    with serve(model, tmp_path / "log", *disk_flags(tmp_path / "kv"), ranks, "2") as server:
        expected, _ = ask(server, 0)

        cached = ask_after_eviction(server, 0, expected, "a")

        assert cached >= LENGTH // 64 * 64 - 64
        wait_until_written(server)
        kill_worker(server, "ls-worker-1")
        wait_until(lambda: server.metrics()["worker_restarts_total"] == 1)
        answers = [ask(server, 0), ask(server, 10, cache_salt="a 0")]  # one may be late on a loaded machine
        assert answers[0][0] == expected
        assert max(cached for _, cached in answers) >= LENGTH // 64 * 64 - 64
        assert server.metrics()["kv_tier_errors_total/disk"] == 0
        assert server.stop() == 0
