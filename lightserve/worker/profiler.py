"""A profile of a model worker: when steps are launched and collected, and what the device does."""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from lightserve.messages.step import Step, StepResult
from lightserve.messages.worker_calls import ProfileChunk, ProfileCommand, ProfileResult
from lightserve.utils.logger import init_logger
from lightserve.utils.trace_recorder import TraceRecorder
from lightserve.worker.rpc import GetResult, Launch

logger = init_logger(__name__)

CHUNK_BYTES = 8 << 20  # of a file: its text becomes smaller by far, and goes over the link that steps take too
ZLIB_LEVEL = 1
KINDS: tuple[Literal["worker", "device"], ...] = ("worker", "device")

LastWait = Callable[[], tuple[float, float] | None]  # begin and end


class DeviceTrace(Protocol):
    """What torch and the device do. Both methods are called from the same thread."""

    def start(self) -> None: ...

    def stop(self, path: str) -> None:
        """Write the trace."""


class UnreadFile(NamedTuple):
    """On another node, until the router has read it."""

    path: Path
    kind: Literal["worker", "device"]
    num_read: int = 0  # bytes


class WorkerProfiler:
    """``run`` and ``read`` are called one after the other. While no profile runs, steps are launched as if it did not
    exist."""

    def __init__(
        self,
        rank: int,
        launch: Launch,
        device_trace: DeviceTrace | None = None,
        last_wait: LastWait = lambda: None,
        folder: str | None = None,
    ) -> None:
        """``last_wait``: when the last launch waited for the pipeline stage before.

        ``folder``: of files that the router reads by calls; None: it is on this machine, and says where they are.
        """
        self._launch = self._plain_launch = launch
        self._last_wait = last_wait
        self._name = f"model worker {rank}"
        self._rank = rank
        self._device_trace = device_trace
        self._recorder: TraceRecorder | None = None
        self._folder = folder
        self._unread: deque[UnreadFile] = deque()

    def launch(self, step: Step) -> GetResult:
        """Launch a step, and record it while a profile runs."""
        return self._launch(step)

    def run(self, command: ProfileCommand) -> ProfileResult:
        try:
            return self._start() if command.prefix is None else self._stop(command.prefix)
        except Exception as error:  # a profile that fails must not end the worker
            logger.warning("the profile failed: %s", error, exc_info=error)
            return ProfileResult(error=f"{self._name}: {type(error).__name__}: {error}")

    def read(self) -> ProfileChunk:
        """The next piece for the router."""
        while self._unread:
            path, kind, num_read = self._unread[0]
            with path.open("rb") as file:
                file.seek(num_read)
                data = file.read(CHUNK_BYTES)
            if data:
                self._unread[0] = UnreadFile(path, kind, num_read + len(data))
                return ProfileChunk(zlib.compress(data, ZLIB_LEVEL), kind)
            self._unread.popleft()
            path.unlink()
        return ProfileChunk()

    def _start(self) -> ProfileResult:
        while self._unread:  # the router has not read the last one
            self._unread.popleft().path.unlink(missing_ok=True)
        self._end()  # the router may have lost the end of the last one
        if self._device_trace is not None:
            self._device_trace.start()
        self._recorder = TraceRecorder(self._name)
        self._launch = _recorded(self._plain_launch, self._recorder, self._last_wait)
        return ProfileResult()

    def _stop(self, prefix: str) -> ProfileResult:
        recorder = self._end()
        if recorder is None:
            return ProfileResult(error=f"{self._name} was started after the profile")
        if self._folder is not None:
            prefix = f"{self._folder}/profile"
        paths = [f"{prefix}-worker-{self._rank}.part"]
        if self._device_trace is not None:
            paths.append(f"{prefix}-device-{self._rank}.part")
            self._device_trace.stop(paths[1])
        recorder.write(paths[0])
        if self._folder is None:
            return ProfileResult(paths)
        self._unread += [UnreadFile(Path(path), kind) for path, kind in zip(paths, KINDS, strict=False)]
        return ProfileResult(num_unread=len(paths))

    def _end(self) -> TraceRecorder | None:
        recorder, self._recorder = self._recorder, None
        self._launch = self._plain_launch
        return recorder


def _recorded(launch: Launch, recorder: TraceRecorder, last_wait: LastWait) -> Launch:
    """The same function, which records its steps."""

    def launch_step(step: Step) -> GetResult:
        begin_s = time.monotonic()
        collect = launch(step)
        tokens = step.num_tokens
        recorder.add("launch", begin_s, time.monotonic(), requests=step.num_rows, tokens=tokens, new=len(step.new))
        waited_s = last_wait()
        if waited_s is not None and waited_s[0] >= begin_s:
            recorder.add("wait for hidden states", *waited_s)

        def collect_step() -> StepResult:
            begin_s = time.monotonic()
            result = collect()
            recorder.add("wait for tokens", begin_s, time.monotonic(), tokens=len(result.tokens))
            return result

        return collect_step

    return launch_step
