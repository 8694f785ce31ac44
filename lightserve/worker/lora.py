"""LoRA adapters of a worker: in host memory, and from there in slots on the device. The router decides which."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.common.basemodel import LoraArgs, TpPartBaseModel
from lightserve.common.device import host_memory
from lightserve.config import WorkerConfig
from lightserve.errors import LightserveError
from lightserve.messages.step import LoraPlace
from lightserve.messages.worker_calls import LoraLoad, LoraLoaded
from lightserve.model_files.lora.adapter import Adapter, check_rank, read_adapter
from lightserve.model_files.lora.paths import content_digest, parse_module
from lightserve.utils.logger import init_logger

logger = init_logger(__name__)


def slot_rank(max_lora_rank: int) -> int:
    """The rank of a slot: a power of 2, for the kernels."""
    return max(1 << (max_lora_rank - 1).bit_length(), ops.MIN_LORA_RANK)


def lora_args(config: WorkerConfig) -> LoraArgs | None:
    """None: no slots for adapters. The files of --lora_modules are read here, to check them before the weights load."""
    if not config.num_loras:
        return None
    adapters = [read_adapter(Path(path)) for _, path in map(parse_module, config.lora_modules)]
    for adapter in adapters:
        check_rank(adapter, config.max_lora_rank)
    return LoraArgs(config.num_loras, slot_rank(config.max_lora_rank), tuple(adapters))


def merged_adapter(config: WorkerConfig) -> Adapter | None:
    return None if config.merge_lora is None else read_adapter(Path(config.merge_lora))


class LoraCache:
    """Adapters in host memory, in the layout of a slot. One thread loads them, and another copies them to slots."""

    def __init__(self, model: TpPartBaseModel, max_rank: int) -> None:
        self._model = model
        self._max_rank = max_rank
        self._blocks: dict[int, Tensor] = {}  # by id
        self._free: list[Tensor] = []  # of dropped adapters: to pin memory anew would make the device wait
        self._lock = threading.Lock()

    def load(self, command: LoraLoad) -> LoraLoaded:
        """Read an adapter. Steps go on meanwhile."""
        self.drop(command.dropped)
        try:
            return LoraLoaded(digest=self._load(command))
        except LightserveError as error:
            return LoraLoaded(str(error))
        except (OSError, RuntimeError, MemoryError) as error:  # torch raises RuntimeError if no memory can be pinned
            logger.warning("the adapter %s cannot be loaded: %s", command.path, error, exc_info=error)
            return LoraLoaded(f"{command.path}: cannot be loaded ({type(error).__name__}: {error})")

    def _load(self, command: LoraLoad) -> str:
        """Returns the digest of its files: engines share KV of adapters whose files are the same."""
        adapter = read_adapter(Path(command.path))
        check_rank(adapter, self._max_rank)
        adapter = self._model.check_adapter(adapter)
        pool = self._model.lora
        assert pool is not None
        block = self._new_block()
        try:
            pool.fill(block, adapter)
        except BaseException:
            self._free.append(block)
            raise
        digest = content_digest(Path(command.path))
        with self._lock:
            self._blocks[command.lora_id] = block
        return digest

    def _new_block(self) -> Tensor:
        pool = self._model.lora
        assert pool is not None
        with self._lock:
            if self._free:
                return self._free.pop()
        return host_memory((pool.block_size,), pool.dtype, pool.device)

    def drop(self, lora_ids: Iterable[int]) -> None:
        """The router names no adapter that a step in flight copies."""
        with self._lock:
            dropped = [self._blocks.pop(lora_id, None) for lora_id in lora_ids]
            self._free += [block for block in dropped if block is not None]

    @torch.inference_mode()
    def fill_slots(self, places: Iterable[LoraPlace]) -> None:
        pool = self._model.lora
        assert pool is not None
        for lora in places:
            with self._lock:
                block = self._blocks[lora.lora_id]
            pool.put(lora.slot, block)


def group_rows(slots: np.ndarray, max_group: int) -> tuple[np.ndarray, list[tuple[int, int, int]]]:
    """The rows of a step that use adapters, sorted by slot, and their groups: slot, first and last + 1."""
    order = np.argsort(slots, kind="stable").astype(np.int32)
    order = order[np.searchsorted(slots[order], 0) :]  # without those that use none
    used_slots, begins, counts = np.unique(slots[order], return_index=True, return_counts=True)
    groups = [
        (slot, first, min(first + max_group, begin + count))
        for slot, begin, count in zip(used_slots.tolist(), begins.tolist(), counts.tolist(), strict=True)
        for first in range(begin, begin + count, max_group)
    ]
    return order, groups


def write_groups(rows: np.ndarray, groups: np.ndarray, slots: Sequence[int] | np.ndarray, tokens: int) -> None:
    """Fill the columns of a step; ``slots``: of each row, ``tokens``: with padding."""
    order, row_groups = group_rows(np.asarray(slots, dtype=np.int32), ops.lora_group_rows(tokens))
    rows[: len(order)] = order
    groups[:, : len(row_groups)] = np.array(row_groups, dtype=np.int32).reshape(-1, 3).T
