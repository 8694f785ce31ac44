"""The requests that a worker holds, and the tensors of one step over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from lightserve.common.basemodel import ModelInput
from lightserve.common.ops import AttnBatch
from lightserve.common.req_manager import ReqManager
from lightserve.io_struct import NewReq, SamplingParams, StepRow
from lightserve.router.model_infer.req_rules import ReqRules


@dataclass(slots=True, eq=False)
class InferReq:
    """A request in the worker: its tokens, and how many of them are in the KV cache."""

    req_id: int
    row: int  # of req_to_token
    token_ids: list[int]
    prompt_len: int
    sampling: SamplingParams
    seed: int
    eos_ids: tuple[int, ...]
    cache_len: int = 0
    counted_len: int = 0  # tokens that SeenTokens has counted
    rules: ReqRules = field(init=False)

    def __post_init__(self) -> None:
        self.rules = ReqRules(self.sampling, self.eos_ids)

    @property
    def output_len(self) -> int:
        return len(self.token_ids) - self.prompt_len

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)

    def forbidden_next(self) -> list[int]:
        return self.rules.forbidden_after(self.token_ids, self.output_len)


class InferBatch:
    """All requests of a worker by id."""

    def __init__(self, req_manager: ReqManager, device: torch.device) -> None:
        self._req_manager = req_manager
        self._device = device
        self._reqs: dict[int, InferReq] = {}

    def add(self, new: NewReq) -> None:
        row = self._req_manager.alloc()
        ids, cached = list(new.prompt_ids), np.array(new.cached_slots, dtype=np.int32)
        self._req_manager.req_to_token[row, : len(cached)] = self._to_device(cached)
        prompt_len = len(ids) - new.output_len
        req = InferReq(new.req_id, row, ids, prompt_len, new.sampling, new.seed, new.eos_ids, cache_len=len(cached))
        self._reqs[new.req_id] = req

    def remove(self, req_id: int) -> None:
        req = self._reqs.pop(req_id, None)  # a step that failed may not have let it in
        if req is not None:
            self._req_manager.free(req.row)

    def prepare(self, rows: Sequence[StepRow]) -> tuple[ModelInput, list[InferReq]]:
        """The model's input for the rows of a step, whose tokens count as cached from here on."""
        reqs = [self._reqs[row.req_id] for row in rows]
        q_len = np.array([len(row.slots) for row in rows], dtype=np.int32)
        ready = np.array([req.cache_len for req in reqs], dtype=np.int32)
        start = np.cumsum(q_len, dtype=np.int32) - q_len
        slots = np.array([slot for row in rows for slot in row.slots], dtype=np.int32)
        ids = [req.token_ids[r : r + n] for req, r, n in zip(reqs, ready.tolist(), q_len.tolist(), strict=True)]

        table_rows = np.array([req.row for req in reqs], dtype=np.int32)
        positions = np.arange(len(slots)) + np.repeat(ready - start, q_len)
        mem_index = self._to_device(slots)
        self._write_slots(np.repeat(table_rows, q_len), positions, mem_index)
        for req, count in zip(reqs, q_len.tolist(), strict=True):
            req.cache_len += count

        attn = AttnBatch(
            req_to_token=self._req_manager.req_to_token,
            b_req_idx=self._to_device(table_rows),
            b_start_loc=self._to_device(start),
            b_seq_len=self._to_device(ready + q_len),
            b_ready_cache_len=self._to_device(ready),
            max_q_len=int(q_len.max()),
            max_seq_len=int((ready + q_len).max()),
        )
        input_ids = self._to_device(np.array([token for chunk in ids for token in chunk], dtype=np.int64))
        return ModelInput(input_ids, mem_index, attn, is_prefill=attn.max_q_len > 1), reqs

    def _write_slots(self, rows: np.ndarray, positions: np.ndarray, mem_index: torch.Tensor) -> None:
        """req_to_token[row, position] = slot for every token of the step, in one scatter."""
        self._req_manager.req_to_token[self._to_device(rows), self._to_device(positions)] = mem_index

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)
