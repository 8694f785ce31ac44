"""A profile of a model worker: when steps are launched and collected, and what the device does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from lightserve.messages.step import Step, StepResult
from lightserve.messages.worker_calls import ProfileCommand, ProfileResult
from lightserve.utils.logger import init_logger
from lightserve.utils.trace_recorder import TraceRecorder
from lightserve.worker.rpc import GetResult, Launch

logger = init_logger(__name__)

LastWait = Callable[[], tuple[float, float] | None]  # begin and end


class DeviceTrace(Protocol):
    """What torch and the device do. Both methods are called from the same thread."""

    def start(self) -> None: ...

    def stop(self, path: str) -> None:
        """Write the trace."""


class WorkerProfiler:
    """Only one thread calls ``run``. While no profile runs, steps are launched as if it did not exist."""

    def __init__(
        self, rank: int, launch: Launch, device_trace: DeviceTrace | None = None, last_wait: LastWait = lambda: None
    ) -> None:
        """``last_wait``: when the last launch waited for the pipeline stage before."""
        self._launch = self._plain_launch = launch
        self._last_wait = last_wait
        self._name = f"model worker {rank}"
        self._rank = rank
        self._device_trace = device_trace
        self._recorder: TraceRecorder | None = None

    def launch(self, step: Step) -> GetResult:
        """Launch a step, and record it while a profile runs."""
        return self._launch(step)

    def run(self, command: ProfileCommand) -> ProfileResult:
        try:
            return self._start() if command.prefix is None else self._stop(command.prefix)
        except Exception as error:  # a profile that fails must not end the worker
            logger.warning("the profile failed: %s", error, exc_info=error)
            return ProfileResult(error=f"{self._name}: {type(error).__name__}: {error}")

    def _start(self) -> ProfileResult:
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
        paths = [f"{prefix}-worker-{self._rank}.part"]
        if self._device_trace is not None:
            paths.append(f"{prefix}-device-{self._rank}.part")
            self._device_trace.stop(paths[1])
        recorder.write(paths[0])
        return ProfileResult(paths)

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
