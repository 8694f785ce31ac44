"""POST /start_profile and /stop_profile in the router: one profile at a time, of the router and all workers.

    start ─▶ workers record ─▶ stop, or max_seconds ─▶ parts of router and workers ─▶ one file for Perfetto

Every part has the times of the same clock. A process of its own joins the parts, because they may be large.
"""

from __future__ import annotations

import asyncio
import sys
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lightserve.errors import WorkerCallError
from lightserve.ipc.channel import Sender
from lightserve.ipc.worker_calls import PROFILE, READ_PROFILE, WorkerCaller
from lightserve.messages.output import ProfileReply, ToDetokenization
from lightserve.messages.request import StartProfile, StopProfile
from lightserve.messages.worker_calls import ProfileChunk, ProfileCommand, ProfileResult
from lightserve.router.observability.profile_folder import ProfileFolder, ProfileFolderError
from lightserve.router.observability.request_tracks import add_request_tracks
from lightserve.router.observability.timeline import TimelineRing
from lightserve.router.step_loop import StepLoop
from lightserve.utils.logger import init_logger
from lightserve.utils.trace_recorder import TraceRecorder, of_node

logger = init_logger(__name__)

START_TIMEOUT_S = 60.0  # of a worker: the first profile loads the libraries of the GPU's profiler
STOP_TIMEOUT_S = 300.0  # of a worker, and of joining the parts
DISABLED = "profiles are off; start the server with --profile_dir DIR"
NOT_RUNNING = "no profile is running; POST /start_profile starts one"
RUNNING = "a profile is running already; POST /stop_profile ends it"
LOST = ProfileResult(error="the model workers were lost")


@dataclass(slots=True)
class _Profile:
    path: Path
    recorder: TraceRecorder
    started_s: float
    end_s: float


class ProfileControl:
    def __init__(self, steps: StepLoop, timelines: TimelineRing, replies: Sender[ToDetokenization]) -> None:
        self._folder: ProfileFolder | None = None  # None: profiles are off
        self._workers: WorkerCaller | None = None
        self._steps = steps
        self._timelines = timelines
        self._replies = replies
        self._queue: asyncio.Queue[StartProfile | StopProfile] = asyncio.Queue()
        self._profile: _Profile | None = None
        self._node_of: Callable[[int], int] = lambda rank: 0

    def enable(self, folder: str, workers: WorkerCaller, node_of: Callable[[int], int] = lambda rank: 0) -> None:
        """Call it again when the workers were replaced. ``node_of``: a rank."""
        self._folder = self._folder or ProfileFolder(folder)
        self._workers = workers
        self._node_of = node_of

    def put(self, message: StartProfile | StopProfile) -> None:
        self._queue.put_nowait(message)

    async def run(self) -> None:
        """Handle one message after the other, and end a profile that runs too long."""
        while True:
            message = await self._next()
            try:
                reply = await self._handle(message)
            except ProfileFolderError as error:
                reply = ProfileReply(0, 500, str(error))
            except Exception as error:  # requests must not end because a profile fails
                logger.warning("the profile failed: %s", error, exc_info=error)
                reply = ProfileReply(0, 500, f"the profile failed: {type(error).__name__}: {error}")
            if message is None:
                logger.info("the profile has ended by itself: %s", reply.path or reply.message)
            else:
                self._replies.send(ProfileReply(message.query_id, reply.status, reply.message, reply.path))

    async def _next(self) -> StartProfile | StopProfile | None:
        """None: the time of the profile is over."""
        timeout_s = None if self._profile is None else max(self._profile.end_s - time.monotonic(), 0.0)
        try:
            async with asyncio.timeout(timeout_s):
                return await self._queue.get()
        except TimeoutError:
            return None

    async def _handle(self, message: StartProfile | StopProfile | None) -> ProfileReply:
        folder, workers, profile = self._folder, self._workers, self._profile
        if folder is None or workers is None:
            return ProfileReply(0, 400, DISABLED)
        if isinstance(message, StartProfile):
            return ProfileReply(0, 409, RUNNING) if profile else await self._start(folder, workers, message)
        if profile is None:
            return ProfileReply(0, 409, NOT_RUNNING)
        self._profile = None
        return await self._stop(folder, workers, profile)

    async def _start(self, folder: ProfileFolder, workers: WorkerCaller, message: StartProfile) -> ProfileReply:
        path = folder.new_profile()
        result = await workers.call(PROFILE, ProfileCommand(), START_TIMEOUT_S) or LOST
        if result.error:
            return ProfileReply(0, 500, result.error)
        now = time.monotonic()
        recorder = self._steps.recorder = TraceRecorder("router")
        self._profile = _Profile(path, recorder, now, now + message.max_seconds)
        return ProfileReply(0)

    async def _stop(self, folder: ProfileFolder, workers: WorkerCaller, profile: _Profile) -> ProfileReply:
        self._steps.recorder = None
        prefix = folder.part_prefix(profile.path)
        try:
            result = await workers.call(PROFILE, ProfileCommand(prefix), STOP_TIMEOUT_S) or LOST
            remote_paths, remote_error = await self._read_from_nodes(workers, prefix) if result.num_unread else ([], "")
            add_request_tracks(profile.recorder, self._timelines.snapshots(), profile.started_s, time.monotonic())
            router_path = f"{prefix}-router.part"
            await asyncio.to_thread(profile.recorder.write, router_path)
            error = await _merge(profile.path, [router_path, *result.paths, *remote_paths])
        finally:
            folder.remove_parts()
        if error:
            return ProfileReply(0, 500, f"the profile could not be written: {error}")
        missing = "; ".join(filter(None, (result.error, remote_error)))
        return ProfileReply(0, message=missing, path=str(profile.path))

    async def _read_from_nodes(self, workers: WorkerCaller, prefix: str) -> tuple[list[str], str]:
        """Copy the parts of ranks on other nodes to this one. Returns their paths, and what went wrong."""
        paths: dict[str, None] = {}
        while True:
            try:
                chunks = await workers.call(READ_PROFILE, None, STOP_TIMEOUT_S)
            except WorkerCallError as error:  # a part that is not whole could not be joined
                return [], str(error)
            if chunks is None:
                return [], LOST.error
            of_ranks = [(rank, chunk) for rank, chunk in enumerate(chunks) if chunk.data]
            if not of_ranks:
                return list(paths), ""
            for rank, chunk in of_ranks:
                path = f"{prefix}-{chunk.kind}-{rank}{of_node(self._node_of(rank))}"
                paths[path] = None
                await asyncio.to_thread(_append, path, chunk)


def _append(path: str, chunk: ProfileChunk) -> None:
    with open(path, "ab") as file:
        file.write(zlib.decompress(chunk.data))


async def _merge(path: Path, parts: list[str]) -> str:
    """What went wrong; "" if the file is there."""
    command = [sys.executable, "-m", "lightserve.tools.merge_profile", str(path), *parts]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    try:
        async with asyncio.timeout(STOP_TIMEOUT_S):
            _, errors = await process.communicate()
    except TimeoutError:
        process.kill()
        return f"it took longer than {STOP_TIMEOUT_S:.0f} s"
    return "" if process.returncode == 0 else errors.decode(errors="replace").strip()[-500:] or "no reason is known"
