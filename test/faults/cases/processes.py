"""Processes that die, hang or receive invalid messages, under every workload."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace

import zmq

from test.api.test_faults import COMPLETE
from test.faults.case import Case
from test.faults.failing_worker import NAN_TOKEN_ID, POISON_PROMPT
from test.faults.harness import IDLE, LOAD, PREFILL, PREFILL_FLAGS, STREAMING, FaultContext, Workload
from test.faults.reactions import (
    HTTP_PROCESS_REPLACED,
    STREAMS_CONTINUE,
    UNHEALTHY_THEN_CONTINUES,
    Reaction,
    ends,
    resume_all,
    same_text,
    streams_continue,
)

Fault = Callable[[FaultContext], None]

FAILING_SERVER = "test.faults.failing_server"
HANGING_SERVER = "test.faults.hanging_server"
# Slow enough for a fault in the middle of a step. The cases of grammars call tools on the same server.
STEP = ("--null_step_ms", "20", "--tool_call_parser", "qwen3_coder")
ROLES = {"ls-router": "router", "ls-detokenizer": "detokenizer"}  # the server ends with them
CHANNELS = {"router": "router", "detokenization": "detokenizer"}
HTTP_IS_BACK = "a new HTTP process is ready"
WORKER_DIES = STREAMS_CONTINUE  # a replacement starts
WORKLOADS = (IDLE, STREAMING, PREFILL, LOAD)


def flags_of(workload: Workload) -> tuple[str, ...]:
    return PREFILL_FLAGS if workload is PREFILL else STEP


def send_signal(name: str, signum: signal.Signals) -> Fault:
    """Send a signal to the first process of that name."""
    return lambda context: context.server.processes()[name][0].send_signal(signum)


def ends_http_process(fault: Fault) -> Fault:
    """The fault, and wait until the next HTTP process is ready."""

    def run(context: FaultContext) -> None:
        before = context.server.log.count(HTTP_IS_BACK)
        fault(context)
        context.wait_until(lambda: context.server.log.count(HTTP_IS_BACK) > before)

    return run


def signal_launcher(signum: signal.Signals, times: int = 1) -> Fault:
    def fault(context: FaultContext) -> None:
        for time in range(times):
            context.wait_until(lambda time=time: context.server.log.count(f"{signum.name}: ") == time)  # type: ignore[misc]
            context.server.process.send_signal(signum)

    return fault


def send_nonsense(channel: str) -> Fault:
    """Send random bytes, as any process of this user could: other users cannot open the directory of the sockets."""

    def fault(context: FaultContext) -> None:
        with zmq.Context() as zmq_context, zmq_context.socket(zmq.PUSH) as sock:
            sock.connect(f"ipc://{context.running.run_directory / channel}")
            sock.send(context.random.randbytes(100))

    return fault


def send_poison(context: FaultContext) -> None:
    """A request that crashes the worker of ``failing_server``, and its replacement too."""
    context.statuses.append(context.complete({"prompt": POISON_PROMPT, "max_tokens": 4})[0])


def send_nan_token(context: FaultContext) -> None:
    """A request for which the worker of ``failing_server`` computes NaN."""
    status, response = context.client.post(COMPLETE, {"prompt": [NAN_TOKEN_ID], "max_tokens": 4})
    assert "numerical error" in response["error"]["message"]
    context.statuses.append(status)


def _only_that_one_fails(context: FaultContext) -> None:
    assert context.statuses == [500]
    streams_continue(context)


def _unanswered_then_continue(context: FaultContext) -> None:
    with context.open() as sock:
        sock.settimeout(1.0)
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        try:
            raise AssertionError(f"a stopped process sent {sock.recv(100)!r}")
        except TimeoutError:
            resume_all(context)
        sock.settimeout(context.deadline_s)
        assert sock.recv(100).startswith(b"HTTP/1.1 200")
    streams_continue(context)


def _worker_replaced(context: FaultContext) -> None:
    context.wait_until(lambda: context.health() == 503)
    streams_continue(context)
    assert "a new model worker is ready" in context.server.log


def _hanging_worker_replaced(context: FaultContext) -> None:
    _worker_replaced(context)
    assert "model worker 0 did not answer within" in context.server.log


def _served_without_launcher(context: FaultContext) -> None:
    streams_continue(context)
    resume_all(context)


def _drained(context: FaultContext) -> None:
    ends(0, "waiting up to").wait(context)
    assert all(stream.is_complete for stream in context.streams)


KILLS = [
    Case(
        f"kill -9 {name}, {workload.name}",
        send_signal(name, signal.SIGKILL),
        ends(1, f"{role} died (signal 9)"),
        during=workload,
        flags=flags_of(workload),
        is_long=(name, workload) != ("ls-router", STREAMING),
    )
    for name, role in ROLES.items()
    for workload in WORKLOADS
]
WORKER_KILLS = [
    Case(
        f"kill -9 ls-worker, {workload.name}",
        send_signal("ls-worker", signal.SIGKILL),
        WORKER_DIES,
        during=workload,
        flags=flags_of(workload),
        within_s=20.0,
        is_long=True,
        restarts=1,
    )
    for workload in WORKLOADS
]
HTTP_KILLS = [
    Case(
        f"kill -9 ls-httpserver, {workload.name}",
        ends_http_process(send_signal("ls-httpserver", signal.SIGKILL)),
        HTTP_PROCESS_REPLACED,
        during=workload,
        flags=flags_of(workload),
        is_long=workload is not STREAMING,
        restarts=1,
    )
    for workload in WORKLOADS
]
CRASHES = [
    Case(
        "worker crashes (SIGSEGV), streaming",
        send_signal("ls-worker", signal.SIGSEGV),
        WORKER_DIES,
        STREAMING,
        STEP,
        restarts=1,
    ),
    Case(
        "a request that workers die of, streaming",
        send_poison,
        Reaction("500 for it; streams go on, same text", _only_that_one_fails, same_text),
        STREAMING,
        STEP,
        within_s=30.0,
        program=FAILING_SERVER,
        restarts=2,
    ),
    Case(
        "logits that are no numbers, streaming",
        send_nan_token,
        Reaction("500 for it; streams go on, same text", _only_that_one_fails, same_text),
        STREAMING,
        STEP,
        program=FAILING_SERVER,
    ),
    Case(
        "kill -9 the second of two workers, streaming",
        send_signal("ls-worker-1", signal.SIGKILL),
        WORKER_DIES,
        STREAMING,
        (*STEP, "--tp", "2"),
        restarts=1,
    ),
    *(
        Case(
            f"nonsense for the {role}, streaming",
            send_nonsense(channel),
            ends(1, f"{role} died (exit code 1)"),
            STREAMING,
            STEP,
        )
        for channel, role in CHANNELS.items()
    ),
    Case(
        "nonsense for the httpserver 0, streaming",
        ends_http_process(send_nonsense("http-0")),
        HTTP_PROCESS_REPLACED,
        STREAMING,
        STEP,
        restarts=1,
    ),
]
HANGS = [
    *(
        Case(
            f"{name} is stopped, streaming",
            send_signal(name, signal.SIGSTOP),
            UNHEALTHY_THEN_CONTINUES,
            STREAMING,
            STEP,
            15.0,
        )
        for name in ("ls-router", "ls-detokenizer")
    ),
    Case(
        "ls-worker is stopped, streaming",
        send_signal("ls-worker", signal.SIGSTOP),
        Reaction("/health 503, another takes its place; streams go on, same text", _worker_replaced, same_text),
        STREAMING,
        (*STEP, "--step_timeout", "4"),
        within_s=20.0,
        restarts=1,
    ),
    Case(
        "a new worker is ready and hangs before it serves, streaming",
        send_signal("ls-worker", signal.SIGKILL),
        Reaction("/health 503, a third takes its place; streams go on, same text", _hanging_worker_replaced, same_text),
        STREAMING,
        STEP,
        within_s=60.0,
        program=HANGING_SERVER,
        restarts=2,
    ),
    Case(
        "ls-httpserver is stopped, streaming",
        send_signal("ls-httpserver", signal.SIGSTOP),
        Reaction("no answer; when it is back, streams go on, same text", _unanswered_then_continue, same_text),
        STREAMING,
        STEP,
    ),
    Case(
        "ls-httpserver hangs, streaming",
        ends_http_process(send_signal("ls-httpserver", signal.SIGSTOP)),
        HTTP_PROCESS_REPLACED,
        STREAMING,
        (*STEP, "--process_timeout", "4"),
        within_s=20.0,
        restarts=1,
    ),
    Case(
        "the launcher is stopped, streaming",
        lambda context: context.server.process.send_signal(signal.SIGSTOP),
        Reaction("streams go on without it, same text", _served_without_launcher, same_text),
        STREAMING,
        STEP,
    ),
]
SIGNALS = [
    Case(
        f"kill -9 the launcher, {workload.name}",
        lambda context: context.server.process.kill(),
        ends(-9, keeps_directory=True),
        workload,
        flags_of(workload),
    )
    for workload in (IDLE, STREAMING)
]
SIGNALS += [
    Case(
        "SIGTERM, streaming",
        signal_launcher(signal.SIGTERM),
        Reaction("streams end whole, exit code 0", _drained, ends_server=True),
        STREAMING,
        STEP,
    ),
    Case(
        "SIGTERM twice, streaming",
        signal_launcher(signal.SIGTERM, times=2),
        ends(143, "SIGTERM: stopped at once"),
        STREAMING,
        STEP,
    ),
    Case(
        "SIGINT twice, load",
        signal_launcher(signal.SIGINT, times=2),
        ends(130, "SIGINT: stopped at once"),
        LOAD,
        STEP,
    ),
    Case(
        "SIGTERM with half a second, streaming",
        signal_launcher(signal.SIGTERM),
        ends(0, "did not finish within"),
        STREAMING,
        (*STEP, "--drain_timeout", "0.5"),
    ),
]
LONG = [replace(case, is_long=True) for case in (*CRASHES, *HANGS, *SIGNALS)]
CASES = [*KILLS, *WORKER_KILLS, *HTTP_KILLS, *LONG]
