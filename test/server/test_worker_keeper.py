"""Workers that die are replaced; processes that hang are made to die."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightserve.config import LaunchConfig
from lightserve.io_struct import WorkersLost
from lightserve.server import worker_keeper
from lightserve.server.worker_keeper import MAX_SHORT_LIVES, WorkerKeeper
from test.server.launched import Launched, launched, until
from test.waiting import until as until_in_loop

WORKER = """
    def main(boot, parent):
        note(f"rank {boot.index} of {boot.config.worker.tp}, {boot.config.worker.max_total_token_num} tokens")
        Path(boot.path(f"tp")).touch(exist_ok=False) if boot.index == 0 else None
        if Path(__file__).with_name("broken").exists():
            raise RuntimeError("no memory is left")
        if Path(__file__).with_name("broken_once").exists():
            Path(__file__).with_name("broken_once").unlink()
            raise RuntimeError("no memory is left yet")
        parent.send(EngineReady(max_total_token_num=4096, max_req_total_len=512, vocab_size=64, pipeline_depth=1))
        signal.pause()
    run_child("model worker", main)
"""
ROUTER = """
    async def main(boot, parent):
        while True:
            note(type(await parent.recv()).__name__)
            parent.send(Ready())
    run_child("router", main)
"""
COMPLAINING_ROUTER = """
    async def main(boot, parent):
        await parent.recv()
        parent.send(Ready())
        generation = 0
        while True:
            await asyncio.to_thread(Path(__file__).with_name("go").read_text)  # until the fifo is opened
            parent.send(WorkersLost(generation, "a step has been running for 61 s", False))
            last, generation = generation, (await parent.recv()).generation
            parent.send(WorkersLost(last, "this is about the last one", False))
            note(f"new workers {generation}")
    run_child("router", main)
"""
IS_BACK = "a new model worker is ready, "


def kill_worker(server: Launched, times_before: int = 0) -> None:
    """As soon as the one that replaced the last one is there."""
    until(lambda: server.said().count(IS_BACK) == times_before, "the last one is replaced")
    server.signal_child("ls-worker", signal.SIGKILL)


def test_a_worker_that_dies_is_replaced_by_one_of_its_size_and_the_router_learns_of_it(tmp_path: Path) -> None:
    with launched(tmp_path, worker=WORKER, router=ROUTER) as server:
        server.until_ready()

        kill_worker(server)

        server.until_said(IS_BACK)
        until(lambda: server.heard("router") == ["EngineReady", "NewWorkers"], "the router knows the new one")
        assert "lightserve: model worker 0 died (signal 9); starting another" in server.said()
        assert server.heard("worker") == ["rank 0 of 1, None tokens", "rank 0 of 1, 4096 tokens"]
        assert server.heard("httpserver")[1:] == ["EngineReady"]
        assert sorted(server.children().values()) == ["ls-detokenizer", "ls-httpserver", "ls-router", "ls-worker"]
        server.process.send_signal(signal.SIGTERM)
        assert server.exit_code() == 0
        assert not server.children()


def test_when_one_rank_dies_all_are_replaced(tmp_path: Path) -> None:
    with launched(tmp_path, "--tp=2", worker=WORKER, router=ROUTER) as server:
        server.until_ready()
        before = {pid for pid, name in server.children().items() if "worker" in name}

        server.signal_child("ls-worker-1", signal.SIGKILL)

        server.until_said(IS_BACK)
        after = {pid for pid, name in server.children().items() if "worker" in name}
        assert len(after) == 2
        assert not after & before
        assert "model worker 1 died (signal 9); starting another" in server.said()


def test_workers_that_die_again_and_again_end_the_server(tmp_path: Path) -> None:
    with launched(tmp_path, worker=WORKER, router=ROUTER) as server:
        server.until_ready()
        (tmp_path / "broken").touch()

        kill_worker(server)

        assert server.exit_code() == 1
        assert server.said().count("starting another") == MAX_SHORT_LIVES
        assert "3 new workers in a row died within 60 s: giving up" in server.said()
        assert server.last_line() == "lightserve: model worker 0 died (exit code 1): RuntimeError: no memory is left"
        assert server.heard("httpserver")[-2:] == ["EngineDied", "Drain"]
        assert not server.children()
        assert server.has_cleaned_up()


def test_a_worker_that_the_router_gave_up_is_killed_and_replaced_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "go")
    with launched(tmp_path, worker=WORKER, router=COMPLAINING_ROUTER) as server:
        server.until_ready()
        (tmp_path / "broken_once").touch()  # the first to replace another dies before the router knows of it

        (tmp_path / "go").write_text("x")
        until(lambda: server.heard("router") == ["new workers 2"], "the router knows the new one")
        (tmp_path / "go").write_text("x")
        until(lambda: server.heard("router")[1:] == ["new workers 3"], "the router knows the next one")

        assert server.said().count("it was killed: a step has been running for 61 s; starting another") == 2
        assert server.said().count("RuntimeError: no memory is left yet; starting another") == 1
        server.process.send_signal(signal.SIGTERM)
        assert server.exit_code() == 0
        assert server.said().count("starting another") == 3


@pytest.mark.parametrize(
    "name",
    [
        "ls-router",
        pytest.param("ls-detokenizer", marks=pytest.mark.long),
        pytest.param("ls-httpserver", marks=pytest.mark.long),
    ],
)
def test_a_process_that_hangs_is_killed_and_ends_the_server(tmp_path: Path, name: str) -> None:
    with launched(tmp_path, "--process_timeout=1", router=ROUTER) as server:
        server.until_ready()

        server.signal_child(name, signal.SIGSTOP)

        assert server.exit_code() == 1
        assert "died (signal 9): it was killed: it did not answer for 1 s" in server.last_line()
        assert not server.children()


@pytest.mark.long
def test_a_worker_that_hangs_is_replaced_and_those_that_only_wait_live_on(tmp_path: Path) -> None:
    with launched(tmp_path, "--process_timeout=4", worker=WORKER, router=ROUTER) as server:
        server.until_ready()

        server.signal_child("ls-worker", signal.SIGSTOP)

        server.until_said(IS_BACK)
        assert "model worker 0 died (signal 9): it was killed: it did not answer for 2 s; starting" in server.said()
        assert server.process.poll() is None


class DyingFleet:
    """Workers that die as soon as they are ready."""

    def __init__(self, explained: set[int]) -> None:
        self.router = SimpleNamespace(complaints=asyncio.Queue[WorkersLost](), send=lambda message: None)
        self.engine = "engine"
        self.ready_s = 0.0
        self.generation = 0
        self._explained = explained

    async def worker_death(self) -> Any:
        await asyncio.sleep(0.01)
        is_explained = self.generation in self._explained
        self.router.complaints.put_nowait(WorkersLost(self.generation, "it hung up", is_explained))
        await asyncio.sleep(0)  # the router is heard before the process is seen to end
        return RuntimeError(f"death {self.generation}")

    async def bury_workers(self, within_s: float) -> bool:
        self.generation += 1
        return True

    async def start_workers(self) -> None: ...

    async def workers_ready(self) -> str:
        return self.engine

    def put_down_workers(self, why: str) -> None: ...


def deaths_until_it_gives_up(explained: set[int]) -> int:
    async def run() -> int:
        fleet: Any = DyingFleet(explained)
        keeper = WorkerKeeper(fleet, LaunchConfig())
        heeding = asyncio.create_task(keeper.heed_router())
        with pytest.raises(RuntimeError, match="death"):
            await keeper.run()
        await until_in_loop(lambda: fleet.router.complaints.empty())
        heeding.cancel()
        return int(fleet.generation)

    return asyncio.run(run())


@pytest.mark.parametrize("last_words_s", [0.0, 600.0])
def test_a_death_that_a_request_is_to_blame_for_does_not_count(
    monkeypatch: pytest.MonkeyPatch, last_words_s: float
) -> None:
    """However long the workers of an earlier complaint may have something to say."""
    monkeypatch.setattr(worker_keeper, "LAST_WORDS_S", last_words_s)

    assert deaths_until_it_gives_up(set()) == 3
    assert deaths_until_it_gives_up({1, 3, 5}) == 8
