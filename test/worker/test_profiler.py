"""Profiles in a worker, through its real connections."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import torch

from lightserve.io_struct import ProfileCommand, Step, StepResult, StepRow
from lightserve.router.model_client import RpycModelClient
from lightserve.router.profile_client import LOST, ProfileClient
from lightserve.worker.profiler import DeviceTrace, WorkerProfiler
from lightserve.worker.rpc import GetResult, ModelRpc, StepServer
from lightserve.worker.torch_trace import TorchTrace

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


Scenario = Callable[[RpycModelClient, ProfileClient], Awaitable[None]]


def serve(run_dir: Path, device_trace: DeviceTrace | None, scenario: Scenario) -> None:
    path = str(run_dir / "worker")
    server, profiler = StepServer(path), WorkerProfiler(0, device_trace)
    thread = threading.Thread(target=server.serve, args=(Worker().launch, 2), kwargs={"run_profile": profiler.run})
    thread.start()

    async def run() -> None:
        model = await RpycModelClient.connect([path], lambda reason, caused_by_request: None)
        profiles = await ProfileClient.connect([path])
        try:
            await scenario(model, profiles)
        finally:
            profiles.close()
            model.close()

    asyncio.run(run())
    thread.join(30)
    assert not thread.is_alive()


def read(path: str) -> list[dict[str, Any]]:
    """The spans of a part, in microseconds since 1970."""
    part = json.loads(Path(path).read_bytes())
    base_us = part["baseTimeNanoseconds"] / 1e3
    return [one | {"ts": base_us + one["ts"]} for one in part["traceEvents"] if one["ph"] == "X"]


def test_a_profile_has_the_steps_and_what_torch_did_in_their_thread(tmp_path: Path) -> None:
    async def scenario(model: RpycModelClient, profiles: ProfileClient) -> None:
        await model.run(STEP)
        (started,) = await profiles.run(ProfileCommand(), 30)
        await model.run(STEP)
        await model.run(STEP)
        (stopped,) = await profiles.run(ProfileCommand(str(tmp_path / "p")), 30)
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

    trace = TorchTrace()
    trace.prepare()
    serve(tmp_path, trace, scenario)


def test_steps_are_launched_as_before_when_no_profile_runs(tmp_path: Path) -> None:
    worker, profiler = Worker(), WorkerProfiler(0)
    plain = worker.launch
    rpc = ModelRpc(plain)

    profiler.run(rpc, ProfileCommand())
    during = rpc.launch
    profiler.run(rpc, ProfileCommand(str(tmp_path / "p")))

    assert during is not plain
    assert rpc.launch is plain


def test_a_profiler_that_fails_does_not_end_the_worker(tmp_path: Path) -> None:
    async def scenario(model: RpycModelClient, profiles: ProfileClient) -> None:
        (started,) = await profiles.run(ProfileCommand(), 30)
        (stopped,) = await profiles.run(ProfileCommand(str(tmp_path / "p")), 30)

        assert started.error == "model worker 0: RuntimeError: no profiler"
        assert "was started after the profile" in stopped.error
        assert not (await model.run(STEP)).tokens

    serve(tmp_path, FailingTrace(), scenario)


def test_a_part_that_cannot_be_written_is_an_error_and_the_next_profile_works(tmp_path: Path) -> None:
    async def scenario(model: RpycModelClient, profiles: ProfileClient) -> None:
        await profiles.run(ProfileCommand(), 30)
        (stopped,) = await profiles.run(ProfileCommand(str(tmp_path / "missing" / "p")), 30)
        await profiles.run(ProfileCommand(), 30)
        (again,) = await profiles.run(ProfileCommand(str(tmp_path / "p")), 30)

        assert "FileNotFoundError" in stopped.error
        assert again.error == ""

    serve(tmp_path, None, scenario)


def test_lost_workers_end_the_wait_for_a_profile(tmp_path: Path) -> None:
    async def scenario(model: RpycModelClient, profiles: ProfileClient) -> None:
        profiles.close()
        (result,) = await profiles.run(ProfileCommand(), 30)

        assert result.error == LOST

    serve(tmp_path, None, scenario)
