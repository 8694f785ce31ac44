"""Deaths while a trainer has paused the server or put it to sleep: --enable_rl."""

from __future__ import annotations

import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from test.faults.case import Case
from test.faults.cases.processes import send_signal
from test.faults.harness import STREAMING, FaultContext
from test.faults.reactions import STREAMS_CONTINUE

FLAGS = ("--enable_rl", "--null_step_ms", "5")
WORKER_IS_BACK = "a new model worker is ready"
SLEEP_S = 60.0  # the worker stops and starts
kill_worker = send_signal("ls-worker", signal.SIGKILL)


def post(context: FaultContext, path: str) -> None:
    status, _ = context.client.post(path, {})
    assert status == 200, path


def paused(fault: Callable[[FaultContext], None]) -> Callable[[FaultContext], None]:
    """The fault while requests are paused. They go on when another worker is there."""

    def run(context: FaultContext) -> None:
        post(context, "/pause?mode=keep")
        before = context.server.log.count(WORKER_IS_BACK)
        fault(context)
        context.wait_until(lambda: context.server.log.count(WORKER_IS_BACK) > before)
        post(context, "/resume")

    return run


def sleep_and_wake(context: FaultContext) -> None:
    post(context, "/sleep?mode=keep")
    post(context, "/wake_up")


def die_while_waking(context: FaultContext) -> None:
    post(context, "/sleep?mode=keep")
    with ThreadPoolExecutor(1) as clients:
        waking = clients.submit(post, context, "/wake_up")
        context.wait_until(lambda: "ls-worker" in context.server.processes())
        kill_worker(context)
        waking.result()


CASES = [
    Case(
        "kill -9 model worker, paused by a trainer",
        paused(kill_worker),
        STREAMS_CONTINUE,
        during=STREAMING,
        flags=FLAGS,
        restarts=1,
    ),
    Case("a trainer's sleep", sleep_and_wake, STREAMS_CONTINUE, during=STREAMING, flags=FLAGS, within_s=SLEEP_S),
    Case(
        "kill -9 model worker, waking up",
        die_while_waking,
        STREAMS_CONTINUE,
        during=STREAMING,
        flags=FLAGS,
        restarts=1,
        within_s=SLEEP_S,
    ),
]
