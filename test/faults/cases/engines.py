"""Several engines behind one port (--dp): one of them dies or hangs, the others continue its requests."""

from __future__ import annotations

import signal
from dataclasses import replace

from test.faults.case import Case
from test.faults.cases.processes import (
    FAILING_SERVER,
    STEP,
    Fault,
    _only_that_one_fails,
    ends_http_process,
    send_poison,
    send_signal,
)
from test.faults.harness import LOAD, PREFILL, PREFILL_FLAGS, STREAMING, FaultContext
from test.faults.reactions import HTTP_PROCESS_REPLACED, Reaction, ends, resume_all, same_text, streams_continue

TWO = ("--dp", "2")


def kill_router(number: int) -> Fault:
    """Kill the router of an engine, and wait until the engine is back."""
    name = "ls-router" if number == 0 else f"ls-router-{number}"

    def fault(context: FaultContext) -> None:
        context.wait_until(lambda: name in context.server.processes())
        before = context.server.log.count("is back")
        send_signal(name, signal.SIGKILL)(context)
        context.wait_until(lambda: context.server.log.count("is back") > before)

    return fault


def kill_all_routers(context: FaultContext) -> None:
    before = context.server.log.count("is back")
    for name in ("ls-router", "ls-router-1"):
        send_signal(name, signal.SIGKILL)(context)
    context.wait_until(lambda: context.server.log.count("is back") >= before + 2)


def _continue_elsewhere(context: FaultContext) -> None:
    """The server stays healthy, and the process that hangs is not needed."""
    streams_continue(context)
    assert context.health() == 200
    resume_all(context)


GO_ON = Reaction("streams go on in other engines, same text", streams_continue, same_text)
CASES = [
    Case("kill -9 a router of two, streaming", kill_router(1), GO_ON, STREAMING, (*STEP, *TWO), 20.0, restarts=1),
    Case(
        "kill -9 a router of two, prefill",
        kill_router(0),
        GO_ON,
        PREFILL,
        (*PREFILL_FLAGS, *TWO),
        30.0,
        True,
        restarts=1,
    ),
    Case("kill -9 a router of two, load", kill_router(0), GO_ON, LOAD, (*STEP, *TWO), 30.0, True, restarts=1),
    Case("kill -9 both routers, streaming", kill_all_routers, GO_ON, STREAMING, (*STEP, *TWO), 30.0, True, restarts=1),
    Case(
        "kill -9 a worker of two, streaming",
        send_signal("ls-worker-1", signal.SIGKILL),
        GO_ON,
        STREAMING,
        (*STEP, *TWO),
        20.0,
        is_long=True,
        restarts=1,
    ),
    Case(
        "a router of two is stopped, streaming",
        send_signal("ls-router-1", signal.SIGSTOP),
        replace(GO_ON, wait=_continue_elsewhere),
        STREAMING,
        (*STEP, *TWO),
        30.0,
        is_long=True,
    ),
    Case(
        "a request that workers die of, with two engines",
        send_poison,
        Reaction("that request gets 500, streams go on, same text", _only_that_one_fails, same_text),
        STREAMING,
        (*STEP, *TWO),
        30.0,
        is_long=True,
        program=FAILING_SERVER,
        restarts=2,
    ),
    Case(
        "kill -9 ls-httpserver of two engines, streaming",
        ends_http_process(send_signal("ls-httpserver", signal.SIGKILL)),
        HTTP_PROCESS_REPLACED,
        STREAMING,
        (*STEP, *TWO),
        is_long=True,
        restarts=1,
    ),
    Case(
        "kill -9 ls-dispatcher, streaming",
        send_signal("ls-dispatcher", signal.SIGKILL),
        ends(1, "dispatcher died (signal 9)"),
        STREAMING,
        (*STEP, *TWO),
        is_long=True,
    ),
]
