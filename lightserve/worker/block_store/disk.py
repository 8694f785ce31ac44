"""Blocks of KV as files of a folder, which survive a restart.

One file a block, below a folder of its identity. A file appears under its name when it is complete. The least recently
used files make room, those of other models too, so that the folder stays within its size.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from lightserve.errors import ServerError
from lightserve.worker.block_store.frame import HEADER_BYTES, BlockError, check_block, header_of

SUFFIX, TEMPORARY = ".kv", ".tmp"
OWN_NAME = re.compile(r"(?P<group>(?P<ranks>ranks\d+)\.\d+)-[0-9a-f]{32}")  # nothing else in the folder is touched
STALE_S = 600  # a temporary file of this age belongs to a process that died


class DiskStore:
    name = "disk"

    def __init__(self, folder: Path, group: str, max_bytes: int, identity: bytes) -> None:
        """``group``: the rank and the number of ranks, such as ranks2.0."""
        self._root = folder
        self._own = folder / f"{group}-{identity.hex()[:32]}"
        self._group = group
        self._max_bytes = max_bytes
        self._identity = identity
        self._lock = threading.Lock()
        try:
            self._own.mkdir(mode=0o700, parents=True, exist_ok=True)
            probe = self._own / f"{os.getpid()}{TEMPORARY}"
            probe.write_bytes(b"")
            probe.unlink()
            self._sizes = OrderedDict(self._scan())  # by path, the least recently used first
        except OSError as error:
            raise ServerError(f"kv_disk_dir={folder}: cannot be used: {error.strerror}") from error
        self._used_bytes = sum(self._sizes.values())
        self._make_room(0)

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    def contains(self, key: bytes) -> bool:
        path = self._path(key)
        return path in self._sizes or os.path.exists(path)  # another engine may have written it

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
            os.utime(path)
        except OSError as error:
            self._forget(path)
            raise BlockError(f"{path}: {error.strerror}") from error
        except BlockError as error:
            self._remove(path)
            raise BlockError(f"{path}: {error}; removed") from error
        with self._lock:
            if path in self._sizes:
                self._sizes.move_to_end(path)

    def put(self, key: bytes, data: memoryview) -> bool:
        path = self._path(key)
        with self._lock:
            if path in self._sizes:
                self._sizes.move_to_end(path)
                return False
        size = HEADER_BYTES + len(data)
        if size > self._max_bytes:
            raise BlockError(f"a block has {size} bytes, the folder may have {self._max_bytes}")
        self._make_room(size)
        temporary = f"{path}.{os.getpid()}{TEMPORARY}"
        try:
            with open(temporary, "wb", buffering=0) as file:
                _write(file.fileno(), header_of(self._identity, key, data))
                _write(file.fileno(), data)
            os.replace(temporary, path)
        except OSError as error:
            with suppress(OSError):
                os.unlink(temporary)
            raise BlockError(f"{path}: {error.strerror}") from error
        with self._lock:
            self._sizes[path] = size
            self._used_bytes += size
        return True

    def remove(self, key: bytes) -> None:
        self._remove(self._path(key))

    def _remove(self, path: str) -> None:
        with suppress(OSError):
            os.unlink(path)
        self._forget(path)

    def _path(self, key: bytes) -> str:
        return f"{self._own}/{key.hex()}{SUFFIX}"

    def _scan(self) -> list[tuple[str, int]]:
        """Files of this rank and of other models, the oldest first."""
        found = sorted(self._files())
        return [(path, size) for _, path, size in found]

    def _files(self) -> Iterator[tuple[int, str, int]]:
        now_s = int(time.time_ns()) // 10**9
        for folder in self._root.iterdir():
            name = OWN_NAME.fullmatch(folder.name)
            if name is None or not folder.is_dir():
                continue
            if name["ranks"] == self._group.partition(".")[0] and name["group"] != self._group:
                continue  # of another rank of this server
            for entry in os.scandir(folder):
                with suppress(FileNotFoundError):
                    stat = entry.stat(follow_symlinks=False)
                    if entry.name.endswith(TEMPORARY) and stat.st_mtime < now_s - STALE_S:
                        os.unlink(entry.path)
                    elif entry.name.endswith(SUFFIX):
                        yield stat.st_mtime_ns, entry.path, stat.st_size

    def _make_room(self, size: int) -> None:
        with self._lock:
            while self._sizes and self._used_bytes + size > self._max_bytes:
                path, freed = self._sizes.popitem(last=False)
                self._used_bytes -= freed
                with suppress(OSError):
                    os.unlink(path)

    def _forget(self, path: str) -> None:
        with self._lock:
            self._used_bytes -= self._sizes.pop(path, 0)


def _read_into(descriptor: int, into: memoryview) -> int:
    """How many bytes were read: fewer if the file ends."""
    done = 0
    while done < len(into):
        count = os.readv(descriptor, [into[done:]])
        if not count:
            break
        done += count
    return done


def _write(descriptor: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
