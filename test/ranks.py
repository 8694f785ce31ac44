"""Processes that are the ranks of a group. They share the import of torch and transformers, which takes seconds."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from typing import Any

from torch.multiprocessing.spawn import start_processes

# Ranks are forked from a process that has imported these and started no thread.
PRELOADED = ["torch.distributed", "transformers", "lightserve.models.registry", "test.models.tiny"]


DEADLINE_S = 120.0  # ranks that wait for one another never end


def run_ranks(function: Callable[..., None], size: int, *args: Any, deadline_s: float = DEADLINE_S) -> None:
    """Call ``function(rank, *args)`` in a process for each rank. The first error of a rank is raised here."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    context: Any = start_processes(function, args, size, join=False, start_method="forkserver")  # type: ignore[no-untyped-call]
    end_s = time.monotonic() + deadline_s
    try:
        while not context.join(timeout=1.0):
            if time.monotonic() > end_s:
                raise TimeoutError(f"the ranks have not ended within {deadline_s} s")
    finally:
        for process in context.processes:
            process.kill()
