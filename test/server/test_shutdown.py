"""What the signals mean to a server. How it ends is in test_api_server.py."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import termios

WAITS_FOR_A_SIGNAL = """
import asyncio
from lightserve.server.shutdown import stop_signals

async def main():
    signals = stop_signals()
    print("waits", flush=True)
    print((await signals.get()).name, flush=True)

asyncio.run(main())
"""


def test_a_server_ends_when_its_terminal_is_closed_and_not_before() -> None:
    master, slave = os.openpty()

    def take_terminal() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup, which the server would respect
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)

    with subprocess.Popen(
        [sys.executable, "-c", WAITS_FOR_A_SIGNAL],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=take_terminal,
    ) as process:
        os.close(slave)
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "waits\n"
        process.send_signal(signal.SIGHUP)
        assert "SIGHUP: this process reads its flags and files only at the start" in process.stderr.readline()

        os.close(master)

        assert process.stdout.readline() == "SIGHUP\n"
