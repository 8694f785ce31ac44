"""What the routes and the executor do with files: write them within the limits, and make errors of a full disk."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from lightserve.batches.records import StoredFile
from lightserve.batches.store import BatchStore, sync_file
from lightserve.errors import OverloadedError, UnavailableError

MAX_FILENAME = 255  # characters


@contextlib.contextmanager
def new_file(store: BatchStore) -> Iterator[tuple[str, Path, BinaryIO]]:
    """A file to write. It is removed again unless the block ends without an error."""
    file_id, path = store.new_path()
    try:
        with path.open("wb") as sink:
            yield file_id, path, sink
    except OSError as error:
        path.unlink(missing_ok=True)
        raise unusable(store, error) from error
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def unusable(store: BatchStore, error: Exception) -> UnavailableError:
    return UnavailableError(f"the batch store cannot be written: {error} (--batch_dir {store.folder})")


def keep_file(store: BatchStore, file: StoredFile, max_total_bytes: int) -> None:
    """Make a written file known, unless the folder is full."""
    path = store.path_of(file.id)
    try:
        used = store.total_bytes()
        if used + file.bytes > max_total_bytes:
            problem = f"the files have {used} bytes, with this one more than {max_total_bytes} (--batch_dir_bytes)"
            raise OverloadedError(f"{problem}; delete some")
        sync_file(path)
        store.add_file(file)
    except BaseException as error:
        path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise unusable(store, error) from error
        raise


def write_lines(store: BatchStore, lines: Iterable[bytes], owner: str, name: tuple[str, str]) -> StoredFile | None:
    """A complete file on the disk that no row names yet. ``name``: its own and its purpose. None: there is no line."""
    num_bytes = 0
    with new_file(store) as (file_id, path, sink):
        for line in lines:
            num_bytes += sink.write(line + b"\n")
    if num_bytes == 0:
        path.unlink()
        return None
    try:
        sync_file(path)
    except OSError as error:
        raise unusable(store, error) from error
    return StoredFile(file_id, owner, name[0], name[1], num_bytes, int(time.time()))
