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


def write_secret(path: Path, content: bytes) -> None:
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)


def free_port(host: str) -> int:
    """A port that is free now. If another process takes it first, the next start gets another one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.bind((host, 0))
        port: int = sock.getsockname()[1]
        return port


def tcp_address(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
