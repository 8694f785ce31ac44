"""The resources of a server: processes, threads, descriptors, files. Counted before and after a fault.

Threads of pools begin when they are needed and stay. Up to what the pools may have, more threads are no leak.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from lightserve.outbound.dial import MAX_LOOK_UPS

UNPOOLED = 8  # threads of an HTTP process: its own, the launcher's connection, ZMQ's
POOLED = {"ls-httpserver": min(32, (os.cpu_count() or 1) + 4) + MAX_LOOK_UPS + UNPOOLED}  # asyncio's pool, and ours

ResourceSnapshot = Counter[str]  # counts by name


def processes_of(base: Path) -> list[psutil.Process]:
    """Every running process of the server whose TMPDIR is ``base``, including orphans."""
    mark = f"TMPDIR={base}".encode()
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError, psutil.NoSuchProcess):  # another user's, or it has just exited
            if mark in environ.read_bytes().split(b"\0"):
                found.append(psutil.Process(int(environ.parent.name)))
    return found


def take_snapshot(base: Path) -> ResourceSnapshot:
    counted: ResourceSnapshot = Counter()
    for process in processes_of(base):
        with contextlib.suppress(psutil.NoSuchProcess):
            name = process.name()
            counted[f"{name}: processes"] += 1
            counted[f"{name}: threads"] += max(process.num_threads(), POOLED.get(name, 0))
            counted[f"{name}: descriptors"] += process.num_fds()
    counted["run directories"] = len(run_directories(base))
    counted["files in them"] = sum(1 for directory in run_directories(base) for _ in directory.iterdir())
    counted["shared memory"] = len(shared_memory_of(base))
    return counted


def describe_growth(before: ResourceSnapshot, after: ResourceSnapshot) -> str:
    """Describe resources that grew and processes that are missing; empty if there are none."""
    more = [name for name in after if after[name] > before[name]]
    fewer = [name for name in before if name.endswith("processes") and after[name] < before[name]]
    return ", ".join(f"{name} {before[name]} -> {after[name]}" for name in more + fewer)


def run_directories(base: Path) -> list[Path]:
    return list(base.glob("lightserve-*"))


def shared_memory_of(base: Path) -> set[str]:
    """The files in /dev/shm that the server's processes have mapped."""
    found: set[str] = set()
    for process in processes_of(base):
        with contextlib.suppress(OSError):
            found |= set(re.findall(r"/dev/shm/\S+", Path(f"/proc/{process.pid}/maps").read_text()))
    return found


GPU_SLACK_MIB = 64  # other programs use the GPU too
GPU_TIMES = 1.5  # times the memory of a worker; two workers would need twice as much
HAS_GPU = shutil.which("nvidia-smi") is not None


def gpu_mib() -> int:
    """Used memory of all GPUs, by any program; 0 without a GPU."""
    if not HAS_GPU:
        return 0
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return sum(map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()))


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """MiB, summed over all GPUs; zeros without a GPU."""

    before_server: int
    before_fault: int
    peak: int
    after: int

    @property
    def is_doubled(self) -> bool:
        held = self.before_fault - self.before_server
        return self.peak > self.before_server + GPU_TIMES * held + GPU_SLACK_MIB


@dataclass
class GpuPeak:
    mib: int = 0

    def follow(self, is_over: threading.Event) -> None:
        while not is_over.is_set():  # one query takes about ten milliseconds
            self.mib = max(self.mib, gpu_mib())


@contextmanager
def gpu_peak() -> Iterator[GpuPeak]:
    """The peak memory inside the block, by polling."""
    peak = GpuPeak()
    if not HAS_GPU:
        yield peak
        return
    is_over = threading.Event()
    follower = threading.Thread(target=peak.follow, args=(is_over,))
    follower.start()
    try:
        yield peak
    finally:
        is_over.set()
        follower.join()
