"""CUDA graphs: launches that are captured once and replayed as one, which saves the host the time to launch them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

Key = TypeVar("Key", bound=Hashable)
Out = TypeVar("Out")

LARGE_BYTES = 2**20  # of a result whose memory the next capture may use too


class CudaGraphs(Generic[Key, Out]):
    """A function of a tensor of integers and a key, captured once for each key.

    The function must launch the same work whatever the integers are. The result of a replay is valid until the next
    replay: all graphs share one memory pool. Large tensors of it, as logits, have the same memory in all graphs.
    """

    def __init__(
        self,
        function: Callable[[Tensor, Key], Out],
        new_pool: Callable[[], Any] = torch.cuda.graph_pool_handle,
    ) -> None:
        """``new_pool``: the handle of a memory pool for these graphs alone."""
        self._function = function
        self._new_pool = new_pool
        self._captured: dict[Key, tuple[Tensor, torch.cuda.CUDAGraph, Out]] = {}
        self._pool = new_pool()

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
        self._captured[key] = (example, graph, _without_large_memory(out))

    def clear(self) -> None:
        """Free the memory of all graphs, too."""
        self._captured.clear()
        self._pool = self._new_pool()

    def replay(self, key: Key, inputs: Tensor) -> Out:
        """``inputs`` are in pinned memory, which torch keeps until they are copied."""
        example, graph, out = self._captured[key]
        example.copy_(inputs, non_blocking=True)
        graph.replay()
        return out


def _without_large_memory(out: Any) -> Any:
    """A tensor, or a named tuple of tensors and others. Those that are large no longer keep their memory."""
    if isinstance(out, Tensor):
        return _alias(out) if out.nbytes >= LARGE_BYTES else out
    if isinstance(out, tuple) and hasattr(out, "_fields"):
        return type(out)(*map(_without_large_memory, out))
    return out


class _Memory:
    """Memory that somebody else owns."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        address = (storage.data_ptr(), False)  # it may be written
        self.__cuda_array_interface__ = {
            "shape": (storage.nbytes(),),
            "typestr": "|u1",
            "data": address,
            "version": 3,
        }


def _alias(tensor: Tensor) -> Tensor:
    """The same values, until the owner of the memory uses it for others."""
    values = torch.as_tensor(_Memory(tensor.untyped_storage()), device=tensor.device).view(tensor.dtype)
    return values.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


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
