"""A pipe that is encrypted. Python's TLS sends and reads one buffer at a time, and has its own timeout."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence

from lightserve.worker.kv.transfer.pipe import ENDED, TIMEOUT_S, KvTransferError, tune


class TlsPipe:
    def __init__(self, sock: socket.socket, context: ssl.SSLContext, is_server: bool) -> None:
        tune(sock)
        sock.settimeout(TIMEOUT_S)
        try:
            self._socket = context.wrap_socket(sock, server_side=is_server)
        except ssl.SSLError as error:
            reason = (error.reason or str(error)).lower().replace("_", " ")
            raise KvTransferError(
                f"TLS failed ({reason}): all engines need --cluster_tls and the same kv.pem"
            ) from error

    def send_all(self, buffers: Sequence[memoryview]) -> None:
        for buffer in buffers:
            self._socket.sendall(buffer)

    def read_into(self, buffers: Sequence[memoryview]) -> None:
        for buffer in buffers:
            count = 0
            while count < len(buffer):
                count += self._read(buffer[count:])

    def read_or_idle(self, into: memoryview) -> int:
        try:
            return self._read(into)
        except TimeoutError:
            return 0

    def has_ended(self) -> bool:
        self._socket.settimeout(0)
        try:
            self._socket.recv(1)
        except ssl.SSLWantReadError:
            return False
        except OSError:
            pass
        finally:
            self._socket.settimeout(TIMEOUT_S)
        return True

    def close(self) -> None:
        self._socket.close()

    def _read(self, into: memoryview) -> int:
        count = self._socket.recv_into(into)
        if not count:
            raise KvTransferError(ENDED)
        return count
