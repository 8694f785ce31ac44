"""The folder for the sockets between a server's processes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

MAX_BASE_LEN = 50  # characters of the folder that the run directory is in: a unix socket's whole path may have 107
PREFIX = "lightserve-run-"
NO_SOCKETS = ("tp", "triton")  # where several ranks meet, and kernels where Triton's own folder is read-only


@contextlib.contextmanager
def run_directory() -> Iterator[str]:
    """A folder which only this user can open. It is locked as long as this process lives, so that later ones know."""
    base = tempfile.gettempdir()
    base = base if len(base) <= MAX_BASE_LEN else "/tmp"
    _remove_leftovers(Path(base))
    path = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=base))
    with contextlib.ExitStack() as exits:
        exits.enter_context(_locked(path))
        path = path.rename(path.with_name(path.name[1:]))  # only now, locked, is it seen by those who remove leftovers
        exits.callback(shutil.rmtree, path, ignore_errors=True)
        yield str(path)


def _remove_leftovers(base: Path) -> None:
    """Of servers whose launcher was killed: nobody was left to remove them."""
    for path in base.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, or one that lives
            if _is_run_directory(path):
                with _locked(path):
                    shutil.rmtree(path, ignore_errors=True)


def _is_run_directory(path: Path) -> bool:
    """And not somebody's folder that has such a name."""
    found = path.lstat()
    is_private = stat.S_ISDIR(found.st_mode) and stat.S_IMODE(found.st_mode) == 0o700 and found.st_uid == os.getuid()
    return is_private and all(entry.is_socket() or entry.name in NO_SOCKETS for entry in path.iterdir())


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
