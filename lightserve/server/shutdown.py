"""How a server ends: by a signal, after which requests may finish, or because a process died."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

from lightserve.ipc.process import EXIT_CONFIG_ERROR, EXIT_CRASH
from lightserve.messages.control import Drain, EngineDied
from lightserve.server.banner import print_error, print_line
from lightserve.server.child_process import ChildDiedError
from lightserve.server.process_group import ProcessGroup

SHUTDOWN_GRACE_S = 3.0  # for the HTTP processes to send their clients an error
ENDED = "the server has ended: all of its processes have exited"
SIGNAL_EXIT_BASE = 128  # a process that ends by signal n exits with 128 + n


class StopNowError(Exception):
    """A signal that ends the server at once."""

    def __init__(self, signum: signal.Signals) -> None:
        super().__init__(signum)
        self.signum = signum


def _reload_nothing() -> None:
    print_line("SIGHUP: this process reads its flags and files only at the start; to change them, restart it")


def stop_signals(reload: Callable[[], None] = _reload_nothing) -> asyncio.Queue[signal.Signals]:
    """A queue of the stop signals that arrive from now on. SIGHUP is one only if a terminal was closed."""
    signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, signals.put_nowait, signum)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup ignores it
        loop.add_signal_handler(signal.SIGHUP, _hang_up, signals, _has_terminal(), reload)
    return signals


def _hang_up(signals: asyncio.Queue[signal.Signals], had_terminal: bool, reload: Callable[[], None]) -> None:
    """The server ends with its terminal. Without one, an operator means that it should read its files again."""
    if had_terminal and not _has_terminal():
        signals.put_nowait(signal.SIGHUP)
    else:
        reload()


def _has_terminal() -> bool:
    """Whether this process has a controlling terminal. The kernel takes it away before it sends SIGHUP."""
    try:
        os.close(os.open(os.ctermid(), os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


async def drain_engine(processes: ProcessGroup, timeout_s: float) -> None:
    """Let the requests of gateways finish. After ``timeout_s`` the link ends, and they go on in other engines."""
    if not await processes.drain_engines(timeout_s):
        print_line(f"some requests did not finish within {timeout_s:g} s (--drain_timeout); gateways move them")


async def drain(processes: ProcessGroup, timeout_s: float) -> None:
    """Refuse new requests and let the running ones finish; after ``timeout_s`` they end with an error."""
    if not await processes.drain_httpservers(Drain(), timeout_s=timeout_s):
        print_line(f"some requests did not finish within {timeout_s:g} s (--drain_timeout); they end with an error")
        died = EngineDied("the server was stopped")
        await processes.drain_httpservers(died, Drain(), timeout_s=SHUTDOWN_GRACE_S)


async def report_failure(errors: ExceptionGroup, processes: ProcessGroup, is_serving: bool) -> int:
    """Print why the server ends and inform the clients. Return the exit code."""
    match errors.exceptions[0]:
        case StopNowError() as stop:
            print_line(f"{stop.signum.name}: stopped at once")
            return SIGNAL_EXIT_BASE + stop.signum
        case ChildDiedError() as died:
            return await _report_death(await processes.root_cause(died), processes, is_serving)
        case _:
            raise errors


async def _report_death(died: ChildDiedError, processes: ProcessGroup, is_serving: bool) -> int:
    if not is_serving and died.exit_code == EXIT_CONFIG_ERROR:
        print_error(died.child.exit_message or died)
        return EXIT_CONFIG_ERROR
    print_error(died)
    if is_serving:  # clients get the role only: the exit message may contain a path
        message = EngineDied(f"the server is going down: its {died.child.role} died")
        await processes.drain_httpservers(message, Drain(), timeout_s=SHUTDOWN_GRACE_S)
    return EXIT_CRASH
