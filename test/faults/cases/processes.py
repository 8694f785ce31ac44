"""Processes that die, hang or hear nonsense, in every situation."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace

import zmq

from test.api.test_faults import COMPLETE
from test.faults.case import Case
from test.faults.failing_worker import POISON, SPOILT_ID
from test.faults.reactions import STREAMS_GO_ON, UNHEALTHY_THEN_GOES_ON, Reaction, ends, go_on, resume_all, same_text
from test.faults.scene import IDLE, LOAD, PREFILL, PREFILL_FLAGS, STREAMING, Scene, Situation

Fault = Callable[[Scene], None]

FAILING_SERVER = "test.faults.failing_server"
STEP = ("--null_step_ms", "20")  # slow enough to be met in the middle
ROLES = {"ls-router": "router", "ls-detokenizer": "detokenizer", "ls-httpserver": "httpserver 0"}
CHANNELS = {"router": "router", "detokenization": "detokenizer", "http-0": "httpserver 0"}
WORKER_DIES = STREAMS_GO_ON  # another one takes its place
SITUATIONS = (IDLE, STREAMING, PREFILL, LOAD)


def flags_of(situation: Situation) -> tuple[str, ...]:
    return PREFILL_FLAGS if situation is PREFILL else STEP


def send_signal(name: str, signum: signal.Signals) -> Fault:
    """To the first process of that name."""
    return lambda scene: scene.server.processes()[name][0].send_signal(signum)


def signal_launcher(signum: signal.Signals, times: int = 1) -> Fault:
    def fault(scene: Scene) -> None:
        for time in range(times):
            scene.wait_until(lambda time=time: scene.server.log.count(f"{signum.name}: ") == time)  # type: ignore[misc]
            scene.server.process.send_signal(signum)

    return fault


def send_nonsense(channel: str) -> Fault:
    """What any process of this user could send: the sockets are in a folder that others cannot open."""

    def fault(scene: Scene) -> None:
        with zmq.Context() as context, context.socket(zmq.PUSH) as sock:
            sock.connect(f"ipc://{scene.running.run_directory / channel}")
            sock.send(scene.random.randbytes(100))

    return fault


def poison(scene: Scene) -> None:
    """A request on which the worker of ``failing_server`` raises, and the next one too."""
    scene.statuses.append(scene.complete({"prompt": POISON, "max_tokens": 4})[0])


def spoil(scene: Scene) -> None:
    """A request for which the model of ``failing_server`` has no numbers."""
    status, answer = scene.client.post(COMPLETE, {"prompt": [SPOILT_ID], "max_tokens": 4})
    assert "numerical error" in answer["error"]["message"]
    scene.statuses.append(status)


def _only_that_one_fails(scene: Scene) -> None:
    assert scene.statuses == [500]
    go_on(scene)


def _unanswered_then_go_on(scene: Scene) -> None:
    with scene.open() as sock:
        sock.settimeout(1.0)
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        try:
            raise AssertionError(f"a process that is stopped said {sock.recv(100)!r}")
        except TimeoutError:
            resume_all(scene)
        sock.settimeout(scene.deadline_s)
        assert sock.recv(100).startswith(b"HTTP/1.1 200")
    go_on(scene)


def _worker_replaced(scene: Scene) -> None:
    scene.wait_until(lambda: scene.health() == 503)
    go_on(scene)
    assert "a new model worker is ready" in scene.server.log


def _served_without_launcher(scene: Scene) -> None:
    go_on(scene)
    resume_all(scene)


def _drained(scene: Scene) -> None:
    ends(0, "waiting up to").wait(scene)
    assert all(stream.is_whole for stream in scene.streams)


KILLS = [
    Case(
        f"kill -9 {name}, {situation.name}",
        send_signal(name, signal.SIGKILL),
        ends(1, f"{role} died (signal 9)"),
        during=situation,
        flags=flags_of(situation),
        is_long=(name, situation) != ("ls-router", STREAMING),
    )
    for name, role in ROLES.items()
    for situation in SITUATIONS
]
WORKER_KILLS = [
    Case(
        f"kill -9 ls-worker, {situation.name}",
        send_signal("ls-worker", signal.SIGKILL),
        WORKER_DIES,
        during=situation,
        flags=flags_of(situation),
        within_s=20.0,
        is_long=True,
        restarts=1,
    )
    for situation in SITUATIONS
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
        poison,
        Reaction("500 for it; streams go on, same text", _only_that_one_fails, same_text),
        STREAMING,
        STEP,
        within_s=30.0,
        program=FAILING_SERVER,
        restarts=2,
    ),
    Case(
        "logits that are no numbers, streaming",
        spoil,
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
]
HANGS = [
    *(
        Case(
            f"{name} is stopped, streaming",
            send_signal(name, signal.SIGSTOP),
            UNHEALTHY_THEN_GOES_ON,
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
        "ls-httpserver is stopped, streaming",
        send_signal("ls-httpserver", signal.SIGSTOP),
        Reaction("no answer; when it is back, streams go on, same text", _unanswered_then_go_on, same_text),
        STREAMING,
        STEP,
    ),
    Case(
        "the launcher is stopped, streaming",
        lambda scene: scene.server.process.send_signal(signal.SIGSTOP),
        Reaction("streams go on without it, same text", _served_without_launcher, same_text),
        STREAMING,
        STEP,
    ),
]
SIGNALS = [
    Case(
        f"kill -9 the launcher, {situation.name}",
        lambda scene: scene.server.process.kill(),
        ends(-9, leaves_directory=True),
        situation,
        flags_of(situation),
    )
    for situation in (IDLE, STREAMING)
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
CASES = [*KILLS, *WORKER_KILLS, *LONG]
