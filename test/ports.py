"""Ports for servers that have to know theirs before they start."""

from __future__ import annotations

import itertools
import random
import socket
from contextlib import suppress

PORTS = range(12_000, 32_000)  # below those that the kernel gives out

_ports = itertools.cycle(random.sample(PORTS, len(PORTS)))  # other test processes begin elsewhere


def free_port() -> int:
    """One that nobody gets who connects, or binds to port 0, before the test uses it."""
    for port in _ports:
        with socket.socket() as sock, suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port
    raise AssertionError("the cycle has no end")
