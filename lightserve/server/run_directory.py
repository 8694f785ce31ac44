"""The directory for the sockets between the processes of one server."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

MAX_BASE_LEN = 50  # characters of the parent directory's path: the whole path of a unix socket is limited to 107
PREFIX = "lightserve-run-"
# the ranks' rendezvous files; compiled kernels if Triton's own cache is read-only; stored responses
OTHER_ENTRIES = ("tp", "triton", "responses")


@contextlib.contextmanager
def run_directory() -> Iterator[str]:
    """Create a directory that only this user can open. Its lock shows other launchers that the server is running."""
    base = tempfile.gettempdir()
    base = base if len(base) <= MAX_BASE_LEN else "/tmp"
    _remove_leftovers(Path(base))
    path = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=base))
    with contextlib.ExitStack() as exits:
        exits.enter_context(_locked(path))
        path = path.rename(path.with_name(path.name[1:]))  # other launchers see it only now that it is locked
        exits.callback(shutil.rmtree, path, ignore_errors=True)
        yield str(path)


def _remove_leftovers(base: Path) -> None:
    """Remove the run directories of servers whose launcher was killed."""
    for path in base.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, or of a running server
            if _is_run_directory(path):
                with _locked(path):
                    shutil.rmtree(path, ignore_errors=True)


def _is_run_directory(path: Path) -> bool:
    """Whether LightServe created it: a user's own directory may have such a name."""
    status = path.lstat()
    is_private = stat.S_ISDIR(status.st_mode) and stat.S_IMODE(status.st_mode) == 0o700
    is_private = is_private and status.st_uid == os.getuid()
    return is_private and all(_is_ours(entry) for entry in path.iterdir())


def _is_ours(entry: Path) -> bool:
    """Entries of an engine have its number as a suffix, unless it is the first. Rendezvous files have one more."""
    return entry.is_socket() or entry.name.partition(".")[0] in OTHER_ENTRIES


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
