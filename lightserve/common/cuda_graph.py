"""Launches captured once and replayed as one: what the host would spend on launching is saved."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

import torch
from torch import Tensor

Key = TypeVar("Key", bound=Hashable)
Out = TypeVar("Out")


class CudaGraphs(Generic[Key, Out]):
    """A function of a tensor of integers and a key, captured once a key.

    The function must launch the same work whatever the integers are. What a replay returns holds until the next one:
    all graphs share one pool of memory.
    """

    def __init__(self, function: Callable[[Tensor, Key], Out]) -> None:
        self._function = function
        self._captured: dict[Key, tuple[Tensor, torch.cuda.CUDAGraph, Out]] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def __contains__(self, key: Key) -> bool:
        return key in self._captured

    def capture(self, examples: Iterable[tuple[Key, Tensor]]) -> None:
        """Each key with an input on the device, which a replay overwrites.

        What is compiled, loaded or allocated at first use has been used before: a capture may not do so.
        """
        torch.cuda.synchronize()
        with _no_garbage():
            for key, example in examples:
                self._capture(key, example)

    def _capture(self, key: Key, example: Tensor) -> None:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            out = self._function(example, key)
            graph.capture_end()
        self._captured[key] = (example, graph, out)

    def replay(self, key: Key, inputs: Tensor) -> Out:
        """``inputs`` in pinned memory, which torch keeps until they are copied."""
        example, graph, out = self._captured[key]
        example.copy_(inputs, non_blocking=True)
        graph.replay()
        return out


@contextmanager
def _no_garbage() -> Iterator[None]:
    """Graphs that nobody uses any more may not be found and destroyed during a capture: it would fail."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
