from __future__ import annotations

import os
from pathlib import Path


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
