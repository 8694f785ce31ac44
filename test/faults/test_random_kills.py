"""A worker is killed at random moments, repeatedly. Steps take no time, so that a kill can hit any part of one."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from test.api.server import ServerProcess, running_server
from test.waiting import DEADLINE_S

SERVERS = 8
KILLS = 3  # of the workers of one server; it ends at the next one
STREAMS = 4
TOKENS = 600


def ask(server: ServerProcess, number: int) -> str:
    body = {"prompt": [5 + number, 6, 7], "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    status, response = server.post("/v1/completions", body)
    assert status == 200, response
    return str(response["choices"][0]["text"])


def kill_worker(server: ServerProcess) -> None:
    for worker in server.processes().get("ls-worker", []):  # none while a replacement starts
        worker.kill()


def ask_all(server: ServerProcess, killed_after_s: float | None = None) -> list[str]:
    """The texts of the streams. The worker is killed during them, or just afterwards."""
    with ThreadPoolExecutor(STREAMS) as pool:
        asked = [pool.submit(ask, server, number) for number in range(STREAMS)]
        if killed_after_s is not None:
            killer = threading.Timer(killed_after_s, kill_worker, [server])
            killer.start()
            killer.join(DEADLINE_S)
        return [future.result(DEADLINE_S) for future in asked]


@pytest.mark.long
@pytest.mark.parametrize("seed", range(SERVERS))
def test_a_worker_that_is_killed_at_any_moment_changes_no_text(tmp_path: Path, seed: int) -> None:
    moments = random.Random(seed)
    with running_server(tmp_path / "log", "--null_worker") as server:
        expected = ask_all(server)

        for _ in range(KILLS):
            assert ask_all(server, killed_after_s=moments.uniform(0.0, 0.3)) == expected
        assert ask_all(server) == expected
