"""Processes that are the ranks of a group. They share the import of torch and transformers, which takes seconds."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

from torch.multiprocessing.spawn import start_processes

# Ranks are forked from a process that has imported these and started no thread.
PRELOADED = ["torch.distributed", "transformers", "lightserve.models.registry", "test.models.tiny"]


def run_ranks(function: Callable[..., None], size: int, *args: Any) -> None:
    """Call ``function(rank, *args)`` in a process for each rank. The first error of a rank is raised here."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    start_processes(function, args, size, start_method="forkserver")  # type: ignore[no-untyped-call]
