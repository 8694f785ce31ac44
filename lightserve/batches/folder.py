"""The folder of --batch_dir: locks tell other servers and other HTTP processes that it is in use."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from lightserve.errors import OptionError

SERVER_LOCK = "server.lock"  # held by the launcher
EXECUTOR_LOCK = "executor.lock"  # held by the HTTP process that runs batches


class BatchDirError(OptionError):
    docs = "batches.md"


@contextlib.contextmanager
def locked_folder(folder: str) -> Iterator[Path]:
    """Create the folder if there is none, and keep other servers out of it."""
    path = Path(folder)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(path / SERVER_LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise BatchDirError(f"--batch_dir {folder}: cannot be written ({error}); choose another folder") from error
    try:
        _lock_or_name_owner(lock, folder)
        os.ftruncate(lock, 0)
        os.write(lock, str(os.getpid()).encode())
        yield path
    finally:
        os.close(lock)


@contextlib.contextmanager
def elected(folder: str) -> Iterator[bool]:
    """Whether this process is the only one that runs batches until the end of the block."""
    lock = os.open(Path(folder) / EXECUTOR_LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(lock)


def _lock_or_name_owner(lock: int, folder: str) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        owner = os.pread(lock, 32, 0).decode(errors="replace") or "unknown"
        raise BatchDirError(
            f"--batch_dir {folder}: another server (process {owner}) has it open; stop that server or choose another "
            "folder"
        ) from error
