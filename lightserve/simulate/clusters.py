"""Several clusters beside each other, each with a gateway of its own, simulated in processes of their own.

A gateway knows the load of all its servers, so servers behind one gateway cannot be simulated apart. Clusters that
share nothing can.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from lightserve.ipc.child_setup import end_with_parent
from lightserve.simulate.load import Load
from lightserve.simulate.result import Result, merged

SEEDS = 2  # of a load: for its requests, and for its arrivals

Map = Callable[[Callable[..., Any], Iterable[Any]], Iterator[Any]]


@contextmanager
def processes(count: int) -> Iterator[Map]:
    """A ``map`` that runs in so many processes, or as many as there are cores; with one, in this process."""
    count = min(count, os.cpu_count() or 1)
    if count <= 1:
        yield map
        return
    with ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), initializer=end_with_parent) as pool:
        yield pool.map


def share_of(load: Load, cell: int, clusters: int) -> Load:
    """The part of the load that one of the clusters gets."""
    return replace(
        load,
        count=(load.count + clusters - 1 - cell) // clusters,
        rate=None if load.rate is None else load.rate / clusters,
        streams=(load.streams + clusters - 1 - cell) // clusters,
        seed=load.seed + SEEDS * cell,
    )


def simulate_clusters(run: Callable[[Load], Result], load: Load, clusters: int) -> Result:
    """``run`` simulates one of the clusters."""
    loads = [share_of(load, cell, clusters) for cell in range(clusters)]
    with processes(clusters) as run_all:
        return merged(list(run_all(run, loads)))
