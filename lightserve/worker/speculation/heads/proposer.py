"""Lets a draft head draft tokens for the next step on the device, as soon as the tokens of a step are sampled.

The head first computes all tokens of the step, so its KV cache has the same tokens as the model's. Then it computes
further positions of each request: one after the other for each further draft, or all at once. The slots of those
positions are not known yet. So they have slots of their own behind those of the pool, which the next such position
overwrites.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.common.basemodel import KvGroupInput, ModelInput
from lightserve.common.device import to_device
from lightserve.messages.int_arrays import Int64Array
from lightserve.worker.batch.infer_batch import InferBatch, PackedStep
from lightserve.worker.batch.infer_req import InferReq
from lightserve.worker.sampling.verification import NO_DRAFT
from lightserve.worker.speculation.draft_input import UNKNOWN, VerifiedCounts
from lightserve.worker.speculation.heads.head import AutoregressiveHead, DraftHead, ParallelHead, SampledAt
from lightserve.worker.step_runner import StepOut, StepRunner


class RowsOfStep(NamedTuple):
    """The rows of logits of a step with drafts. Without drafts, the last token of each request has a row."""

    tokens: Tensor  # [rows] int64: the token of each row, perhaps without those of padding
    sampled: Tensor  # [rows] int64: the token that it has sampled
    last: Tensor  # [requests] int64: the row of the last accepted draft, or of the token before the drafts

    @classmethod
    def of(cls, out: StepOut, tokens: Tensor, counts: VerifiedCounts) -> RowsOfStep:
        """``tokens``: of all rows except padding."""
        assert out.drafts is not None
        tensors = out.drafts.tensors
        first = tensors.first_rows.long()
        last = first + counts.tokens[first] - 1
        return cls(tensors.logit_tokens.long()[: len(tokens)], tokens, last.clamp(max=len(tokens) - 1))


class HeadProposer(ABC):
    """Drafts wait in a table, ``[request rows, num_drafts]``, which ``propose`` reads."""

    _head: DraftHead

    def __init__(self, head: DraftHead, batch: InferBatch, runner: StepRunner, num_drafts: int) -> None:
        self._model = model = head.model
        self._head, self._batch, self._runner, self._num_drafts = head, batch, runner, num_drafts
        num_rows = model.req_manager.max_reqs + 1
        self._table = torch.full((num_rows, num_drafts), NO_DRAFT, dtype=torch.int64, device=model.device)
        self._temperatures = torch.zeros(num_rows, device=model.device)  # by row; 0: greedily
        runner.states_of_model = head.model_states
        model.keep_states_after(head.aux_layers)

    def add(self, req: InferReq) -> None:
        """A request that enters the batch."""
        self._temperatures[req.row].fill_(0.0 if req.sampling.is_greedy else req.sampling.temperature)

    def propose(self, reqs: Sequence[InferReq], counts: Int64Array, ready_len: Tensor) -> Tensor:
        rows = np.repeat(np.array([req.row for req in reqs], dtype=np.int64), counts)
        numbers = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        b_row, b_number = to_device(np.concatenate((rows, numbers)), self._table.device).view(2, -1).unbind()
        return self._table[b_row, b_number]

    def known_after(self, packed: PackedStep) -> Int64Array | None:
        """The token after those that the step computes of each request, if it is part of its prompt: [requests].

        None: it is of no request.
        """
        columns, rows = self._batch.columns, packed.rows
        is_known = columns.known_len[rows] > columns.cache_len[rows]
        if not is_known.any():
            return None
        known = np.full(len(rows), UNKNOWN, dtype=np.int64)
        for index in np.flatnonzero(is_known).tolist():
            req = packed.reqs[index]
            known[index] = req.token_ids[req.cache_len]
        return known

    def draft(self, out: StepOut, rows: RowsOfStep | None, known_after: Tensor | None, num_drafts: int) -> None:
        """``out``: of a step whose tokens are sampled, and written to ``last_ids`` of the batch.

        ``known_after``: as that method says, on the device. ``num_drafts``: of a request in the next step, at most.
        """
        assert out.for_head is not None
        step, columns = out.for_head.step, out.columns.reqs
        b_row = columns["row"].long()
        next_ids, last = self._tokens_after(step, b_row, rows, known_after)
        attn = replace(step.attn, shared_prefixes=None, plans={}, see_until=None)
        step = replace(step, input_ids=next_ids, attn=attn, lora=None)
        computed = self._compute(self._head.hidden(out.for_head.states), step)[last]
        num_drafts = min(num_drafts, self._num_drafts)
        self._table[:, num_drafts:].index_fill_(0, b_row, NO_DRAFT)  # a capture refuses to copy a number
        if not num_drafts:
            return
        positions = step.position_ids[last]
        at = SampledAt(self._temperatures[b_row], columns["seed"], positions)
        self._table[b_row, :num_drafts] = self._draft(computed, at, step, num_drafts)

    def _tokens_after(
        self, step: ModelInput, b_row: Tensor, rows: RowsOfStep | None, known_after: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The token after each token of the step, and the last token of each request that counts, as its place."""
        next_ids, attn = step.input_ids.roll(-1), step.attn
        q_len = attn.b_seq_len - attn.b_ready_cache_len
        if rows is None:
            last = (attn.b_start_loc + q_len - 1).long()
            sampled = self._batch.last_ids[b_row]
        else:
            next_ids[rows.tokens] = rows.sampled.clamp(min=0)
            last, sampled = rows.tokens[rows.last], rows.sampled[rows.last]
        if known_after is not None:
            sampled = torch.where(known_after != UNKNOWN, known_after, sampled)
        with_padding = torch.cat((next_ids, next_ids[:1]))  # requests without tokens write to the last place
        with_padding[torch.where(q_len > 0, last, len(next_ids))] = sampled.clamp(min=0)
        return with_padding[:-1], last

    @abstractmethod
    def _compute(self, hidden: Tensor, step: ModelInput) -> Tensor:
        """Bring the KV of the head up to date. Returns what the drafts after each token of the step begin with.

        ``step.input_ids`` are the tokens after those of the step.
        """

    @abstractmethod
    def _draft(self, computed: Tensor, at: SampledAt, step: ModelInput, num_drafts: int) -> Tensor:
        """``[requests, num_drafts]``. ``computed``: of the last token of each request, at the positions of ``at``."""

    def _scratch_slots(self, b_row: Tensor) -> Tensor:
        """``[slots, requests]`` int32. Padding writes to its own slot."""
        count = self._head.scratch_slots(self._num_drafts)
        numbers = torch.arange(count, device=b_row.device)[:, None]
        memory, padding_row = self._model.mem_manager, self._model.req_manager.padding_row
        slots = memory.padding_slot + 1 + b_row * count + numbers
        return slots.where(b_row != padding_row, memory.padding_slot).int()

    def _rotary_positions(self, positions: Tensor, b_row: Tensor) -> Tensor | None:
        """After images. ``positions`` and ``b_row``, the row of each request, have the same shape. None: the same."""
        images = self._batch.images
        if images is None or images.rotary_offsets is None:
            return None
        return (positions + images.rotary_offsets[b_row]).clamp(min=0)  # drafts inside a prompt are not needed

    def _sample_local(self, logits: Tensor, at: SampledAt) -> Tensor:
        return self._runner.sample(logits, at, None)


class AutoregressiveProposer(HeadProposer):
    _head: AutoregressiveHead

    def _compute(self, hidden: Tensor, step: ModelInput) -> Tensor:
        return self._head.forward(hidden, step)

    def _draft(self, computed: Tensor, at: SampledAt, step: ModelInput, num_drafts: int) -> Tensor:
        summed, positions = computed, at.positions
        b_row = step.attn.b_req_idx.long()
        table = step.attn.req_to_token
        columns = positions + torch.arange(1, num_drafts, device=positions.device)[:, None]
        places = b_row, columns.clamp(max=table.shape[1] - 1).long()
        slots_before = table[places]
        table[places] = slots = self._scratch_slots(b_row)[: num_drafts - 1]
        drafts = []
        for number in range(num_drafts):
            normed = self._head.normed(summed)
            # the draft follows the token that was sampled, which follows the last one that is computed
            ids = self._head.sample(normed, at._replace(positions=positions + number + 2), self._sample_local)
            drafts.append(ids)
            if number + 1 < num_drafts:
                hidden = self._head.recycled(summed, normed)
                next_step = self._one_token(step, ids, places[1][number].int(), slots[number])
                summed = self._head.forward(hidden, next_step)
        table[places] = slots_before
        return torch.stack(drafts, dim=1)

    def _one_token(self, step: ModelInput, ids: Tensor, positions: Tensor, slots: Tensor) -> ModelInput:
        starts = torch.arange(len(ids), dtype=torch.int32, device=ids.device)
        attn = ops.AttnBatch(
            step.attn.req_to_token, step.attn.b_req_idx, starts, positions + 1, positions, has_decodes=True
        )
        groups = tuple(KvGroupInput(slots, attn) for _ in step.kv_groups)
        return ModelInput(
            ids.clamp(min=0),
            positions,
            slots,
            attn,
            is_prefill=False,
            kv_groups=groups,
            states=step.states,
            rotary_positions=self._rotary_positions(positions, step.attn.b_req_idx.long()),
        )


class ParallelProposer(HeadProposer):
    """A block has masks for all drafts that a step may have, as in training, even if the next step has fewer."""

    _head: ParallelHead

    def _compute(self, hidden: Tensor, step: ModelInput) -> Tensor:
        self._head.write_context(hidden, step)
        return step.input_ids

    def _draft(self, computed: Tensor, at: SampledAt, step: ModelInput, num_drafts: int) -> Tensor:
        b_row, table = step.attn.b_req_idx.long(), step.attn.req_to_token
        slots = self._scratch_slots(b_row)
        # at the end of the longest text a block begins before its place, and its drafts are not needed
        begin = (at.positions + 1).clamp(max=table.shape[1] - len(slots))
        positions = begin + torch.arange(len(slots), device=begin.device)[:, None]
        places = b_row, positions.long()
        slots_before = table[places]
        table[places] = slots
        states = self._head.block(self._blocks(step, computed, positions.T, slots.T))
        table[places] = slots_before
        normed = self._head.normed(states).view(len(b_row), len(slots), -1)[:, 1 : 1 + num_drafts]
        rows = torch.arange(len(b_row), device=begin.device).repeat_interleave(num_drafts)
        drafted = at.positions[:, None] + torch.arange(2, 2 + num_drafts, device=begin.device)
        sampled_at = SampledAt(at.temperatures[rows], at.seeds[rows], drafted.flatten().int())
        drafts = self._head.sample(normed.flatten(0, 1), sampled_at, self._sample_local)
        return drafts.view(len(b_row), num_drafts)

    def _blocks(self, step: ModelInput, next_ids: Tensor, positions: Tensor, slots: Tensor) -> ModelInput:
        """``next_ids``: the token that begins each block. ``positions`` and ``slots``: ``[requests, tokens]``."""
        count = positions.shape[1]
        ids = next_ids.new_full(positions.shape, self._head.mask_token_id)
        ids[:, 0] = next_ids.clamp(min=0)
        begin, end = positions[:, 0].int(), positions[:, -1].int()
        attn = ops.AttnBatch(
            step.attn.req_to_token,
            step.attn.b_req_idx,
            torch.arange(len(begin), dtype=torch.int32, device=begin.device) * count,
            end + 1,
            begin,
            see_until=end.repeat_interleave(count),
        )
        mem_index = slots.flatten().contiguous()
        groups = tuple(KvGroupInput(mem_index, attn) for _ in step.kv_groups)
        positions = positions.flatten().int().contiguous()
        b_row = step.attn.b_req_idx.long().repeat_interleave(count)
        return ModelInput(
            ids.flatten(),
            positions,
            mem_index,
            attn,
            is_prefill=True,
            kv_groups=groups,
            states=step.states,
            rotary_positions=self._rotary_positions(positions, b_row),
        )


def head_proposer(head: DraftHead, batch: InferBatch, runner: StepRunner, num_drafts: int) -> HeadProposer:
    kind = ParallelProposer if isinstance(head, ParallelHead) else AutoregressiveProposer
    return kind(head, batch, runner, num_drafts)


def num_extra_slots(head: DraftHead, max_reqs: int, num_drafts: int) -> int:
    """Behind that of padding: see ``_scratch_slots``."""
    return max_reqs * head.scratch_slots(num_drafts)
