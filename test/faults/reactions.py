"""The reactions to a fault. Each waits until it occurs and raises if something else does."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from test.faults.harness import FaultContext
from test.faults.resource_snapshot import processes_of

NOTIFY_TIMEOUT_S = 5.0  # until a client is notified that its response will not come
EXIT_TIMEOUT_S = 10.0  # until every process of a server that ends has exited


@dataclass(frozen=True, slots=True)
class Reaction:
    words: str  # the text in the table
    wait: Callable[[FaultContext], None]  # its duration is measured
    verify: Callable[[FaultContext], None] = lambda _: None  # checks that are not part of the measured time
    ends_server: bool = False
    keeps_directory: bool = False  # the killed launcher cannot remove it; the next server does


def ends(exit_code: int, says: str = "", keeps_directory: bool = False) -> Reaction:
    """The server ends: clients are notified, every process exits, and the log contains ``says``."""

    def wait(context: FaultContext) -> None:
        begin_s = time.monotonic()
        for stream in context.streams:
            stream.read_all()
        notified_s = time.monotonic() - begin_s
        assert context.server.process.wait(context.deadline_s) == exit_code
        context.wait_until(lambda: not processes_of(context.running.base))
        assert says in context.server.log, context.server.log[-2000:]
        limit_s = NOTIFY_TIMEOUT_S * context.deadline_s / EXIT_TIMEOUT_S
        assert notified_s < limit_s, f"clients were notified after {notified_s:.1f} s"

    words = f"clients get an error, all processes exit, exit code {exit_code}"
    return Reaction(words, wait, ends_server=True, keeps_directory=keeps_directory)


def streams_continue(context: FaultContext) -> None:
    """Every response in flight completes."""
    for stream in context.streams:
        stream.read_all()
        assert stream.is_complete, stream.seen[-500:]


def same_text(context: FaultContext) -> None:
    """The texts are the same as without the fault: repeated requests give the same responses."""
    again = [context.stream(**stream.body) for stream in context.streams]
    for stream, other in zip(context.streams, again, strict=True):
        other.read_all()
        assert other.is_complete, other.seen[-500:]
        assert stream.text == other.text, f"then {stream.text!r}\nnow  {other.text!r}"


STREAMS_CONTINUE = Reaction("streams go on, same text", streams_continue, same_text)


def _hang_then_continue(context: FaultContext) -> None:
    context.wait_until(lambda: context.health() == 503)
    resume_all(context)
    streams_continue(context)


UNHEALTHY_THEN_CONTINUES = Reaction(
    "/health 503; when it is back, streams go on, same text", _hang_then_continue, same_text
)


def _http_process_replaced(context: FaultContext) -> None:
    for stream in context.streams:
        stream.read_all()
        assert not stream.is_complete
    context.client.close()  # it is connected to the process that died
    assert context.health() == 200


HTTP_PROCESS_REPLACED = Reaction("its streams end; another one serves in its place", _http_process_replaced)


def resume_all(context: FaultContext) -> None:
    for process in processes_of(context.running.base):
        with contextlib.suppress(psutil.NoSuchProcess):  # the supervisor may have replaced it
            process.resume()


def _aborted(context: FaultContext) -> None:
    context.wait_until(lambda: context.load() == 0)


ABORTED = Reaction("aborted", _aborted)


def _others_served(context: FaultContext) -> None:
    assert context.health() == 200
    assert context.complete_text({"prompt": [501, 502, 503], "max_tokens": 4})


OTHERS_SERVED = Reaction("others are served", _others_served)


def responds(*statuses: int) -> Reaction:
    """The fault's requests got exactly these statuses."""

    def wait(context: FaultContext) -> None:
        assert set(context.statuses) == set(statuses), context.statuses
        _others_served(context)

    return Reaction(" or ".join(map(str, statuses)), wait)
