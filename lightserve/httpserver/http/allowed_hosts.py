"""The names of this server that clients may use in the header Host.

The name of a foreign web page can resolve to 127.0.0.1 (DNS rebinding). The page and this server then are one origin to
the browser, which lets the page send requests and read responses. Their Host is the name of the page.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Mapping, Sequence

from lightserve.errors import ForbiddenError
from lightserve.utils.net import is_local

ANY = "*"
# no public name server has names below these: of this machine, and of a container's host (host.docker.internal)
LOCAL_NAMES = ("localhost", "*.localhost", "*.internal")
MAX_SHOWN = 100  # characters of a refused name


class AllowedHosts:
    """``names`` may begin with ``*.``. An address is always allowed: DNS rebinding needs a name."""

    def __init__(self, names: Iterable[str]) -> None:
        names = [_plain(name) for name in names]
        self._is_any = ANY in names
        self._names = frozenset(names)
        self._endings = tuple(name.removeprefix(ANY) for name in names if name.startswith(f"{ANY}."))

    def check(self, headers: Mapping[bytes, bytes]) -> None:
        host = headers.get(b"host", b"")
        if self._is_any or not host:  # browsers always send it
            return
        name = _plain(host.decode("latin-1"))
        if name in self._names or name.endswith(self._endings) or _is_address(name):
            return
        problem = f"{name[:MAX_SHOWN]!r} is not a name of this server; --allowed_hosts adds names, * allows all"
        raise ForbiddenError(f"the header Host: {problem}")


def allowed_hosts(listening: str, names: Sequence[str]) -> AllowedHosts:
    """``listening``: --host, ``names``: --allowed_hosts. Without names, a server that others can reach allows any: only
    the operator knows under which names they do.
    """
    if not names and not is_local(listening):
        return AllowedHosts([ANY])
    return AllowedHosts([*LOCAL_NAMES, *_machine_names(), listening, *names])


def _machine_names() -> list[str]:
    name = socket.gethostname()
    first_label = name.partition(".")[0]
    return [name, first_label, f"{first_label}.local"]


def _plain(host: str) -> str:
    """In lower case, without the port, the brackets of an IPv6 address and the dot at the end of a full name."""
    name, _, port = host.rpartition(":")
    without_port = name if name and port.isdecimal() and (":" not in name or name.endswith("]")) else host
    return without_port.lower().strip("[]").rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
