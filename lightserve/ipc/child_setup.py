"""What a process of the server tells the kernel when it begins: its signals, its name, and to end with its parent.

Apart from process.py, because processes that compile grammars and commands start faster without an event loop.
"""

from __future__ import annotations

import ctypes
import signal
import sys

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # the launcher decides what they mean
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15  # linux/prctl.h
_NAME_LEN = 15  # the kernel truncates longer names


def prepare_child(role: str, index: int) -> None:
    """Ignore stop signals, end with the parent, and have a name in ps.

    The launcher blocked the signals until now, so that they cannot kill a child that is importing.
    """
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    end_with_parent()
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_NAME, process_name(role, index).encode())


def end_with_parent() -> None:
    """The kernel kills this process when the thread that started it ends, even when Python no longer runs."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def process_name(role: str, index: int) -> str:
    """What ps shows: ls-router, ls-worker, ls-worker-1."""
    suffix = f"-{index}" if index else ""
    return f"ls-{role.split()[-1]}"[: _NAME_LEN - len(suffix)] + suffix
