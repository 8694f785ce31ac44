"""Ports that the server listens on, and addresses that it connects to."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import os
import resource
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from lightserve.errors import ServerError

BACKLOG = 2048  # connections that wait to be accepted; the kernel refuses a burst of more
# A client whose machine lost power closes nothing. These settings detect it after a minute: by keep-alive probes while
# we wait for it, by missing acknowledgements while we send. The defaults are two hours and 15 minutes.
KEEP_ALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 60_000}
REDIS_PORT = 6379
_LISTEN = "0A"  # TCP_LISTEN in /proc/net/tcp
_SIOCGIFADDR = 0x8915  # linux/sockios.h


def listen(host: str, port: int, count: int) -> list[socket.socket]:
    """``count`` sockets that listen on one port; the kernel distributes connections among them. 0: any free port."""
    first = bind(host, port)
    if count > 1:
        port = first.getsockname()[1]
        first.close()  # the port is free; every socket that shares it must set SO_REUSEPORT before bind
        sockets = [_bind(host, port, is_shared=True) for _ in range(count)]
    else:
        sockets = [first]
    for sock in sockets:
        sock.listen(BACKLOG)
    return sockets


def bind(host: str, port: int) -> socket.socket:
    """Bind a socket to the port. If another process uses it, even with SO_REUSEPORT, the ServerError names it."""
    return _bind(host, port, is_shared=False)


def url_of(sock: socket.socket, is_https: bool = False) -> str:
    """The URL for a client on this machine."""
    host, port = sock.getsockname()[:2]
    here = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    scheme = "https" if is_https else "http"
    return f"{scheme}://[{here}]:{port}" if ":" in here else f"{scheme}://{here}:{port}"


def parse_tcp(text: str) -> tuple[str, int]:
    """Host and port of ``tcp://HOST:PORT``, or ValueError."""
    url = urlsplit(text)
    if url.scheme != "tcp" or not url.hostname or url.username is not None or url.path or url.query or url.fragment:
        raise ValueError("not tcp://HOST:PORT")
    if not url.port:  # it raises ValueError for one above 65535
        raise ValueError("the port must be from 1 to 65535")
    return url.hostname, url.port


def numeric_tcp(host: str, port: int) -> str:
    """``tcp://IP:PORT`` of a host name. ZMQ resolves names only where it connects, not where it listens."""
    _, address = _resolve(host, port)
    return tcp_address(address[0], port)


def tcp_address(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def is_local(host: str) -> bool:
    """Whether the address is reachable from this machine only."""
    _, address = _resolve(host, 0)
    return ipaddress.ip_address(address[0].partition("%")[0]).is_loopback


def interface_to(host: str) -> str | None:
    """The network interface of this machine from which packets to ``host`` go; of its own address: where it is.

    None if the system does not say it.
    """
    local_address = ipaddress.ip_address(address_to(host).partition("%")[0])
    return next(
        (name for name, interface_address in _interface_addresses() if interface_address == local_address), None
    )


def address_to(host: str) -> str:
    """The address of this machine from which packets to ``host`` go."""
    family, address = _resolve(host, 1)
    with socket.socket(family, socket.SOCK_DGRAM) as sock:  # connecting it sends nothing
        try:
            sock.connect(address)
        except OSError as error:
            raise ServerError(f"{host} cannot be reached from this machine ({error.strerror})") from error
        local_address: str = sock.getsockname()[0]
    return local_address


def _interface_addresses() -> Iterator[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]]:
    if sys.platform != "linux":
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no IPv4 address
                ifreq = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()))
                yield name, ipaddress.ip_address(ifreq[20:24])
    table = Path("/proc/net/if_inet6")
    for line in table.read_text().splitlines() if table.is_file() else ():
        address, *_, name = line.split()
        yield name, ipaddress.ip_address(bytes.fromhex(address))


def raise_fd_limit() -> None:
    """Raise the limit of open files to the hard limit: every client connection is one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # some systems report an infinite limit and refuse to set it
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _bind(host: str, port: int, is_shared: bool) -> socket.socket:
    family, address = _resolve(host, port)
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of the last run may be in TIME_WAIT
    _keep_alive(sock)
    if is_shared:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise ServerError(_bind_error(host, port, error)) from error
    return sock


def _keep_alive(sock: socket.socket) -> None:
    """Accepted connections inherit these options. Not every system has all of them."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    """Prefer IPv4 if a name has both: more clients use 127.0.0.1 than ::1."""
    try:
        addresses = socket.getaddrinfo(host.strip("[]") or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ServerError(
            f"host {host!r} is not an address ({error.strerror}); set --host to 127.0.0.1 or 0.0.0.0"
        ) from error
    family, _, _, _, address = min(addresses, key=lambda entry: entry[0] != socket.AF_INET)
    return family, address


def _bind_error(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        holder = _holder_of(port)
        return f"port {port} is in use{f' by {holder}' if holder else ''}; stop it or set another --port"
    if error.errno == errno.EACCES:
        return f"port {port} needs privileges; set --port to one above 1023"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"host {host!r} is not an address of this machine; set --host to 127.0.0.1, or 0.0.0.0 for all"
    return f"cannot listen on {host!r}, port {port}: {error.strerror}"


def _holder_of(port: int) -> str | None:
    """The process that listens on the port, if /proc shows it to this user."""
    wanted = {f"socket:[{inode}]" for inode in _inodes_of(port)}
    for fd in Path("/proc").glob("[0-9]*/fd/*") if wanted else ():
        with contextlib.suppress(OSError):  # closed in the meantime
            if os.readlink(fd) in wanted:
                return _describe(fd.parent.parent)
    return None


def _describe(process: Path) -> str:
    """The process with its parent: where several processes share a port, the parent is the one to stop."""
    command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    status = dict(line.split(":\t", 1) for line in (process / "status").read_text().splitlines() if ":\t" in line)
    return f"process {process.name}, child of {status['PPid']} ({command.strip()[:100]})"


def _inodes_of(port: int) -> Iterator[str]:
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        for line in table.read_text().splitlines()[1:] if table.is_file() else ():
            fields = line.split()  # slot, local address, remote address, state, ..., inode at 9
            if fields[3] == _LISTEN and int(fields[1].rsplit(":", 1)[1], 16) == port:
                yield fields[9]


class RedisAddress(NamedTuple):
    host: str
    port: int = REDIS_PORT
    db: int = 0
    user: str | None = None
    password: str | None = None
    has_tls: bool = False
    socket_path: str | None = None  # a unix socket, instead of host and port

    @property
    def name(self) -> str:
        """For logs: without the password."""
        return self.socket_path or f"{self.host}:{self.port}"

    def login(self) -> list[tuple[bytes, ...]]:
        """The commands that begin a connection."""
        commands: list[tuple[bytes, ...]] = []
        if self.password is not None:
            names = [] if self.user is None else [self.user.encode()]
            commands.append((b"AUTH", *names, self.password.encode()))
        if self.db:
            commands.append((b"SELECT", b"%d" % self.db))
        return commands


def parse_redis(url: str) -> RedisAddress:
    """``redis://[user:password@]host[:port][/db]``; rediss: with TLS; ``unix:///path``. Raises ValueError."""
    parts = urlsplit(url)
    if parts.scheme == "unix" and parts.path and not (parts.netloc or parts.query or parts.fragment):
        return RedisAddress("localhost", socket_path=unquote(parts.path))
    if parts.scheme not in ("redis", "rediss") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError("must be redis://[user:password@]host[:port][/db], rediss:// for TLS, or unix:///PATH")
    db = parts.path.strip("/")
    if db and not db.isdigit():
        raise ValueError(f"the database {db!r} must be a number")
    user, password = (None if quoted is None else unquote(quoted) for quoted in (parts.username, parts.password))
    port = REDIS_PORT if parts.port is None else parts.port
    return RedisAddress(parts.hostname, port, int(db or 0), user or None, password, parts.scheme == "rediss")
