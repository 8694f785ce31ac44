"""What a server holds of its machine: processes, threads, descriptors, files. Counted before a fault and after it."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
from collections import Counter
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


def gpu_mib() -> int:
    """In use on all GPUs, by anyone; 0 where there is none."""
    if shutil.which("nvidia-smi") is None:
        return 0
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return sum(map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()))
