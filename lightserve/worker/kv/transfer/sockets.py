"""The transfer backend for TCP between machines and for unix sockets on one. It is always there."""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress

from torch import Tensor

from lightserve.errors import ServerError
from lightserve.links.tls import PeerContexts
from lightserve.utils import net
from lightserve.utils.logger import init_logger
from lightserve.worker.kv.transfer.base import Frame, FrameSize, Incoming, KvSink, Outgoing
from lightserve.worker.kv.transfer.framing import FrameStream, greet_receiver, greet_sender
from lightserve.worker.kv.transfer.pipe import ENDED, TIMEOUT_S, KvTransferError, Pipe, ReadTimeoutError, SocketPipe
from lightserve.worker.kv.transfer.transport import ReadableMemory, ReadableSender, ReadingReceiver

logger = init_logger(__name__)

CONNECTIONS = 4  # to each worker: one core copies some GB/s through a socket
IDLE_CHECK_S = 1.0  # how often a sender without work looks whether the other side has closed the connection
RETRY_S = 1.0  # an address that failed is left alone for so long
MAX_SENDERS = 256  # connections of a receiver
LOG_INTERVAL_S = 60.0


class SocketTransferBackend:
    def __init__(
        self,
        identity: bytes,
        secret: bytes,
        sizes: Sequence[FrameSize],
        tls: PeerContexts | None = None,
        memory: ReadableMemory | None = None,
    ) -> None:
        """``identity``: of what computes the KV, and of its layout. ``sizes``: by pool.

        ``tls``: encrypts what goes over TCP. ``memory``: receivers read it; None: blocks go through the connection.
        """
        self._identity = identity
        self._secret = secret
        self._tls = tls
        self._memory = memory
        self._sizes = sizes
        self._peers: dict[str, _Peer] = {}
        self._failed_s: dict[str, float] = {}  # by address
        self._lock = threading.Lock()
        self._senders = threading.Semaphore(MAX_SENDERS)
        self._logged_s = float("-inf")
        self._listener: socket.socket | None = None

    def register(self, chunks: Sequence[Tensor]) -> None:
        if self._memory is not None:
            self._memory.register(chunks)

    # receive

    def listen(self, address: str, sink: KvSink) -> None:
        self._listener = _listener(address)
        threading.Thread(target=self._accept, args=(self._listener, sink), daemon=True).start()

    def _accept(self, listener: socket.socket, sink: KvSink) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:  # closed
                return
            if not self._senders.acquire(blocking=False):
                sock.close()
                continue
            threading.Thread(target=self._serve, args=(sock, sink), daemon=True).start()

    def _serve(self, sock: socket.socket, sink: KvSink) -> None:
        pipe: Pipe | None = None
        try:
            host = _own_host(sock)
            pipe = self._pipe(sock, is_server=True)
            stream = greet_sender(pipe, self._secret_for(sock), self._identity, has_macs=self._tls is None)
            if self._memory is not None:
                stream.receiving = ReadingReceiver(pipe, self._memory, host)
            with closing(stream.receiving):
                while True:
                    frame, mac = stream.read_header()
                    self._receive(stream, frame, mac, sink)
        except (KvTransferError, OSError) as error:
            if str(error) != ENDED:
                self._log(f"KV of another engine was refused: {error}")
        finally:
            (pipe or sock).close()
            self._senders.release()

    def _receive(self, stream: FrameStream, frame: Frame, mac: bytes, sink: KvSink) -> None:
        if frame.pool >= len(self._sizes):
            raise KvTransferError(f"a frame is of pool {frame.pool}; there are {len(self._sizes)}")
        size = self._sizes[frame.pool]
        if not 0 < frame.num_blocks <= size.max_blocks:
            raise KvTransferError(f"a frame has {frame.num_blocks} blocks; the limit is {size.max_blocks}")
        incoming = sink.begin(frame)
        if incoming is None:
            stream.skip(frame, size.block_bytes)
            return
        try:
            stream.read_blocks(incoming.blocks)
            stream.check(frame, incoming.blocks, mac)
        except ReadTimeoutError as error:
            threading.Thread(target=_end_after, args=(error.wait, incoming), daemon=True).start()
            raise
        except BaseException:
            incoming.end(False)
            raise
        incoming.end(True)

    # send

    def push(self, address: str, outgoing: Outgoing) -> None:
        with self._lock:
            if time.monotonic() - self._failed_s.get(address, float("-inf")) < RETRY_S:
                outgoing.done(False)
                return
            try:
                peer = self._peers.get(address) or self._new_peer(address)
            except RuntimeError as error:  # no more threads can be started
                self._failed_s[address] = time.monotonic()
                self._log(f"KV cannot be sent to {address}: {error}")
                outgoing.done(False)
                return
            peer.outbox.put(outgoing)

    def _new_peer(self, address: str) -> _Peer:
        peer = self._peers[address] = _Peer(self, address)
        return peer

    def connect(self, address: str) -> FrameStream:
        sock = _connect(address)
        pipe: Pipe | None = None
        try:
            host = _own_host(sock)
            pipe = self._pipe(sock, is_server=False)
            stream = greet_receiver(pipe, self._secret_for(sock), self._identity, has_macs=self._tls is None)
            if self._memory is not None:
                stream.sending = ReadableSender(pipe, self._memory, host)
            return stream
        except BaseException:
            (pipe or sock).close()
            raise

    def _pipe(self, sock: socket.socket, is_server: bool) -> Pipe:
        if sock.family == socket.AF_UNIX:
            return SocketPipe(sock)
        if self._tls is None:
            if self._memory is not None:
                name = self._memory.transport
                raise KvTransferError(
                    f"kv_transport={name} needs --cluster_tls between machines: addresses need protection"
                )
            return SocketPipe(sock)
        from lightserve.worker.kv.transfer.tls import TlsPipe  # few need it

        return TlsPipe(sock, self._tls.server if is_server else self._tls.client, is_server)

    def _secret_for(self, sock: socket.socket) -> bytes:
        return b"" if sock.family == socket.AF_UNIX else self._secret

    def leave(self, peer: _Peer, error: Exception | None) -> None:
        """A sender of this peer ends. So do the others, and what they have not sent is lost."""
        with self._lock:
            if self._peers.get(peer.address) is peer:
                del self._peers[peer.address]
                now_s = time.monotonic()
                self._failed_s = {address: at_s for address, at_s in self._failed_s.items() if now_s - at_s < RETRY_S}
                if error is not None:
                    self._failed_s[peer.address] = now_s
        peer.is_closed = True
        with suppress(queue.Empty):
            while True:
                peer.outbox.get_nowait().done(False)
        if error is not None:
            self._log(f"KV cannot be sent to {peer.address}: {error}")

    def close(self) -> None:
        if self._listener is not None:
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        for peer in list(self._peers.values()):
            self.leave(peer, None)

    def _log(self, message: str) -> None:
        """Seldom: a sender that fails tries again with every request."""
        now_s = time.monotonic()
        if now_s - self._logged_s >= LOG_INTERVAL_S:
            self._logged_s = now_s
            logger.warning(message)


class _Peer:
    """A worker that gets frames, over several connections with a thread each."""

    def __init__(self, backend: SocketTransferBackend, address: str) -> None:
        self.address = address
        self.outbox: queue.SimpleQueue[Outgoing] = queue.SimpleQueue()
        self.is_closed = False
        self._backend = backend
        try:
            for _ in range(CONNECTIONS):
                threading.Thread(target=self._run, daemon=True).start()
        except RuntimeError:
            self.is_closed = True  # those that were started end
            raise

    def _run(self) -> None:
        stream: FrameStream | None = None
        error: Exception | None = None
        try:
            while not self.is_closed:
                try:
                    outgoing = self.outbox.get(timeout=IDLE_CHECK_S)
                except queue.Empty:
                    if stream is not None and stream.pipe.has_ended():
                        break
                    continue
                is_sent = False
                try:
                    stream = stream or self._backend.connect(self.address)
                    outgoing.wait()
                    stream.send(outgoing.frame, outgoing.blocks)
                    is_sent = True
                finally:
                    outgoing.done(is_sent)
        except (KvTransferError, OSError, ServerError, RuntimeError) as failure:  # RuntimeError: of a device
            error = failure
        finally:
            self._backend.leave(self, error)
            if stream is not None:
                stream.pipe.close()


def _end_after(wait: Callable[[], None], incoming: Incoming) -> None:
    """The frame is lost, but its memory is written to for a while."""
    wait()
    incoming.end(False)


def _listener(address: str) -> socket.socket:
    if address.startswith("unix://"):
        path = address.removeprefix("unix://")
        with suppress(FileNotFoundError):
            os.unlink(path)  # of a worker that died
        sock = socket.socket(socket.AF_UNIX)
        mask = os.umask(0o077)
        try:
            sock.bind(path)
        except OSError as error:
            raise ServerError(f"kv_listen={address}: this engine cannot listen there ({error.strerror})") from error
        finally:
            os.umask(mask)
    else:
        sock = net.bind(*net.parse_tcp(address))
    sock.listen()
    return sock


def _connect(address: str) -> socket.socket:
    if not address.startswith("unix://"):
        return socket.create_connection(net.parse_tcp(address), TIMEOUT_S)
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(TIMEOUT_S)
    try:
        sock.connect(address.removeprefix("unix://"))
    except OSError:
        sock.close()
        raise
    return sock


def _own_host(sock: socket.socket) -> str:
    """The address of this machine that the other side of a connection can reach."""
    if sock.family == socket.AF_UNIX:
        return "127.0.0.1"
    host: str = sock.getsockname()[0]
    return host
