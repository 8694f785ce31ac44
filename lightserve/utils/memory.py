"""The memory of the machine and of this process."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from functools import cache
from pathlib import Path
from typing import Any


def free_ram() -> int:
    """Bytes that this process can still allocate: the machine's free memory, or less if its cgroup has a limit."""
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    group = Path("/sys/fs/cgroup")
    if (group / "memory.max").exists() and (limit := (group / "memory.max").read_text().strip()) != "max":
        used = int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        free = min(free, int(limit) - used + int(stat["inactive_file"]))  # the kernel frees cached files when needed
    return max(free, 0)


def resident_bytes() -> int:
    """The memory that this process uses; without /proc, the most that it has used."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def allocated_bytes() -> int:
    """The memory that this process has allocated and not freed, if the C library counts it; else resident_bytes."""
    mallinfo = _mallinfo()
    if mallinfo is None:
        return resident_bytes()
    counts: _MallocCounts = mallinfo()
    return int(counts.uordblks + counts.hblkhd)


class _MallocCounts(ctypes.Structure):
    """mallinfo2 of glibc: sums over all arenas, and what was mapped for large allocations."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


@cache
def _mallinfo() -> Any:
    """Since glibc 2.33. None elsewhere."""
    function = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if function is not None:
        function.restype = _MallocCounts
    return function
