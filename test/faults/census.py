"""What a server holds of its machine: processes, threads, descriptors, files. Counted before a fault and after it."""

from __future__ import annotations

import contextlib
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

Census = Counter[str]  # how many of what


def processes_of(base: Path) -> list[psutil.Process]:
    """Every process alive that came of the server whose TMPDIR is ``base``, also an orphan."""
    mark = f"TMPDIR={base}".encode()
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError, psutil.NoSuchProcess):  # another user's, or just gone
            if mark in environ.read_bytes().split(b"\0"):
                found.append(psutil.Process(int(environ.parent.name)))
    return found


def take_census(base: Path) -> Census:
    counted: Census = Counter()
    for process in processes_of(base):
        with contextlib.suppress(psutil.NoSuchProcess):
            name = process.name()
            counted[f"{name}: processes"] += 1
            counted[f"{name}: threads"] += process.num_threads()
            counted[f"{name}: descriptors"] += process.num_fds()
    counted["run directories"] = len(run_directories(base))
    counted["files in them"] = sum(1 for directory in run_directories(base) for _ in directory.iterdir())
    counted["shared memory"] = len(shared_memory_of(base))
    return counted


def grown(before: Census, after: Census) -> str:
    """What there is more of, or fewer processes, in words; empty if nothing."""
    more = [name for name in after if after[name] > before[name]]
    fewer = [name for name in before if name.endswith("processes") and after[name] < before[name]]
    return ", ".join(f"{name} {before[name]} -> {after[name]}" for name in more + fewer)


def run_directories(base: Path) -> list[Path]:
    return list(base.glob("lightserve-*"))


def shared_memory_of(base: Path) -> set[str]:
    """Files in /dev/shm that its processes have mapped."""
    found: set[str] = set()
    for process in processes_of(base):
        with contextlib.suppress(OSError):
            found |= set(re.findall(r"/dev/shm/\S+", Path(f"/proc/{process.pid}/maps").read_text()))
    return found


GPU_SLACK_MIB = 64  # others use the card too
GPU_TIMES = 1.5  # of what a worker holds, where two would hold twice as much
HAS_GPU = shutil.which("nvidia-smi") is not None


def gpu_mib() -> int:
    """In use on all GPUs, by anyone; 0 where there is none."""
    if not HAS_GPU:
        return 0
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return sum(map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()))


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """In MiB, of all GPUs; zeros where there is none."""

    before_server: int
    before_fault: int
    peak: int
    after: int

    @property
    def was_held_twice(self) -> bool:
        held = self.before_fault - self.before_server
        return self.peak > self.before_server + GPU_TIMES * held + GPU_SLACK_MIB


@dataclass
class GpuPeak:
    mib: int = 0

    def follow(self, is_over: threading.Event) -> None:
        while not is_over.is_set():  # one question takes some ten milliseconds
            self.mib = max(self.mib, gpu_mib())


@contextmanager
def gpu_peak() -> Iterator[GpuPeak]:
    """The most that was in use inside, as far as asking again and again shows."""
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
