"""CUDA graphs: launches that are captured once and replayed as one, which saves the host the time to launch them."""

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
    """A function of a tensor of integers and a key, captured once for each key.

    The function must launch the same work whatever the integers are. The result of a replay is valid until the next
    replay: all graphs share one memory pool.
    """

    def __init__(self, function: Callable[[Tensor, Key], Out]) -> None:
        self._function = function
        self._captured: dict[Key, tuple[Tensor, torch.cuda.CUDAGraph, Out]] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def __contains__(self, key: Key) -> bool:
        return key in self._captured

    def capture(self, examples: Iterable[tuple[Key, Tensor]]) -> None:
        """Capture each key with its input on the device. A replay overwrites that input.

        A capture may not compile, load or allocate anything at first use, so call the function once before.
        """
        torch.cuda.synchronize()
        with _no_garbage_collection():
            for key, example in examples:
                self._capture(key, example)

    def _capture(self, key: Key, example: Tensor) -> None:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            out = self._function(example, key)
            graph.capture_end()
        self._captured[key] = (example, graph, out)

    def clear(self) -> None:
        """Free the memory of all graphs, too."""
        self._captured.clear()
        self._pool = torch.cuda.graph_pool_handle()

    def replay(self, key: Key, inputs: Tensor) -> Out:
        """``inputs`` are in pinned memory, which torch keeps until they are copied."""
        example, graph, out = self._captured[key]
        example.copy_(inputs, non_blocking=True)
        graph.replay()
        return out


def as_one_graph(work: Callable[[], object]) -> Callable[[], object]:
    """``work`` is called once before: a capture may not compile."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A capture fails if the collector destroys an unused graph meanwhile."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
