"""The port that the server listens at."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightserve.errors import ServerError

BACKLOG = 2048  # connections that wait to be accepted: a burst of that many clients must not be refused
# A client whose machine is gone says nothing, not even goodbye. It is noticed after a minute: by questions where it
# is our turn to wait, by what it does not acknowledge where we write. By default: after two hours, after 15 minutes.
KEEP_ALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 60_000}
_LISTEN = "0A"  # TCP_LISTEN in /proc/net/tcp


def listen(host: str, port: int, count: int) -> list[socket.socket]:
    """``count`` sockets that listen at one port, among which the kernel spreads connections; port 0 picks one."""
    first = bind(host, port)
    if count > 1:
        port = first.getsockname()[1]
        first.close()  # the port is free; to be shared, all its sockets must have said so before they were bound
        sockets = [_bind(host, port, is_shared=True) for _ in range(count)]
    else:
        sockets = [first]
    for sock in sockets:
        sock.listen(BACKLOG)
    return sockets


def bind(host: str, port: int) -> socket.socket:
    """A socket of its own at the port; whoever else is there, also one that would share, is an error with its name."""
    return _bind(host, port, is_shared=False)


def url_of(sock: socket.socket, is_https: bool = False) -> str:
    """Where a client on this machine finds it."""
    host, port = sock.getsockname()[:2]
    here = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    scheme = "https" if is_https else "http"
    return f"{scheme}://[{here}]:{port}" if ":" in here else f"{scheme}://{here}:{port}"


def is_local(host: str) -> bool:
    """Whether only this machine can reach the address."""
    _, address = _resolve(host, 0)
    return ipaddress.ip_address(address[0].partition("%")[0]).is_loopback


def raise_fd_limit() -> None:
    """As many open files as the system lets this user have: every client is one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # some systems call a limit infinite and refuse to set it
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _bind(host: str, port: int, is_shared: bool) -> socket.socket:
    family, address = _resolve(host, port)
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of the last run may linger
    _keep_alive(sock)
    if is_shared:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise ServerError(_why_not(host, port, error)) from error
    return sock


def _keep_alive(sock: socket.socket) -> None:
    """Of the connections: they inherit it. Systems differ in which of the times they let one set."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    """IPv4 where a name has both: clients that say 127.0.0.1 are more than those that say ::1."""
    try:
        found = socket.getaddrinfo(host.strip("[]") or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ServerError(f"host={host!r} is no address ({error.strerror}); use 127.0.0.1 or 0.0.0.0") from error
    family, _, _, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return family, address


def _why_not(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        holder = _holder_of(port)
        return f"port {port} is in use{f' by {holder}' if holder else ''}; stop that or choose another with --port"
    if error.errno == errno.EACCES:
        return f"port {port} needs privileges; choose one over 1023 with --port"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"host {host!r} is not an address of this machine; use 127.0.0.1, or 0.0.0.0 for all of them"
    return f"cannot listen at {host!r}, port {port}: {error.strerror}"


def _holder_of(port: int) -> str | None:
    """The process that listens there, as far as /proc shows it to this user."""
    wanted = {f"socket:[{inode}]" for inode in _inodes_of(port)}
    for fd in Path("/proc").glob("[0-9]*/fd/*") if wanted else ():
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(fd) in wanted:
                return _describe(fd.parent.parent)
    return None


def _describe(process: Path) -> str:
    """With its parent, which is the one to stop where several processes share a port."""
    command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    status = dict(line.split(":\t", 1) for line in (process / "status").read_text().splitlines() if ":\t" in line)
    return f"process {process.name}, child of {status['PPid']} ({command.strip()[:100]})"


def _inodes_of(port: int) -> Iterator[str]:
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        for line in table.read_text().splitlines()[1:] if table.is_file() else ():
            fields = line.split()  # slot, local address, remote address, state, ..., inode at 9
            if fields[3] == _LISTEN and int(fields[1].rsplit(":", 1)[1], 16) == port:
                yield fields[9]
