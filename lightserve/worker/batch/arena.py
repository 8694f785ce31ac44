"""Where a worker reads the embeddings of images: in memory that it shares with the encoder, or on node 0."""

from __future__ import annotations

from collections.abc import Sequence
from mmap import mmap
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from lightserve.common.basemodel import TpPartBaseModel
from lightserve.ipc.arena import ArenaReader
from lightserve.messages.int_arrays import Int32Array
from lightserve.model_files.config.images import vectors_per_token


class Arena(Protocol):
    """The embeddings of all images that are cached. A row is of a token."""

    @property
    def row_shape(self) -> Sequence[int]:
        """Vectors, hidden."""

    @property
    def dtype(self) -> torch.dtype: ...

    def read(self, rows: Int32Array, into: Tensor) -> None:
        """``into``: [rows, vectors, hidden] of host memory."""


class SharedArena:
    def __init__(self, memory: mmap, row_shape: Sequence[int], dtype: torch.dtype) -> None:
        values = torch.frombuffer(memory, dtype=dtype)
        vectors, hidden = self.row_shape = row_shape
        count = len(values) // (vectors * hidden)
        self.dtype = dtype
        self._rows = values[: count * vectors * hidden].view(count, vectors, hidden)

    def read(self, rows: Int32Array, into: Tensor) -> None:
        torch.index_select(self._rows, 0, torch.from_numpy(rows.astype(np.int64)), out=into)


class RemoteArena:
    def __init__(self, reader: ArenaReader, row_shape: Sequence[int], dtype: torch.dtype) -> None:
        self.row_shape = row_shape
        self.dtype = dtype
        self._reader = reader

    def read(self, rows: Int32Array, into: Tensor) -> None:
        self._reader.read(rows, into.view(-1).view(torch.uint8).numpy().data)


def arena_of(model: TpPartBaseModel, memory: mmap | ArenaReader) -> Arena:
    row_shape, dtype = (vectors_per_token(model.config.hf), model.config.hidden_size), model.args.dtype
    if isinstance(memory, ArenaReader):
        return RemoteArena(memory, row_shape, dtype)
    return SharedArena(memory, row_shape, dtype)
