"""The files that a process needs on its node: keys and flags, which only this user can read."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PREFIX = "lightserve-ray-"
MAX_PORT = 65535
PORT_TRIES = 100


def make_folder() -> Path:
    """A folder of this process. Those of processes that were killed are removed."""
    base = Path(tempfile.gettempdir())
    for left in base.glob(f"{PREFIX}*"):
        pid = left.name.removeprefix(PREFIX).partition("-")[0]
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(left, ignore_errors=True)  # another user's stays
    return Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))


def write_keys(folder: Path, keys: Mapping[str, bytes]) -> None:
    for name, key in keys.items():
        write_secret(folder / name, key)


def write_flags(path: Path, flags: Mapping[str, Any]) -> None:
    """For --config: JSON is YAML. API keys are in it, and ps must not show them."""
    write_secret(path, json.dumps(flags).encode())


def write_json(path: Path, value: Any) -> None:
    """At once: another process reads it at any time."""
    write_secret(path.with_suffix(".new"), json.dumps(value).encode())
    path.with_suffix(".new").replace(path)


def write_secret(path: Path, content: bytes) -> None:
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)


def free_port(host: str, last: int = 0) -> int:
    """A port that is free now: ``last`` if it is. If another process takes it first, the next start gets another."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of the last process may linger
        try:
            sock.bind((host, last))
        except OSError:
            sock.bind((host, 0))
        port: int = sock.getsockname()[1]
        return port


def free_ports(host: str, count: int) -> int:
    """The first of ``count`` ports in a row that are free now."""
    for _ in range(PORT_TRIES):
        first = free_port(host)
        if first + count <= MAX_PORT + 1 and all(free_port(host, port) == port for port in range(first, first + count)):
            return first
    raise OSError(f"{host} has no {count} free ports in a row")
