"""How a server ends: by a signal, after which requests may finish, or because a process died."""

from __future__ import annotations

import asyncio
import signal

from lightserve.io_struct import Drain, EngineDied
from lightserve.server.banner import print_error, print_line
from lightserve.server.child_process import ChildDiedError
from lightserve.server.process_group import ProcessGroup
from lightserve.utils.process import EXIT_CONFIG_ERROR, EXIT_CRASH, STOP_SIGNALS

SHUTDOWN_GRACE_S = 3.0  # for the HTTP processes to send their clients an error
SIGNAL_EXIT_BASE = 128  # a process that ends by signal n exits with 128 + n


class StopNowError(Exception):
    """A signal that ends the server at once."""

    def __init__(self, signum: signal.Signals) -> None:
        super().__init__(signum)
        self.signum = signum


def stop_signals() -> asyncio.Queue[signal.Signals]:
    """A queue of the stop signals that arrive from now on."""
    signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
    for signum in STOP_SIGNALS:
        if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:  # nohup ignores SIGHUP
            asyncio.get_running_loop().add_signal_handler(signum, signals.put_nowait, signum)
    return signals


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
