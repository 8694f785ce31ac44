"""Ctrl-C while a socket is read."""

from __future__ import annotations

import signal
import socket
import sys
import threading

import pytest

from lightserve.cli.chat.interrupt import reads_end_with_ctrl_c
from test.waiting import wait_until


def read(sock: socket.socket) -> bytes:
    return sock.recv(1)


def read_until_ctrl_c(sock: socket.socket, sender: threading.Thread) -> None:
    with reads_end_with_ctrl_c(sock):
        sender.start()
        read(sock)


def test_a_signal_that_does_not_interrupt_the_read_ends_it_too() -> None:
    """A signal in another thread does not interrupt it, like one that comes just before the read begins."""
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("only the main thread gets KeyboardInterrupt")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    main = threading.main_thread().ident
    ours, theirs = socket.socketpair()

    def interrupt() -> None:
        wait_until(lambda: sys._current_frames()[main or 0].f_code is read.__code__)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    sender = threading.Thread(target=interrupt)
    with ours, theirs:
        ours.settimeout(60)  # after which Python would raise it too
        with pytest.raises(KeyboardInterrupt):
            read_until_ctrl_c(ours, sender)
        theirs.setblocking(False)
        assert theirs.recv(1) == b""  # it was shut down
    sender.join()
    signal.signal(signal.SIGINT, before)
    assert signal.set_wakeup_fd(-1) == -1


def test_other_threads_read_as_usual() -> None:
    ours, theirs = socket.socketpair()
    found: list[bytes] = []

    def run() -> None:
        with reads_end_with_ctrl_c(ours):
            found.append(read(ours))

    with ours, theirs:
        theirs.sendall(b"x")
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()

    assert found == [b"x"]
