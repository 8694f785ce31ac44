"""Memory of a CPU whose content moves away and back: what is away is overwritten, for want of pages."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

AWAY = 0xFF


class HostPool:
    """A MappedPool."""

    def __init__(self) -> None:
        self.tensors: list[weakref.ref[Tensor]] = []
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}  # by address: the bytes of a storage, and a copy

    @contextmanager
    def use(self) -> Iterator[None]:
        with _Recorder(self.tensors):
            yield

    def settle(self) -> None:
        self.tensors = [ref for ref in self.tensors if ref() is not None]

    @property
    def is_away(self) -> bool:
        return bool(self._copies)

    def holds(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in {content.data_ptr() for content in self._contents()}

    def release(self) -> None:
        self._copies = {content.data_ptr(): (content, content.clone()) for content in self._contents()}
        for content, _ in self._copies.values():
            content.fill_(AWAY)

    def restore(self) -> None:
        for content, copy in self._copies.values():
            content.copy_(copy)
        self._copies = {}

    def _contents(self) -> Iterator[Tensor]:
        for ref in self.tensors:
            tensor = ref()
            if tensor is not None and tensor.nbytes:
                yield torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


class HostPools:
    def open(self, device: torch.device) -> HostPool:
        return HostPool()


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, tensors: list[weakref.ref[Tensor]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tensors = tensors

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._tensors += [weakref.ref(leaf) for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        return out
