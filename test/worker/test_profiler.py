"""Profiles in a worker, through its real connections."""

from __future__ import annotations

import asyncio
import json
import threading
import zlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightserve.common.device import device_named
from lightserve.ipc.worker_calls import PROFILE
from lightserve.messages.step import Step, StepResult, StepRow
from lightserve.messages.worker_calls import ProfileChunk, ProfileCommand, ProfileResult
from lightserve.router.workers.client import RpycModelClient
from lightserve.worker.profiler import KINDS, DeviceTrace, WorkerProfiler
from lightserve.worker.rpc import GetResult, StepServer, handler
from lightserve.worker.torch_trace import TorchTrace
from test.waiting import DEADLINE_S

CLOCK_SLACK_US = 500.0  # torch reads a counter of the CPU and converts it
STEP = Step([StepRow(1, [0, 1, 2])])


class Worker:
    """Its steps multiply matrices in the thread that launches them."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.may_end.set()

    def launch(self, step: Step) -> GetResult:
        torch.ones(4, 4) @ torch.ones(4, 4)
        return self._collect

    def _collect(self) -> StepResult:
        self.may_end.wait()
        return StepResult()


class FailingTrace:
    def start(self) -> None:
        raise RuntimeError("no profiler")

    def stop(self, path: str) -> None: ...


class WrittenTrace:
    CONTENT = b"of a device" * 100

    def start(self) -> None: ...

    def stop(self, path: str) -> None:
        Path(path).write_bytes(self.CONTENT)


Scenario = Callable[[RpycModelClient], Awaitable[None]]


async def profile(model: RpycModelClient, command: ProfileCommand) -> ProfileResult:
    result = await model.call(PROFILE, command, 30)
    assert result is not None
    return result


def serve(run_dir: Path, device_trace: DeviceTrace | None, scenario: Scenario) -> None:
    path = str(run_dir / "worker")
    server, profiler = StepServer(path), WorkerProfiler(0, Worker().launch, device_trace)
    thread = threading.Thread(target=server.serve, args=(profiler.launch, 2, [handler(PROFILE, profiler.run)]))
    thread.start()

    async def run() -> None:
        model = await RpycModelClient.connect([path], lambda reason, caused_by_request: None)
        try:
            await scenario(model)
        finally:
            model.close()

    asyncio.run(run())
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def read(path: str) -> list[dict[str, Any]]:
    """The spans of a part, in microseconds since 1970."""
    part = json.loads(Path(path).read_bytes())
    base_us = part["baseTimeNanoseconds"] / 1e3
    return [one | {"ts": base_us + one["ts"]} for one in part["traceEvents"] if one["ph"] == "X"]


def test_a_profile_has_the_steps_and_what_torch_did_in_their_thread(tmp_path: Path) -> None:
    async def scenario(model: RpycModelClient) -> None:
        await model.run(STEP)
        started = await profile(model, ProfileCommand())
        await model.run(STEP)
        await model.run(STEP)
        stopped = await profile(model, ProfileCommand(str(tmp_path / "p")))
        await model.run(STEP)

        assert started.error == stopped.error == ""
        steps, device = map(read, stopped.paths)
        launches = [one for one in steps if one["name"] == "launch"]
        assert [one["args"] for one in launches] == [{"requests": 1, "tokens": 3, "new": 0}] * 2
        assert sum(one["name"] == "wait for tokens" for one in steps) == 2
        products = sorted((one for one in device if one["name"] == "aten::mm"), key=lambda one: one["ts"])
        assert [(one["pid"], one["tid"]) for one in products] == [(one["pid"], one["tid"]) for one in launches]
        for launch, product in zip(launches, products, strict=True):  # on the same clock
            assert launch["ts"] - CLOCK_SLACK_US < product["ts"] < launch["ts"] + launch["dur"] + CLOCK_SLACK_US

    trace = TorchTrace(device_named("cpu"))
    trace.prepare()
    serve(tmp_path, trace, scenario)


def test_steps_are_launched_as_before_when_no_profile_runs(tmp_path: Path) -> None:
    worker = Worker()
    profiler = WorkerProfiler(0, worker.launch)

    before = profiler.launch(STEP)
    profiler.run(ProfileCommand())
    during = profiler.launch(STEP)
    profiler.run(ProfileCommand(str(tmp_path / "p")))

    assert before == profiler.launch(STEP) == worker._collect
    assert during != worker._collect


def test_the_router_reads_the_files_of_another_node_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightserve.worker.profiler.CHUNK_BYTES", 1000)
    profiler = WorkerProfiler(3, Worker().launch, WrittenTrace(), folder=str(tmp_path))
    for _ in range(2):  # the files of the first one are never read
        profiler.run(ProfileCommand())
        for _ in range(20):
            profiler.launch(STEP)()
        stopped = profiler.run(ProfileCommand("/folder/of/another/machine"))

    chunks = list(iter(profiler.read, ProfileChunk()))

    assert stopped == ProfileResult(num_unread=2)
    content = {kind: b"".join(zlib.decompress(one.data) for one in chunks if one.kind == kind) for kind in KINDS}
    assert len(json.loads(content["worker"])["traceEvents"]) == 41  # two for each step, and the name
    assert content["device"] == WrittenTrace.CONTENT
    assert len(chunks) > 3
    assert not list(tmp_path.iterdir())


def test_a_profiler_that_fails_does_not_end_the_worker(tmp_path: Path) -> None:
    async def scenario(model: RpycModelClient) -> None:
        started = await profile(model, ProfileCommand())
        stopped = await profile(model, ProfileCommand(str(tmp_path / "p")))

        assert started.error == "model worker 0: RuntimeError: no profiler"
        assert "was started after the profile" in stopped.error
        assert not (await model.run(STEP)).tokens

    serve(tmp_path, FailingTrace(), scenario)


def test_a_part_that_cannot_be_written_is_an_error_and_the_next_profile_works(tmp_path: Path) -> None:
    async def scenario(model: RpycModelClient) -> None:
        await profile(model, ProfileCommand())
        stopped = await profile(model, ProfileCommand(str(tmp_path / "missing" / "p")))
        await profile(model, ProfileCommand())
        again = await profile(model, ProfileCommand(str(tmp_path / "p")))

        assert "FileNotFoundError" in stopped.error
        assert again.error == ""

    serve(tmp_path, None, scenario)
