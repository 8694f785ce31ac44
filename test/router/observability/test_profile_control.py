"""Profiles in the router, with workers that do what the test says."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import time
import zlib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lightserve.ipc.worker_calls import PROFILE, WorkerCall
from lightserve.messages.output import ProfileReply, RequestTimeline, TimelineEvent
from lightserve.messages.request import StartProfile, StopProfile
from lightserve.messages.worker_calls import ProfileChunk, ProfileCommand, ProfileResult
from lightserve.router.observability import profile_folder
from lightserve.router.observability.profile_folder import ProfileFolder, ProfileFolderError
from lightserve.router.observability.request_tracks import add_request_tracks
from lightserve.tools.merge_profile import PIDS
from lightserve.utils.trace_recorder import TraceRecorder
from test.router.test_manager import Router, check, request
from test.waiting import DEADLINE_S

HOUR_S = 3600.0


class FakeWorkers:
    """One worker, whose part of a profile has one span."""

    def __init__(self) -> None:
        self.error = ""
        self.are_lost = False
        self.commands: list[ProfileCommand] = []

    def call(self, call: WorkerCall[Any, Any], request: Any, timeout_s: float | None = None) -> asyncio.Future[Any]:
        assert call is PROFILE
        self.commands.append(request)
        result = asyncio.get_running_loop().create_future()
        result.set_result(self._profile(request.prefix))
        return result

    def _profile(self, prefix: str | None) -> ProfileResult | None:
        if self.are_lost:
            return None
        if self.error or prefix is None:
            return ProfileResult(error=self.error)
        recorder = TraceRecorder("model worker 0")
        recorder.add("launch", time.monotonic(), time.monotonic())
        recorder.write(f"{prefix}-worker-0.part")
        return ProfileResult([f"{prefix}-worker-0.part"])


class FakeNodes:
    """Two workers, of which the second one is on another node. Its process has the same id as the first one."""

    def __init__(self, folder: Path, num_answers: int = 100) -> None:
        self._folder = folder
        self._num_answers = num_answers  # then they are lost
        self._pieces: list[bytes] = []

    def call(self, call: WorkerCall[Any, Any], request: Any, timeout_s: float | None = None) -> asyncio.Future[Any]:
        self._num_answers -= 1
        result = asyncio.get_running_loop().create_future()
        reply = self._profile(request) if call is PROFILE else self._next_chunks()
        result.set_result(reply if self._num_answers >= 0 else None)
        return result

    def _profile(self, command: ProfileCommand) -> ProfileResult:
        if command.prefix is None:
            return ProfileResult()
        for rank in range(2):
            recorder = TraceRecorder(f"model worker {rank}")
            recorder.add("launch", time.monotonic(), time.monotonic())
            recorder.write(str(self._folder / f"{rank}"))
        content = (self._folder / "1").read_bytes()
        self._pieces = [content[:30], content[30:]]
        return ProfileResult([str(self._folder / "0")], num_unread=1)

    def _next_chunks(self) -> list[ProfileChunk]:
        remote = ProfileChunk(zlib.compress(self._pieces.pop(0))) if self._pieces else ProfileChunk()
        return [ProfileChunk(), remote]


async def ask(router: Router, message: StartProfile | StopProfile) -> ProfileReply:
    def replies() -> list[ProfileReply]:
        found = [one for one in router.sent if isinstance(one, ProfileReply)]
        return [one for one in found if one.query_id == message.query_id]

    router.send(message)
    await router.until(lambda: bool(replies()))
    return replies()[0]


def events_of(path: str | Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(gzip.decompress(Path(path).read_bytes()))["traceEvents"]
    return events


def test_a_profile_has_the_router_the_worker_and_the_requests(tmp_path: Path) -> None:
    folder = tmp_path / "profiles"

    async def scenario(router: Router) -> None:
        router.manager.profiles.enable(str(folder), FakeWorkers())
        started = await ask(router, StartProfile(1, HOUR_S))
        router.send(msgspec.structs.replace(request(5, prompt_len=70), request_id="mine"))
        await router.until(lambda: router.has_finished(5))
        stopped = await ask(router, StopProfile(2))

        assert (started.status, stopped.status, stopped.message) == (200, 200, "")
        assert list(folder.iterdir()) == [Path(stopped.path)]  # no parts are left
        events = events_of(stopped.path)
        spans = [one["name"] for one in events if one["ph"] == "X"]
        assert {"plan", "send", "report tokens", "prefill step", "decode step", "launch", "queue"} <= set(spans)
        assert spans.count("chunk of 64") == spans.count("chunk of 6") == 1
        assert "request mine (5)" in [one["args"]["name"] for one in events if one["name"] == "thread_name"]
        assert router.manager.steps.recorder is None

    check(scenario, tmp_path)


def test_parts_of_other_nodes_are_brought_here_and_their_processes_are_others(tmp_path: Path) -> None:
    folder = tmp_path / "profiles"

    async def scenario(router: Router) -> None:
        router.manager.profiles.enable(str(folder), FakeNodes(tmp_path), node_of=lambda rank: rank)
        await ask(router, StartProfile(1, HOUR_S))
        stopped = await ask(router, StopProfile(2))

        assert (stopped.status, stopped.message) == (200, "")
        assert list(folder.iterdir()) == [Path(stopped.path)]
        events = events_of(stopped.path)
        pids = {one["args"]["name"]: one["pid"] for one in events if one["name"] == "process_name"}
        assert pids["model worker 0"] == os.getpid()
        assert pids["model worker 1"] == PIDS + os.getpid()
        assert [one["pid"] for one in events if one["name"] == "launch"] == [os.getpid(), PIDS + os.getpid()]

    check(scenario, tmp_path)


@pytest.mark.parametrize("num_answers", [2, 3])
def test_parts_of_nodes_that_are_lost_meanwhile_are_missing_and_the_others_are_not(
    num_answers: int, tmp_path: Path
) -> None:
    async def scenario(router: Router) -> None:
        router.manager.profiles.enable(str(tmp_path / "profiles"), FakeNodes(tmp_path, num_answers))
        await ask(router, StartProfile(1, HOUR_S))
        stopped = await ask(router, StopProfile(2))

        assert (stopped.status, stopped.message) == (200, "the model workers were lost")
        names = [one["args"]["name"] for one in events_of(stopped.path) if one["name"] == "process_name"]
        assert "model worker 0" in names
        assert "model worker 1" not in names

    check(scenario, tmp_path)


def test_one_profile_runs_at_a_time(tmp_path: Path) -> None:
    async def scenario(router: Router) -> None:
        router.manager.profiles.enable(str(tmp_path / "profiles"), FakeWorkers())

        assert (await ask(router, StopProfile(1))).status == 409
        assert (await ask(router, StartProfile(2, HOUR_S))).status == 200
        assert (await ask(router, StartProfile(3, HOUR_S))).status == 409
        assert (await ask(router, StopProfile(4))).status == 200
        assert (await ask(router, StopProfile(5))).status == 409

    check(scenario, tmp_path)


def test_a_profile_ends_by_itself(tmp_path: Path) -> None:
    folder = tmp_path / "profiles"

    async def scenario(router: Router) -> None:
        router.manager.profiles.enable(str(folder), FakeWorkers())
        await ask(router, StartProfile(1, 0.01))

        async with asyncio.timeout(DEADLINE_S):
            while not list(folder.glob("*.json.gz")):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert (await ask(router, StopProfile(2))).status == 409

    check(scenario, tmp_path)


def test_without_a_folder_profiles_are_off(tmp_path: Path) -> None:
    async def scenario(router: Router) -> None:
        for message in (StartProfile(1, 1.0), StopProfile(2)):
            reply = await ask(router, message)
            assert reply.status == 400
            assert "--profile_dir" in reply.message

    check(scenario, tmp_path)


def test_a_worker_that_cannot_start_a_profile_refuses_it(tmp_path: Path) -> None:
    async def scenario(router: Router) -> None:
        workers = FakeWorkers()
        router.manager.profiles.enable(str(tmp_path / "profiles"), workers)
        workers.error = "no profiler"

        assert (await ask(router, StartProfile(1, HOUR_S))).status == 500
        workers.error = ""
        assert (await ask(router, StartProfile(2, HOUR_S))).status == 200

    check(scenario, tmp_path)


def test_a_profile_of_lost_workers_has_the_router_and_says_what_is_missing(tmp_path: Path) -> None:
    async def scenario(router: Router) -> None:
        workers = FakeWorkers()
        router.manager.profiles.enable(str(tmp_path / "profiles"), workers)
        await ask(router, StartProfile(1, HOUR_S))
        workers.are_lost = True
        stopped = await ask(router, StopProfile(2))
        started = await ask(router, StartProfile(3, HOUR_S))

        assert (stopped.status, started.status) == (200, 500)
        assert stopped.message == started.message == "the model workers were lost"
        assert events_of(stopped.path)

    check(scenario, tmp_path)


def test_a_profile_without_its_worker_says_what_is_missing(tmp_path: Path) -> None:
    async def scenario(router: Router) -> None:
        workers = FakeWorkers()
        router.manager.profiles.enable(str(tmp_path / "profiles"), workers)
        await ask(router, StartProfile(1, HOUR_S))
        workers.error = "model worker 0 was started after the profile"
        stopped = await ask(router, StopProfile(2))

        assert (stopped.status, stopped.message) == (200, workers.error)
        assert events_of(stopped.path)

    check(scenario, tmp_path)


def test_a_folder_that_vanishes_or_is_no_folder_fails_the_profile_only(tmp_path: Path) -> None:
    folder = tmp_path / "profiles"

    async def scenario(router: Router) -> None:
        router.manager.profiles.enable(str(folder), FakeWorkers())
        await ask(router, StartProfile(1, HOUR_S))
        folder.rmdir()
        folder.write_text("a file")
        stopped = await ask(router, StopProfile(2))
        started = await ask(router, StartProfile(3, HOUR_S))
        router.send(request(5))
        await router.until(lambda: router.has_finished(5))

        assert (stopped.status, started.status) == (500, 500)
        assert "--profile_dir" in started.message

    check(scenario, tmp_path)


def test_the_folder_keeps_the_last_profiles_only_and_nothing_of_others(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    folder = ProfileFolder(str(tmp_path))
    paths = []
    for _ in range(profile_folder.MAX_PROFILES + 3):
        paths.append(folder.new_profile())
        paths[-1].write_bytes(b"x")
        (tmp_path / f".{profile_folder.PREFIX}left.part").write_bytes(b"x")

    folder.new_profile()

    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == sorted(["notes.txt", *(path.name for path in paths[-profile_folder.MAX_PROFILES + 1 :])])


def test_large_profiles_are_removed_and_a_full_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ProfileFolder(str(tmp_path))
    first, second = folder.new_profile(), folder.new_profile()
    first.write_bytes(b"x" * 100)
    second.write_bytes(b"x" * 50)
    monkeypatch.setattr(profile_folder, "MAX_BYTES", 100)

    folder.new_profile()

    assert [first.exists(), second.exists()] == [False, True]
    monkeypatch.setattr(profile_folder, "MIN_FREE_BYTES", 2**62)
    with pytest.raises(ProfileFolderError, match="MiB left"):
        folder.new_profile()


def test_a_request_that_was_preempted_shows_its_pause(tmp_path: Path) -> None:
    recorder = TraceRecorder("router")
    kinds = ("queued", "admitted", "first_token", "preempted", "admitted", "finished")
    events = [TimelineEvent(kind, 10.0 + place) for place, kind in enumerate(kinds)]  # type: ignore[arg-type]
    ended = RequestTimeline("old", 1, 0.0, 5, 5, [TimelineEvent("queued", 1.0), TimelineEvent("finished", 2.0)])

    add_request_tracks(recorder, [ended, RequestTimeline("mine", 2, 9.0, 5, 5, events)], begin_s=5.0, end_s=30.0)

    recorder.write(str(tmp_path / "part"))
    found = json.loads((tmp_path / "part").read_bytes())["traceEvents"]
    spans = [(one["name"], one["ts"], one["dur"]) for one in found if one["ph"] == "X"]
    assert spans == [
        ("queue", 10e6, 1e6),
        ("prefill", 11e6, 1e6),
        ("decode", 12e6, 1e6),
        ("preempted", 13e6, 1e6),
        ("decode, resumed", 14e6, 1e6),
    ]
