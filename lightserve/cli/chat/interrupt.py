"""Makes Ctrl-C end a blocking read of a socket at any moment.

Python raises KeyboardInterrupt when the read returns. If the signal comes just before the read begins, or in another
thread, nothing interrupts the read, and the next Ctrl-C would be needed. So the signal also wakes a thread, which shuts
the socket down.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def reads_end_with_ctrl_c(sock: socket.socket) -> Iterator[None]:
    """In the main thread only, which alone gets KeyboardInterrupt."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    woken, waker = socket.socketpair()
    with woken, waker:
        waker.setblocking(False)
        thread = threading.Thread(target=_shut_down_on_sigint, args=(woken, sock), daemon=True)
        before = signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        thread.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            waker.shutdown(socket.SHUT_WR)
            thread.join()


def _shut_down_on_sigint(woken: socket.socket, sock: socket.socket) -> None:
    while numbers := woken.recv(1):  # of signals; none once the other end is shut down
        if numbers[0] == signal.SIGINT:
            with contextlib.suppress(OSError):  # the server may have closed it
                sock.shutdown(socket.SHUT_RDWR)
