"""Workers that die are replaced; processes that hang are killed."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightserve.config import LaunchConfig
from lightserve.messages.control import StartWorkers, StopWorkers, WorkersLost, WorkersStopped
from lightserve.server import worker_supervisor
from lightserve.server.supervisor import MAX_FAILED_RESTARTS
from lightserve.server.worker_supervisor import WorkerSupervisor
from test.server.launcher_process import LauncherProcess, start_launcher, wait_until
from test.waiting import until as until_in_loop

WORKER = """
    def main(child_config, launcher):
        worker = child_config.config.worker
        note(f"rank {child_config.index} of {worker.tp}, {worker.max_total_token_num} tokens")
        note(f"{worker.max_windowed_token_num} windowed tokens")
        Path(child_config.rendezvous_path).touch(exist_ok=False) if child_config.index == 0 else None
        if Path(__file__).with_name("broken").exists():
            raise RuntimeError("no memory is left")
        if Path(__file__).with_name("broken_once").exists():
            Path(__file__).with_name("broken_once").unlink()
            raise RuntimeError("no memory is left yet")
        figures = dict(max_total_token_num=4096, max_req_total_len=512, vocab_size=64, pipeline_depth=1)
        launcher.send(EngineInfo(**figures, kv_groups=(SlidingWindowKv(size=300, window=64, kept_tokens=127),)))
        signal.pause()
    run_child("model worker", main)
"""
ROUTER = """
    async def main(child_config, launcher):
        while True:
            note(type(await launcher.recv()).__name__)
            launcher.send(Ready())
    run_child("router", main)
"""
REPORTING_ROUTER = """
    async def main(child_config, launcher):
        await launcher.recv()
        launcher.send(Ready())
        generation = 0
        while True:
            await asyncio.to_thread(Path(__file__).with_name("go").read_text)  # until the fifo is opened
            launcher.send(WorkersLost(generation, "a step has been running for 61 s", False))
            last, generation = generation, (await launcher.recv()).generation
            launcher.send(WorkersLost(last, "this report is about the previous worker", False))
            note(f"new workers {generation}")
    run_child("router", main)
"""
IS_BACK = "a new model worker is ready, "


def kill_worker(server: LauncherProcess, times_before: int = 0) -> None:
    """Kill the worker once ``times_before`` workers have been replaced."""
    wait_until(lambda: server.stderr().count(IS_BACK) == times_before, "the last worker is replaced")
    server.signal_child("ls-worker", signal.SIGKILL)


def test_a_worker_that_dies_is_replaced_by_one_of_the_same_size_and_the_router_is_informed(tmp_path: Path) -> None:
    with start_launcher(tmp_path, worker=WORKER, router=ROUTER) as server:
        server.wait_ready()

        kill_worker(server)

        server.wait_for_output(IS_BACK)
        wait_until(lambda: server.received("router") == ["EngineInfo", "NewWorkers"], "the router is informed")
        assert "lightserve: model worker 0 died (signal 9); restarting the workers" in server.stderr()
        first, second = (
            ("rank 0 of 1, None tokens", "None windowed tokens"),
            ("rank 0 of 1, 4096 tokens", "300 windowed tokens"),
        )
        assert server.received("worker") == [*first, *second]
        assert "4,096 tokens; 300 in layers with a window of 64 tokens" in server.stderr()
        assert server.received("httpserver")[1:] == ["EngineInfo"]
        assert sorted(server.children().values()) == ["ls-detokenizer", "ls-httpserver", "ls-router", "ls-worker"]
        server.process.send_signal(signal.SIGTERM)
        assert server.exit_code() == 0
        assert not server.children()


def test_when_one_rank_dies_all_are_replaced(tmp_path: Path) -> None:
    with start_launcher(tmp_path, "--tp=2", worker=WORKER, router=ROUTER) as server:
        server.wait_ready()
        before = {pid for pid, name in server.children().items() if "worker" in name}

        server.signal_child("ls-worker-1", signal.SIGKILL)

        server.wait_for_output(IS_BACK)
        after = {pid for pid, name in server.children().items() if "worker" in name}
        assert len(after) == 2
        assert not after & before
        assert "model worker 1 died (signal 9); restarting the workers" in server.stderr()


def test_workers_that_die_again_and_again_end_the_server(tmp_path: Path) -> None:
    with start_launcher(tmp_path, worker=WORKER, router=ROUTER) as server:
        server.wait_ready()
        (tmp_path / "broken").touch()

        kill_worker(server)

        assert server.exit_code() == 1
        assert server.stderr().count("restarting the workers") == MAX_FAILED_RESTARTS
        assert "3 new workers in a row died within 60 s: giving up" in server.stderr()
        assert server.last_line() == "lightserve: model worker 0 died (exit code 1): RuntimeError: no memory is left"
        assert server.received("httpserver")[-2:] == ["EngineDied", "Drain"]
        assert not server.children()
        assert server.has_cleaned_up()


def test_a_worker_that_the_router_reports_is_killed_and_replaced_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "go")
    with start_launcher(tmp_path, worker=WORKER, router=REPORTING_ROUTER) as server:
        server.wait_ready()
        (tmp_path / "broken_once").touch()  # the first replacement dies before the router is informed

        (tmp_path / "go").write_text("x")
        wait_until(lambda: server.received("router") == ["new workers 2"], "the router is informed")
        (tmp_path / "go").write_text("x")
        wait_until(lambda: server.received("router")[1:] == ["new workers 3"], "the router is informed again")

        assert server.stderr().count("it was killed: a step has been running for 61 s; restarting the workers") == 2
        assert server.stderr().count("RuntimeError: no memory is left yet; restarting the workers") == 1
        server.process.send_signal(signal.SIGTERM)
        assert server.exit_code() == 0
        assert server.stderr().count("restarting the workers") == 3


@pytest.mark.parametrize("name", ["ls-router", pytest.param("ls-detokenizer", marks=pytest.mark.long)])
def test_a_process_that_hangs_is_killed_and_ends_the_server(tmp_path: Path, name: str) -> None:
    with start_launcher(tmp_path, "--process_timeout=3", router=ROUTER) as server:
        server.wait_ready()

        server.signal_child(name, signal.SIGSTOP)

        assert server.exit_code() == 1
        assert "died (signal 9): it was killed: it did not answer for 3 s" in server.last_line()
        assert not server.children()


@pytest.mark.long
def test_a_worker_that_hangs_is_replaced_and_processes_that_wait_for_it_survive(tmp_path: Path) -> None:
    with start_launcher(tmp_path, "--process_timeout=4", worker=WORKER, router=ROUTER) as server:
        server.wait_ready()

        server.signal_child("ls-worker", signal.SIGSTOP)

        server.wait_for_output(IS_BACK)
        assert "model worker 0 died (signal 9): it was killed: it did not answer for 2 s; restarting" in server.stderr()
        assert server.process.poll() is None


class CrashingProcesses:
    """Workers that die as soon as they are ready."""

    def __init__(self, caused_by_request: set[int]) -> None:
        self.router = SimpleNamespace(worker_reports=asyncio.Queue[WorkersLost](), send=lambda message: None)
        self.engine = "engine"
        self.ready_s = self.node_timeout_s = 0.0
        self.is_node_missing = False
        self.generation = 0
        self._caused_by_request = caused_by_request

    async def wait_worker_death(self) -> Any:
        await asyncio.sleep(0.01)
        caused_by_request = self.generation in self._caused_by_request
        self.router.worker_reports.put_nowait(WorkersLost(self.generation, "it hung up", caused_by_request))
        await asyncio.sleep(0)  # the router's report arrives before the process exits
        return RuntimeError(f"death {self.generation}")

    async def reap_workers(self, timeout_s: float) -> bool:
        self.generation += 1
        return True

    async def start_workers(self) -> None: ...

    async def wait_workers_ready(self) -> str:
        return self.engine

    def kill_workers(self, reason: str | None = None) -> None: ...


def deaths_until_it_gives_up(caused_by_request: set[int]) -> int:
    async def run() -> int:
        processes: Any = CrashingProcesses(caused_by_request)
        supervisor = WorkerSupervisor(processes, LaunchConfig())
        handling = asyncio.create_task(supervisor.handle_router_reports())
        with pytest.raises(RuntimeError, match="death"):
            await supervisor.run()
        await until_in_loop(lambda: processes.router.worker_reports.empty())
        handling.cancel()
        return int(processes.generation)

    return asyncio.run(run())


@pytest.mark.parametrize("exit_grace_s", [0.0, 600.0])
def test_a_crash_caused_by_a_request_does_not_count_as_a_failed_restart(
    monkeypatch: pytest.MonkeyPatch, exit_grace_s: float
) -> None:
    """This holds however long the workers of an earlier report may take to exit."""
    monkeypatch.setattr(worker_supervisor, "EXIT_GRACE_S", exit_grace_s)

    assert deaths_until_it_gives_up(set()) == 3
    assert deaths_until_it_gives_up({1, 3, 5}) == 8


class MortalProcesses(CrashingProcesses):
    """Workers that die when the test says so."""

    def __init__(self) -> None:
        super().__init__(set())
        self.sent: list[Any] = []
        self.router.send = self.sent.append
        self.num_starts = 0
        self.deaths = asyncio.Queue[None]()

    async def wait_worker_death(self) -> Any:
        await self.deaths.get()
        return RuntimeError("it was killed")

    async def start_workers(self) -> None:
        self.num_starts += 1

    async def wait_workers_ready(self) -> str:
        self.sent.append("ready")
        return self.engine


@pytest.mark.parametrize("is_woken", [False, True])
def test_workers_that_die_in_their_sleep_are_started_when_the_router_wakes_up(is_woken: bool) -> None:
    """A trainer has their memory: workers that load a model would not find any."""

    async def run() -> None:
        processes: Any = MortalProcesses()
        supervisor = WorkerSupervisor(processes, LaunchConfig())
        tasks = [asyncio.create_task(supervisor.handle_router_reports()), asyncio.create_task(supervisor.run())]
        reports = processes.router.worker_reports
        for report in [StopWorkers(only_dead=True), *([StartWorkers()] if is_woken else [])]:
            reports.put_nowait(report)
        await until_in_loop(lambda: reports.empty())

        processes.deaths.put_nowait(None)
        if not is_woken:
            await until_in_loop(lambda: WorkersStopped() in processes.sent)
            assert processes.num_starts == 0
            reports.put_nowait(StartWorkers())
        await until_in_loop(lambda: "ready" in processes.sent)

        assert processes.num_starts == 1
        assert (WorkersStopped() in processes.sent) is not is_woken
        for task in tasks:
            task.cancel()

    asyncio.run(run())
