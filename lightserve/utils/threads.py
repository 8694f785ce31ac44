"""Threads with a stack of a given size."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor


def pool_with_stack(threads: int, name: str, stack_bytes: int) -> ThreadPoolExecutor:
    """A pool whose threads have this much stack. All of them are started now: the size is a global of Python."""
    before = threading.stack_size(stack_bytes)
    try:
        pool = ThreadPoolExecutor(threads, name)
        all_started = threading.Barrier(threads)
        for started in [pool.submit(all_started.wait) for _ in range(threads)]:
            started.result()
    finally:
        threading.stack_size(before)
    return pool
