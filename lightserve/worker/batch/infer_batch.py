"""The requests of a worker, and the input of a step over them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.common.basemodel import TpPartBaseModel
from lightserve.common.device import to_device
from lightserve.common.kv.req_manager import ReqManager
from lightserve.common.ops.step import LAST_SAMPLED
from lightserve.messages.int_arrays import (
    NO_INT32,
    NO_INT64,
    GrowingArray,
    Int32Array,
    Int32s,
    Int64Array,
    int32s,
    int64s,
)
from lightserve.messages.step import NewReq, Step
from lightserve.worker.batch.images import BatchImages, PackedImages
from lightserve.worker.batch.infer_req import InferReq
from lightserve.worker.batch.prompt_targets import PromptTargets, step_logprobs
from lightserve.worker.batch.req_columns import ReqColumns
from lightserve.worker.batch.retained_reqs import RetainedReqs
from lightserve.worker.batch.routed_experts import NO_EXPERTS, ExpertsReader, StepSlots
from lightserve.worker.batch.sampled import Sampled, SampledRow, StepUpdates, TokenOnlyRows
from lightserve.worker.batch.shared_prefixes import MIN_MEMBERS, SharedPrefixes, SharedRows
from lightserve.worker.batch.state_rows import StateRows, WrittenRows
from lightserve.worker.batch.step_input import Padding, StepShape, Values, pack, padded_input
from lightserve.worker.batch.step_rows import StepRows
from lightserve.worker.lora import write_groups
from lightserve.worker.sampling.grammar import GrammarOutput, ReqGrammar
from lightserve.worker.sampling.logprobs import StepPromptLogprobs
from lightserve.worker.sampling.thinking import ThinkingBudget
from lightserve.worker.speculation.draft_input import DraftInput, draft_counts, ready_len, spread

# A step of few requests takes little longer than reading the weights, unless they share a lot. Another kernel in each
# layer takes 0.1 ms in sum, in which an H200 reads 3,000 tokens of Llama-3-8B.
FEW_REQUESTS, MIN_SAVED_BY_FEW = 16, 8_192  # tokens


@dataclass(frozen=True, slots=True)
class PackedStep:
    """A step as one array of integers, padded to a shape."""

    inputs: np.ndarray  # int32: see step_input.py
    shape: StepShape
    reqs: list[InferReq]
    rows: Int64Array  # of the batch, one for each request
    prompt_targets: list[PromptTargets]
    drafts: DraftInput | None = None  # None: every request has one row of logits
    images: PackedImages | None = None  # None: it computes no token up to the end of an image

    @property
    def logit_reqs(self) -> list[InferReq]:
        """The request of each row of logits."""
        return self.reqs if self.drafts is None else [self.reqs[index] for index in self.drafts.logit_reqs.tolist()]

    def prompt_logprobs(self, device: torch.device) -> StepPromptLogprobs | None:
        """The logprobs of prompts that the step computes. Each request gets its chunk of them."""
        return step_logprobs(self.prompt_targets, device) if self.prompt_targets else None


class InferBatch:
    """All requests of a worker by id, and on the device the token that was sampled last for each.

    The device also has the lengths of requests whose last step had drafts: the host learns them with their tokens.
    """

    def __init__(
        self,
        req_manager: ReqManager,
        padding_slot: int,
        device: torch.device,
        shares_prefixes: bool = True,
        has_kv: bool = True,
    ) -> None:
        """``shares_prefixes``: steps pass groups of requests that begin with the same slots to attention.

        Without a KV cache (``has_kv``), attention reads the step itself: the slot of a token is its row there.
        """
        self._req_manager = req_manager
        self.padding_slot = padding_slot  # it changes with the size of the KV pool
        self.group_padding_slots: tuple[int, ...] = ()  # the same of KV groups that have pools
        self._device = device
        self.columns = ReqColumns(req_manager.max_reqs)
        self._num_entered = 0
        self._reqs: dict[int, InferReq] = {}  # by id
        self._req_by_row: dict[int, InferReq] = {}  # by row
        self._row_of: dict[int, int] = {}  # by id
        self.retained = RetainedReqs()
        self._prefixes: SharedPrefixes[InferReq] = SharedPrefixes()
        self.shares_prefixes = shares_prefixes
        self._has_kv = has_kv
        self.lora_slots = 0  # on the device
        self.states: StateRows | None = None  # None: no layer is recurrent
        self.images: BatchImages | None = None  # None: requests have none
        self.experts: ExpertsReader | None = None  # None: they are not kept
        self.req_to_token = req_manager.req_to_token
        self.last_ids = torch.zeros(req_manager.max_reqs + 1, dtype=torch.int64, device=device)  # by row
        self.lengths = torch.zeros(req_manager.max_reqs + 1, dtype=torch.int32, device=device)  # the same

    def use_slots_of(self, model: TpPartBaseModel) -> None:
        """Its KV pool has another size."""
        self.padding_slot = model.mem_manager.padding_slot
        self.group_padding_slots = model.mem_manager.group_padding_slots
        experts = model.routed_experts
        self.experts = None if experts is None else ExpertsReader(experts.table, self.req_to_token)

    def enable_states(self) -> None:
        """The model has recurrent layers: the last KV group of every step has the rows of their states."""
        self.states = StateRows(self._req_manager.max_reqs)

    def add(self, new: NewReq, grammar: ReqGrammar | None = None, thinking: ThinkingBudget | None = None) -> None:
        row = self._req_manager.alloc()
        known, cached = GrowingArray(new.token_ids), int32s(new.cached_slots)
        prompt_len = len(known) - new.output_len
        req = InferReq(
            new.req_id,
            row,
            known,
            prompt_len,
            new.sampling,
            new.seed,
            new.eos_ids,
            new.stopping,
            grammar,
            thinking,
            output=None if grammar is None else GrammarOutput(new, grammar),
            lora_slot=new.lora_slot,
        )
        req.cache_len = len(cached)
        req.leading_slots[: len(cached)] = cached
        group_slots: Sequence[Int32s] = new.group_slots
        if self.states is not None:
            *group_slots, held = group_slots
            self.states.enter(row, int32s(held))
        if self.images is not None:
            self.images.enter(row, new.images, len(new.token_ids) - new.output_len)
        if len(cached):
            self.req_to_token[row, : len(cached)] = to_device(req.leading_slots[: len(cached)], self._device)
            for table, slots in zip(self.group_req_to_token, group_slots, strict=True):
                self._add_to_group(table[row], len(cached), int32s(slots))
        self._enter(req)

    def _enter(self, req: InferReq) -> None:
        columns, row = self.columns, req.row
        self._reqs[req.req_id] = self._req_by_row[row] = req
        self._row_of[req.req_id] = row
        self._num_entered += 1
        columns.known.take(row)  # of a request that left
        req.move_to(columns, row)
        columns.entry[row] = self._num_entered
        columns.req_id[row] = req.req_id
        columns.leading_len[row] = len(req.leading_slots)
        columns.last_known[row] = req.known.item(len(req.known) - 1)
        columns.seed[row], columns.temperature[row] = req.seed, req.temperature
        columns.lora_slot[row] = req.lora_slot
        columns.reads_tokens[row] = req.reads_tokens
        columns.is_plain[row] = req.is_plain and req.prompt_chunks is None

    @property
    def group_req_to_token(self) -> list[Tensor]:
        return self._req_manager.group_req_to_token

    def _add_to_group(self, row: Tensor, end: int, slots: Int32Array) -> None:
        """``row``: of the group's table; ``slots``: of its pool, of the tokens up to ``end``.

        Attention may read some tokens before those, with weight 0. They get the first of the slots, which is finite.
        """
        begin = end - len(slots)
        margin = min(begin, ops.WINDOW_MARGIN)
        padded = np.concatenate((np.repeat(slots[:1], margin), slots))
        row[begin - margin : end] = to_device(padded, self._device)

    def apply(self, updates: Iterable[StepUpdates]) -> None:
        """Append collected tokens. Sampled ones count in ``total_len`` already. A request may have left meanwhile."""
        for step in updates:
            self._apply_plain(step.plain, step.plain_token_ids, step.plain_counts)
            for req, token_ids, is_constrained, drafts, accepted in step.with_details:
                req.add_known(token_ids)
                req.total_len += len(token_ids) - 1 - accepted
                req.is_constrained = is_constrained
                if drafts:
                    row = np.array([req.columns_row])
                    req.columns.accept(row, np.array([accepted], dtype=np.int32), np.array([drafts]))
                    req.returned_experts += accepted

    def _apply_plain(self, plain: TokenOnlyRows, token_ids: Int32Array, counts: Int32Array) -> None:
        columns = self.columns
        is_here = columns.entry[plain.rows] == plain.generations
        rows = plain.rows[is_here]
        if len(counts):
            token_ids, counts = token_ids[np.repeat(is_here, counts)], counts[is_here]
            columns.accept(rows, counts - 1, plain.drafts[is_here])
        else:
            token_ids = token_ids[is_here]
        for row in columns.known.full(rows, counts if len(counts) else 1):
            self._req_by_row[row].flush()
        columns.known.append(rows, token_ids, counts)
        columns.known_len[rows] += counts if len(counts) else 1
        columns.last_known[rows] = token_ids[np.cumsum(counts) - 1] if len(counts) else token_ids

    def take_sampled(self, packed: PackedStep, slots: Tensor | None = None) -> Sampled:
        """The rows of the step that was packed last whose tokens were sampled. Their tokens are in flight now.

        ``slots``: of the tokens of a step with drafts.
        """
        columns, rows = self.columns, packed.rows
        is_sampled = columns.cache_len[rows] == columns.total_len[rows]
        is_plain = is_sampled & (columns.is_plain[rows] > 0)
        indices = np.flatnonzero(is_plain)
        plain_rows = rows[indices]
        columns.total_len[plain_rows] += 1
        detailed = np.flatnonzero(is_sampled & ~is_plain).tolist()
        experts = NO_EXPERTS
        if self.experts is not None:
            of_step = StepSlots.of(packed.drafts, detailed, slots)
            experts = self.experts.read([packed.reqs[index] for index in detailed], of_step)
        with_details = [SampledRow(index, packed.reqs[index], packed.reqs[index].add_sampled()) for index in detailed]
        plain = TokenOnlyRows(indices, plain_rows, columns.entry[plain_rows], columns.req_id[plain_rows])
        if packed.drafts is None:
            return Sampled(with_details, plain, experts)
        first, drafts = packed.drafts.first_rows, packed.drafts.drafts
        columns.drafts_in_flight[rows] -= np.where(
            is_sampled, 0, drafts
        )  # of those with forced tokens none is accepted
        with_rows = [
            SampledRow(int(first[index]), req, chunks, int(drafts[index])) for index, req, chunks, _ in with_details
        ]
        return Sampled(with_rows, plain._replace(indices=first[indices], drafts=drafts[indices]), experts)

    def free(self, step: Step) -> None:
        """Remove the requests that leave with this step, and keep what later ones may begin with."""
        for req_id in step.retain:
            self.retained.add(self._reqs[req_id])
        for req_id in step.free:
            self.remove(req_id)
        self.retained.release(step.release)

    def remove(self, req_id: int) -> None:
        req = self._reqs.pop(req_id, None)  # it may be unknown if the step that brought it failed
        if req is not None:
            del self._req_by_row[req.row], self._row_of[req_id]
            req.move_to(ReqColumns(1), 0)  # a step in flight may still give it a token
            self.columns.entry[req.row] = 0
            self._req_manager.free(req.row)
            self._prefixes.discard(req)

    def clear(self) -> None:
        """Remove all requests, also one whose ``add`` was interrupted."""
        self._reqs.clear()
        self._req_by_row.clear()
        self._row_of.clear()
        self.retained.clear()
        self.columns.entry[:] = 0
        self._prefixes = SharedPrefixes()
        self._req_manager.free_all()

    def pack(self, step: Step, captured_shape: Callable[[StepShape], StepShape]) -> PackedStep:
        """The input of a step. Its tokens count as cached from now on, and its requests may be in another order.

        ``captured_shape`` returns the shape to pad to. A step that computes logprobs of prompts, tokens that see later
        ones, or drafts beside images, keeps its shape, because no captured step computes them.
        """
        step_rows = self._rows_of(step)
        self._record_prompts(step_rows)
        step_rows, groups = self._arrange(step_rows)
        rows, q_len = step_rows.rows, step_rows.q_len
        reqs = self._reqs_at(rows)
        count = len(step_rows.slots)
        start = np.cumsum(q_len) - q_len
        prompt_targets = self._prompt_targets(step_rows, start)
        ready = self.columns.cache_len[rows]
        images = None if self.images is None else self.images.pack(rows, q_len, ready)
        shape = self._shape(step_rows, bool(groups))._replace(has_images=images is not None)
        if not prompt_targets and (images is None or images.see_until is None):
            shape = step_rows.captured_shape(shape, step.next_drafts, captured_shape)
        inputs, columns = padded_input(shape, self._padding)

        tokens: dict[str, Values] = {
            "row": np.repeat(rows, q_len),
            "position": np.arange(count) + np.repeat(ready - start, q_len),
            "slot": step_rows.slots if self._has_kv else np.arange(count),
            "token_id": self._token_ids(step_rows, start),
        }
        computed: dict[str, Values] = {
            "row": rows,
            "start": start,
            "seq_len": ready + q_len,
            "ready_len": ready if step_rows.counts is None else ready_len(rows, self.columns),
            "temperature": self.columns.temperature[rows],
            "seed": self.columns.seed[rows],
        }
        pack(columns, tokens, reqs, computed)
        if columns.groups is not None:  # the captured shape may have none
            columns.groups[: len(groups), : len(SharedRows._fields)] = groups
        if columns.images is not None and images is not None:  # the captured shape may have room for them
            images.write(columns.images)
        if columns.lora_groups is not None:
            lora_slots = np.repeat(self.columns.lora_slot[rows], q_len)
            write_groups(columns.lora_rows, columns.lora_groups, lora_slots, shape.tokens)
        for view, slots in zip(columns.group_slots, step_rows.group_slots, strict=True):
            view[:count] = slots
        if self.states is not None and columns.states is not None and step_rows.state_rows is not None:
            self.states.pack(columns.states, rows, q_len, step_rows.state_rows)

        drafts = None if step_rows.counts is None else DraftInput.planned(step_rows.counts, rows, q_len, self.columns)
        self.columns.cache_len[rows] += q_len if drafts is None else q_len - drafts.drafts
        return PackedStep(inputs, shape, reqs, rows, prompt_targets, drafts, images)

    def _rows_of(self, step: Step) -> StepRows:
        chunks = step.chunks
        req_ids = [*int64s(step.decode_ids).tolist(), *(chunk.req_id for chunk in chunks)]
        rows = np.fromiter(map(self._row_of.__getitem__, req_ids), dtype=np.int64, count=len(req_ids))
        q_len = np.ones(len(req_ids), dtype=np.int64)
        q_len[len(req_ids) - len(chunks) :] = [len(chunk.slots) for chunk in chunks]
        slots = np.concatenate((NO_INT32, int32s(step.decode_slots), *(int32s(chunk.slots) for chunk in chunks)))
        group_slots = [int32s(of_group) for of_group in step.group_slots]
        state_rows = None
        if self.states is not None:
            *group_slots, written = group_slots
            state_rows = WrittenRows.of_step(written, int32s(step.snapshots), len(rows))
        self.columns.spare_slots[rows[len(req_ids) - len(chunks) :]] = 0  # the router has taken them back
        counts = draft_counts(step, rows, self.columns)
        if counts is not None:
            q_len += counts.drafts
            slots = spread(slots, counts.slots, q_len)
            group_slots = [spread(of_group, counts.slots, q_len) for of_group in group_slots]
        return StepRows(rows, q_len, slots, tuple(group_slots), int32s(step.token_ids), counts, state_rows)

    def reqs_of(self, req_ids: Int64Array) -> list[InferReq]:
        """Requests of the batch by their ids."""
        return list(map(self._reqs.__getitem__, req_ids.tolist()))

    def reads_tokens_of(self, step: Step) -> bool:
        """Whether rules of its decodes depend on drafts: those that it computes, or those in flight."""
        rows = np.array([self._row_of[req_id] for req_id in int64s(step.decode_ids).tolist()], dtype=np.int64)
        has_drafts = (int32s(step.draft_counts) > 0) | (self.columns.drafts_in_flight[rows] > 0)
        return bool((has_drafts & (self.columns.reads_tokens[rows] > 0)).any())

    def _reqs_at(self, rows: Int64Array) -> list[InferReq]:
        return list(map(self._req_by_row.__getitem__, rows.tolist()))

    def _shape(self, step_rows: StepRows, has_groups: bool) -> StepShape:
        has_decodes, has_prompts = bool((step_rows.q_len == 1).any()), bool((step_rows.q_len > 1).any())
        if not self._has_kv:
            has_decodes, has_prompts = False, True
        num_slots = self.lora_slots if self._has_lora(step_rows.rows) else 0
        return StepShape(len(step_rows.slots), len(step_rows.rows), has_decodes, has_prompts, has_groups, num_slots)

    def _has_lora(self, rows: Int64Array) -> bool:
        return self.lora_slots > 0 and bool((self.columns.lora_slot[rows] >= 0).any())

    def _prompt_targets(self, step_rows: StepRows, start: Int64Array) -> list[PromptTargets]:
        all_targets = []
        for index in np.flatnonzero(self.columns.is_plain[step_rows.rows] == 0).tolist():
            req = self._req_by_row[int(step_rows.rows[index])]
            targets = req.prompt_targets(int(step_rows.q_len[index]))
            if targets:
                candidates = req.candidates_of(len(targets))
                all_targets.append(PromptTargets(req, int(start[index]), targets, candidates))
        return all_targets

    def _token_ids(self, step_rows: StepRows, start: Int64Array) -> Int32Array | Int64Array:
        """The ids of the tokens to compute. The last one of a request may be in flight, and drafts are not known."""
        if len(step_rows.token_ids):
            return step_rows.token_ids
        columns, rows = self.columns, step_rows.rows
        ids = np.full(len(step_rows.slots), LAST_SAMPLED, dtype=np.int64)
        ready = columns.cache_len[rows]
        uncomputed = columns.known_len[rows] - ready  # known tokens
        is_last = uncomputed == 1
        ids[start[is_last]] = columns.last_known[rows[is_last]]
        for index in np.flatnonzero((uncomputed > 0) & ~is_last).tolist():
            begin, count = int(ready[index]), int(step_rows.q_len[index])
            known = self._req_by_row[int(rows[index])].token_ids[begin : begin + count]
            first = int(start[index])
            ids[first : first + len(known)] = known
        return ids

    def _record_prompts(self, step_rows: StepRows) -> None:
        """Record the slots of prompts. Other requests may share them from the next step on."""
        left = self.columns.leading_len[step_rows.rows] - self.columns.cache_len[step_rows.rows]
        indices = np.flatnonzero(left > 0).tolist()
        ends = np.cumsum(step_rows.q_len) if indices else NO_INT64
        for index in indices:
            req, end = self._req_by_row[int(step_rows.rows[index])], int(ends[index])
            slots = step_rows.slots[end - int(step_rows.q_len[index]) : end][: int(left[index])]
            begin = req.cache_len
            req.leading_slots[begin : begin + len(slots)] = slots
            if len(slots) == left[index] and self.shares_prefixes:
                self._prefixes.add(req, req.leading_slots)

    def _arrange(self, step_rows: StepRows) -> tuple[StepRows, list[SharedRows]]:
        """The rows of a step, with decodes that share a prefix next to each other and in front, and their groups."""
        if not self.shares_prefixes or not self._prefixes.may_have_groups or self._has_lora(step_rows.rows):
            return step_rows, []  # no captured step has both adapters and shared prefixes
        if step_rows.counts is not None:
            return step_rows, []  # few decodes of such a step have one token
        indices = np.flatnonzero(step_rows.q_len == 1)
        if len(indices) < MIN_MEMBERS:
            return step_rows, []
        order, groups = self._prefixes.arrange(self._reqs_at(step_rows.rows[indices]))
        if len(indices) < FEW_REQUESTS and sum(group.saved for group in groups) < MIN_SAVED_BY_FEW:
            return step_rows, []
        return (step_rows.arranged(indices[order]), groups) if groups else (step_rows, groups)

    def padding(self, shape: StepShape) -> np.ndarray:
        """The input of a step that computes only padding."""
        return padded_input(shape, self._padding)[0]

    @property
    def _padding(self) -> Padding:
        has_states = self.states is not None
        return Padding(self._req_manager.padding_row, self.padding_slot, self.group_padding_slots, has_states)
