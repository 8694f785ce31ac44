"""A sleep that moves the weights to the host, over a real server: the device of another package stands for a GPU."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmark.models import TINY, save_model
from test.api.server import ServerProcess, running_server
from test.api.test_rl_sleep import KEPT, Stream, generate, workers
from test.fake_vendor import install
from test.fake_vendor.test_server import ROOT
from test.waiting import wait_until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    root = tmp_path_factory.mktemp("moved")
    for name in ("site", "model", "weights"):
        (root / name).mkdir()
    install.install(root / "site")
    save_model(root / "model", None, TINY)
    env = {"PYTHONPATH": os.pathsep.join((str(root / "site"), str(ROOT)))}
    sizes = ("--max_total_token_num", "4096", "--max_req_total_len", "2048")
    flags = ("--device", "fake", "--load_format", "dummy", "--enable_rl", "--weights_dir", str(root / "weights"))
    with running_server(root / "log", "--model_dir", str(root / "model"), *sizes, *flags, env=env) as server:
        yield server


def pids(server: ServerProcess) -> list[int]:
    return [process.pid for process in server.processes()["ls-worker"]]


def test_a_kept_request_goes_on_in_the_same_worker_when_the_weights_are_back(server: ServerProcess) -> None:
    whole, before = generate(server, KEPT)["output_ids"], pids(server)
    running = Stream(server, KEPT)

    slept = server.post("/sleep?level=1&mode=keep", {})

    assert slept == (200, {"status": "sleeping", "level": 1, "method": "weights_on_host"})
    assert not server.is_healthy()
    with ThreadPoolExecutor(1) as clients:
        waiting = clients.submit(generate, server, 3)
        status, woken = server.post("/wake_up", {})
        assert (status, woken["status"], woken["method"]) == (200, "awake", "weights_on_host")
        assert server.is_healthy()  # at once: trainers look at it
        assert running.output_ids() == whole
        assert waiting.result()["output_ids"] == whole[:3]
    assert pids(server) == before


def test_tags_of_a_trainer_move_the_weights_and_the_kv_cache(server: ServerProcess) -> None:
    whole, before = generate(server, 3)["output_ids"], pids(server)

    assert server.post("/release_memory_occupation", {"tags": ["weights"]}) == (200, None)
    assert server.post("/release_memory_occupation", {"tags": ["kv_cache"]}) == (200, None)
    assert server.post("/resume_memory_occupation", {"tags": ["weights"]}) == (200, None)
    assert server.post("/resume_memory_occupation", {"tags": ["kv_cache"]}) == (200, None)

    assert generate(server, 3)["output_ids"] == whole
    assert pids(server) == before


def test_weights_are_not_updated_while_they_are_away(server: ServerProcess) -> None:
    whole = generate(server, 3)["output_ids"]
    assert server.post("/sleep", {})[0] == 200

    status, refused = server.post("/update_weights_from_disk", {"model_path": "."})

    assert (status, refused["success"]) == (400, False)
    assert "the weights have no memory while the server sleeps; wake them first" in refused["message"]
    assert server.post("/wake_up", {})[0] == 200
    assert generate(server, 3)["output_ids"] == whole  # nothing has changed


def test_a_worker_that_dies_in_its_sleep_comes_back_with_the_wake_up_and_not_before(server: ServerProcess) -> None:
    whole, before = generate(server, 3)["output_ids"], pids(server)
    running = Stream(server, KEPT)
    assert server.post("/sleep?mode=keep", {})[1]["method"] == "weights_on_host"

    server.processes()["ls-worker"][0].send_signal(signal.SIGKILL)

    server.wait_for_log("the workers have died in their sleep")
    assert workers(server) == 0  # a trainer has their memory
    status, woken = server.post("/wake_up", {})
    assert (status, woken["method"]) == (200, "workers_stopped")
    assert running.output_ids()[:3] == whole
    assert pids(server) != before


def test_level_2_stops_the_workers(server: ServerProcess) -> None:
    whole = generate(server, 3)["output_ids"]

    assert server.post("/sleep?level=1", {})[1]["method"] == "weights_on_host"
    assert server.post("/sleep?level=2", {}) == (200, {"status": "sleeping", "level": 2, "method": "workers_stopped"})

    assert workers(server) == 0
    assert server.post("/wake_up", {})[0] == 200
    assert generate(server, 3)["output_ids"] == whole


def test_a_server_whose_weights_are_away_shuts_down(server: ServerProcess) -> None:
    """The last test of this server."""
    assert server.post("/sleep", {})[0] == 200
    wait_until(lambda: not server.is_healthy())

    assert server.stop() == 0
