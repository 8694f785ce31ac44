"""Runs requests on a model as a worker does: scattered slots, unequal lengths, prompts in chunks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from lightserve.common.basemodel import KvGroupInput, LogitRows, ModelInput, TpPartBaseModel
from lightserve.common.ops import NO_ROW, AttnBatch, StateBatch
from lightserve.router.kv.slots import TokenSlots

FLOAT8_NAN = 0x7F  # the bits of e4m3
STATE_ROWS = 40


class SessionStates:
    """The rows of requests' states, in random order. Those behind chunks of prompts are kept for other requests."""

    def __init__(self, model: TpPartBaseModel) -> None:
        self._memory, self._device = model.mem_manager, model.device
        self._free = np.random.default_rng(2).permutation(self._memory.state_rows).tolist()
        self._row: dict[int, int] = {}  # by request
        self._kept: dict[tuple[int, int], int] = {}  # by request and number of its tokens
        self._erase(slice(None))

    def batch(self, lengths: dict[int, int], q_len: list[int]) -> StateBatch:
        """The rows of a step. ``lengths``: of the requests behind it."""
        reads = [self._row.get(request, NO_ROW) for request in lengths]
        for (request, length), count in zip(lengths.items(), q_len, strict=True):
            if count > 1 or self._row.get(request, NO_ROW) in (NO_ROW, *self._kept.values()):
                self._row[request] = self._free.pop()
            if count > 1:
                self._kept[request, length] = self._row[request]
        starts = [sum(q_len[:i]) for i in range(len(q_len) + 1)]
        writes = [self._row[request] for request in lengths]
        b1_start, b_read_row, b_write_row = (
            torch.tensor(values, dtype=torch.int32, device=self._device) for values in (starts, reads, writes)
        )
        return StateBatch(b1_start, b_read_row, b_write_row, max(q_len))

    def share_prefix(self, donor: int, request: int, length: int) -> None:
        """Let a request continue from the state behind a chunk of another."""
        self._row[request] = self._kept[donor, length]

    def finish(self, request: int) -> None:
        """Forget a request, and the rows that it alone has."""
        rows = {row for (owner, _), row in self._kept.items() if owner == request} | {self._row.pop(request)}
        self._kept = {key: row for key, row in self._kept.items() if key[0] != request}
        freed = sorted(rows.difference(self._row.values(), self._kept.values()))
        self._free += freed
        self._erase(torch.tensor(freed))

    def _erase(self, rows: Tensor | slice) -> None:
        for group in self._memory.state_buffers:
            for buffer in group:
                buffer[:, rows] = float("nan")


class Session:
    """Slots come in random order. A slot without a token contains NaN, so that reading it shows in the logits."""

    def __init__(self, model: TpPartBaseModel) -> None:
        self.model = model
        if model.kv_layout.states and not model.mem_manager.state_rows:
            model.set_kv_size(model.mem_manager.size, model.mem_manager.group_sizes, STATE_ROWS)
        self._states = SessionStates(model) if model.kv_layout.states else None
        self.device = model.device
        size = min([model.mem_manager.size, *model.mem_manager.group_sizes])
        self.free_slots = TokenSlots(size)
        self._place = np.random.default_rng(1).permutation(size).astype(np.int32)
        self._slots: dict[int, list[int]] = {}  # by row, as numbered by the allocator
        self._erase(slice(None))

    def step(self, new_tokens: dict[int, list[int]], *, logit_rows: LogitRows | Tensor = LogitRows.LAST) -> Tensor:
        """Append tokens to the requests in the given rows; the logits of ``logit_rows``."""
        return self.model.forward(self.input_of(new_tokens, logit_rows)).cpu()

    def input_of(self, new_tokens: dict[int, list[int]], logit_rows: LogitRows | Tensor = LogitRows.LAST) -> ModelInput:
        ready = {row: len(self._slots.setdefault(row, [])) for row in new_tokens}
        for row, tokens in new_tokens.items():
            self._slots[row] += self.free_slots.alloc(len(tokens)).tolist()
            self._write_row(row)
        q_len = [len(tokens) for tokens in new_tokens.values()]
        slots = [s for row in new_tokens for s in self._place[self._slots[row][ready[row] :]].tolist()]
        attn = AttnBatch(
            req_to_token=self.model.req_manager.req_to_token,
            b_req_idx=self._ints(list(new_tokens)),
            b_start_loc=self._ints([sum(q_len[:i]) for i in range(len(q_len))]),
            b_seq_len=self._ints([len(self._slots[row]) for row in new_tokens]),
            b_ready_cache_len=self._ints(list(ready.values())),
        )
        ids = torch.tensor([t for tokens in new_tokens.values() for t in tokens], device=self.device)
        positions = [ready[row] + i for row, tokens in new_tokens.items() for i in range(len(tokens))]
        mem_index = self._ints(slots)  # tokens have the same slots in all pools
        groups = tuple(KvGroupInput(mem_index, replace(attn, plans={})) for _ in self.model.mem_manager.group_sizes)
        lengths = {row: len(self._slots[row]) for row in new_tokens}
        states = None if self._states is None else self._states.batch(lengths, q_len)
        return ModelInput(
            ids, self._ints(positions), mem_index, attn, max(q_len) > 1, logit_rows, groups, states=states
        )

    def share_prefix(self, donor: int, row: int, length: int) -> None:
        """Start the request in ``row`` with the first tokens of another, in the same slots.

        In models with recurrent layers, a chunk of the other's prompt must have ended there.
        """
        self._slots[row] = self._slots[donor][:length]
        self._write_row(row)
        if self._states is not None:
            self._states.share_prefix(donor, row, length)

    def finish(self, row: int) -> None:
        """Remove the request and free its slots."""
        slots = np.array(self._slots.pop(row), dtype=np.int32)
        self.free_slots.free(slots)
        self._erase(torch.from_numpy(self._place[slots]).long())
        if self._states is not None:
            self._states.finish(row)

    def _erase(self, slots: Tensor | slice) -> None:
        """Fill slots with NaN; integers have none, but their scales do."""
        memory = self.model.mem_manager
        for buffer in (*memory.buffers, *memory.scale_buffers.values()):
            if buffer.dtype == torch.float8_e4m3fn:
                buffer.view(torch.uint8)[:, slots] = FLOAT8_NAN
            elif buffer.is_floating_point():
                buffer[:, slots] = float("nan")

    def _write_row(self, row: int) -> None:
        places = torch.from_numpy(self._place[self._slots[row]])
        self.model.req_manager.req_to_token[row, : len(places)] = places.to(self.device)

    def _ints(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)
