"""The memory that the encoder and the workers share: the embeddings of images."""

from __future__ import annotations

import os
import tempfile

GIB, PAGE = 2**30, 4096
GPU = "/dev/nvidiactl"  # a check with torch would take seconds


def open_arena(gib: float) -> int:
    """A descriptor of anonymous memory, which ends with the last process that has it. Unused pages take nothing."""
    if hasattr(os, "memfd_create"):  # no limit of /dev/shm counts, which is 64 MB in a container
        fd = os.memfd_create("lightserve-images")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, max(int(gib * GIB) // PAGE, 1) * PAGE)
    return fd


def has_gpu(device: str | None) -> bool:
    return device != "cpu" and os.path.exists(GPU)
