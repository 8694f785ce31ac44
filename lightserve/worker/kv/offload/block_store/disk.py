"""Blocks of KV as files of a folder, which survive a restart.

One file a block, below a folder of its identity. A file appears under its name when it is complete. The least recently
used files make room, those of other models too, so that the folder stays within its size.

Several engines and servers may use one folder. The folder itself is the only account: who has written for a while lists
it again, and sees what the others have written and removed.
"""

from __future__ import annotations

import os
import re
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lightserve.errors import ServerError
from lightserve.worker.kv.offload.block_store.frame import HEADER_BYTES, BlockError, check_block, header_of

SUFFIX, TEMPORARY = ".kv", ".tmp"
OWN_NAME = re.compile(r"(?P<group>(?P<ranks>ranks\d+)\.\d+)-[0-9a-f]{32}")  # nothing else in the folder is touched
STALE_S = 600  # a temporary file of this age belongs to a process that died
UNLISTED_SHARE = 0.05  # of the folder: so much all engines of a server write before they list it again


class StoredFile(NamedTuple):
    used_ns: int
    path: str
    size: int


class DiskStore:
    name = "disk"

    def __init__(self, folder: Path, group: str, max_bytes: int, identity: bytes, num_engines: int = 1) -> None:
        """``group``: the rank and the number of ranks, such as ranks2.0. So many engines share ``max_bytes``."""
        self._root = folder
        self._own = folder / f"{group}-{identity.hex()[:32]}"
        self._group = group
        self._max_bytes = max_bytes
        self._unlisted_bytes = int(max_bytes * UNLISTED_SHARE)
        self._identity = identity
        self._num_engines = num_engines
        self._temporary = f".{secrets.token_hex(8)}{TEMPORARY}"  # processes of two containers may have the same id
        self._lock = threading.Lock()
        self._used_bytes = 0  # when it was listed, with the changes of this process since then
        self._allowance = 0  # bytes that this process may write before it lists the folder again
        try:
            self._own.mkdir(mode=0o700, parents=True, exist_ok=True)
            probe = self._own / self._temporary
            probe.write_bytes(b"")
            probe.unlink()
            self._shrink(max_bytes, max_bytes)
        except OSError as error:
            raise ServerError(f"kv_disk_dir={folder}: cannot be used: {error.strerror}") from error

    @property
    def used_bytes(self) -> int:
        """This engine's part: those of all engines add up to the folder."""
        return self._used_bytes // self._num_engines

    def contains(self, key: bytes) -> bool:
        return os.path.exists(self._path(key))  # others write and remove files too

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        return [self.contains(key) for key in keys]

    def get(self, key: bytes, into: memoryview) -> None:
        path = self._path(key)
        try:
            with open(path, "rb", buffering=0) as file:
                header = file.read(HEADER_BYTES)
                if _read_into(file.fileno(), into) != len(into) or file.read(1):
                    raise BlockError("the file has another size")
            check_block(header, self._identity, key, into)
            _mark_used(path)
        except OSError as error:
            raise BlockError(f"{path}: {error.strerror}") from error
        except BlockError as error:
            self._remove(path)
            raise BlockError(f"{path}: {error}; removed") from error

    def put(self, key: bytes, data: memoryview) -> bool:
        path, size = self._path(key), HEADER_BYTES + len(data)
        if size > self._max_bytes:
            raise BlockError(f"a block has {size} bytes, the folder may have {self._max_bytes}")
        try:
            with suppress(FileNotFoundError):
                _mark_used(path)
                return False
            self._make_room(size)
            self._write(path, header_of(self._identity, key, data), data)
        except OSError as error:
            raise BlockError(f"{path}: {error.strerror}") from error
        with self._lock:
            self._used_bytes += size
        return True

    def remove(self, key: bytes) -> None:
        self._remove(self._path(key))

    def _remove(self, path: str) -> None:
        with suppress(OSError):
            size = os.stat(path).st_size
            os.unlink(path)
            with self._lock:
                self._used_bytes -= size

    def _path(self, key: bytes) -> str:
        return f"{self._own}/{key.hex()}{SUFFIX}"

    def _write(self, path: str, header: bytes, data: memoryview) -> None:
        temporary = path + self._temporary
        try:
            with open(temporary, "wb", buffering=0) as file:
                _write_all(file.fileno(), header)
                _write_all(file.fileno(), data)
            _mark_used(temporary)
            os.replace(temporary, path)
        except OSError:
            with suppress(OSError):
                os.unlink(temporary)
            raise

    def _files(self) -> Iterator[StoredFile]:
        """Of this rank, and of other models."""
        now_s = int(time.time_ns()) // 10**9
        for folder in self._root.iterdir():
            name = OWN_NAME.fullmatch(folder.name)
            if name is None or not folder.is_dir():
                continue
            if name["ranks"] == self._group.partition(".")[0] and name["group"] != self._group:
                continue  # of another rank of this server
            for entry in list(os.scandir(folder)):
                with suppress(FileNotFoundError):
                    stat = entry.stat(follow_symlinks=False)
                    if entry.name.endswith(TEMPORARY) and stat.st_mtime < now_s - STALE_S:
                        os.unlink(entry.path)
                    elif entry.name.endswith(SUFFIX):
                        yield StoredFile(stat.st_mtime_ns, entry.path, stat.st_size)

    def _make_room(self, size: int) -> None:
        """For a file. Whoever lists a full folder makes room for some more, so that it is listed seldom."""
        if size > self._allowance:
            unlisted = self._unlisted_bytes
            self._shrink(self._max_bytes - max(unlisted, size), self._max_bytes - max(2 * unlisted, size))
            self._allowance = max(unlisted // self._num_engines, size)
        self._allowance -= size

    def _shrink(self, most: int, wanted: int) -> None:
        """If the files have more bytes than ``most``, remove the oldest until they have ``wanted``."""
        files = list(self._files())
        used = sum(file.size for file in files)
        oldest_first = np.argsort(np.array([file.used_ns for file in files], dtype=np.int64)) if used > most else ()
        for index in oldest_first:
            if used <= wanted:
                break
            used -= files[index].size
            with suppress(OSError):
                os.unlink(files[index].path)
        with self._lock:
            self._used_bytes = used


def _mark_used(path: str) -> None:
    """Now. The file system's own time is that of its last tick."""
    now_ns = int(time.time_ns())
    os.utime(path, ns=(now_ns, now_ns))


def _read_into(descriptor: int, into: memoryview) -> int:
    """How many bytes were read: fewer if the file ends."""
    done = 0
    while done < len(into):
        count = os.readv(descriptor, [into[done:]])
        if not count:
            break
        done += count
    return done


def _write_all(descriptor: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
