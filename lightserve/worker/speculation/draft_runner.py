"""Computes a step with drafts: finds its tokens, verifies the drafts, and counts what is accepted on the device.

Steps with drafts are captured as graphs, with verification and what a head drafts next. If a request needs more than
temperature to be sampled, its drafts are verified again after that, and the head drafts again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.common.basemodel import KvGroupInput, ModelInput, TpPartBaseModel
from lightserve.common.device import to_device
from lightserve.common.ops.step import COUNTED
from lightserve.config.speculation import SpeculativeConfig
from lightserve.messages.int_arrays import NO_INT32, NO_INT64, Int32Array, Int64Array, int32s, int64s
from lightserve.messages.step import Step
from lightserve.worker.batch.drafted_req import DraftedReq
from lightserve.worker.batch.images import PackedImages
from lightserve.worker.batch.infer_batch import InferBatch, PackedStep
from lightserve.worker.batch.infer_req import InferReq
from lightserve.worker.batch.sampled import Sampled
from lightserve.worker.batch.step_input import StepColumns, StepShape, columns_of
from lightserve.worker.sampling.logprobs import StepPromptLogprobs
from lightserve.worker.sampling.step_masks import StepMasks
from lightserve.worker.sampling.verification import NO_DRAFT, SyntheticAcceptance, accept, verify
from lightserve.worker.speculation.draft_input import (
    UNKNOWN,
    DraftRows,
    DraftTensors,
    VerifiedCounts,
    captured_rows,
    packed_size,
    ready_len,
)
from lightserve.worker.speculation.grammar_drafts import GrammarDrafts
from lightserve.worker.speculation.heads.head import DraftHead
from lightserve.worker.speculation.heads.proposer import RowsOfStep, head_proposer
from lightserve.worker.speculation.ngram import NgramProposer
from lightserve.worker.speculation.predictions_first import PredictionsFirst
from lightserve.worker.speculation.proposals import Proposals, drafts_of
from lightserve.worker.speculation.proposer import NoProposer, Proposer
from lightserve.worker.speculation.stage_states import DraftedStep, StageStates
from lightserve.worker.speculation.state_replay import StateReplay
from lightserve.worker.speculation.token_table import TokenTable
from lightserve.worker.step_runner import HeadInput, StepOut, StepRunner

# Of steps that attend as decodes do: the KV of a request is then split among many multiprocessors. Otherwise few
# requests occupy few of them. But each draft reads the KV again.
MAX_SPLIT_TOKENS = 64


class StepDrafts(NamedTuple):
    """The drafts of a step, on the device."""

    tensors: DraftTensors
    draft_ids: Tensor  # [tokens] int64; NO_DRAFT at other tokens
    max_drafts: int  # of a request
    num_drafting: int  # the first requests, among which are all that have drafts


class DraftRunner:
    def __init__(
        self,
        model: TpPartBaseModel,
        batch: InferBatch,
        runner: StepRunner,
        config: SpeculativeConfig | None = None,
        may_leave_out: bool = False,
        head: DraftHead | None = None,
    ) -> None:
        """``config`` None: there are no drafts. ``head``: that computes them, if its method has one.

        ``may_leave_out``: a step need not compute drafts without a proposal, because kernels end before Python goes on.
        """
        self.proposer: Proposer = NoProposer()
        self._model = model
        self._batch = batch
        self._runner = runner
        self.num_drafts = 0 if config is None else config.num_speculative_tokens  # of a request in a step, at most
        self._synthetic: SyntheticAcceptance | None = None
        self._table: TokenTable | None = None
        self.leaves_out = False  # drafts without a proposal are left out of a step, as the proposer may have none
        self._found: Tensor | None = None  # the drafts of the next step, if they are known before it is packed
        self._grammars = GrammarDrafts()  # of the step that is launched now
        self._captured_drafts: Tensor | None = None  # [tokens] int64, that captured steps read; None: none is captured
        self._head = None if head is None else head_proposer(head, batch, runner, self.num_drafts)
        self._stage_states: StageStates | None = None
        if config is not None and batch.states is not None and not model.pp.is_last:
            self._stage_states = StageStates(batch.columns, model)
        if config is not None and model.pp.is_last:
            reqs = model.req_manager
            self._table = TokenTable(reqs.max_reqs, reqs.max_len, model.device, only_predictions=head is not None)
            self.proposer = NgramProposer(config, self._table)
            if self._head is not None:
                self.proposer = PredictionsFirst(self.proposer, self._head, self._table.holds)
            self.leaves_out = may_leave_out and not config.is_synthetic and not config.has_head
            if config.synthetic_acceptance_length is not None:
                self._synthetic = SyntheticAcceptance.of_length(config.synthetic_acceptance_length)
            most = runner.capture_drafts(self.num_drafts, self._compute_captured)
            self._captured_drafts = self._no_drafts(most) if most else None

    def add(self, req: InferReq) -> None:
        """A request that enters the batch."""
        if self._head is not None:
            self._head.add(req)
        if self._table is not None:
            self._table.add(req)

    def needs_tokens(self, step: Step) -> bool:
        """Whether the step cannot be packed before the tokens of all steps in flight are known."""
        return len(step.draft_counts) > 0 and self._batch.reads_tokens_of(step)

    @torch.inference_mode()
    def planned(self, step: Step) -> Step:
        """The step as it is to be computed: on a CPU without the drafts that nobody proposes, which would cost time.

        A request has a token for each of its new slots at least.
        """
        self._found = None
        counts = int32s(step.draft_counts).astype(np.int64)
        if len(step.token_ids) and counts.any():
            self._found = to_device(drafts_of(step), self._model.device)
        if not self.leaves_out or not counts.any():
            return step
        reqs = self._batch.reqs_of(int64s(step.decode_ids))
        rows = np.array([req.row for req in reqs], dtype=np.int64)
        drafts = self._propose(reqs, counts, rows, ready_len(rows, self._batch.columns))
        is_proposed = (drafts != NO_DRAFT).cpu().numpy()
        ends = np.cumsum(counts)
        total = np.concatenate(([0], np.cumsum(is_proposed)))
        fewer = np.maximum(total[ends] - total[ends - counts], int32s(step.slot_counts) - 1)
        fewer = np.minimum(fewer, counts)
        number = np.arange(counts.sum()) - np.repeat(ends - counts, counts)
        self._found = drafts[torch.from_numpy(number < np.repeat(fewer, counts))]
        return msgspec.structs.replace(step, draft_counts=fewer.astype(np.int32))

    @torch.inference_mode()
    def record(self, columns: StepColumns, tokens: Tensor) -> None:
        """What a step without drafts has sampled."""
        if self._table is not None:
            reqs, count = columns.reqs, len(tokens)
            self._table.record(reqs["row"][:count], reqs["seq_len"][:count], tokens)

    @torch.inference_mode()
    def draft_next(self, packed: PackedStep, out: StepOut, num_drafts: int) -> None:
        """Let a head draft the tokens of the next step. This one has no drafts, and its tokens are sampled.

        ``num_drafts``: of a request in the next step, at most. If that is 0, the head only updates its KV.
        """
        if self._head is None:
            return
        known_after, on_device = self._head.known_after(packed), None
        if known_after is not None:
            padding = len(out.columns.reqs["row"]) - len(known_after)
            on_device = to_device(np.pad(known_after, (0, padding), constant_values=UNKNOWN), self._model.device)
            if not (known_after == UNKNOWN).any():  # no request samples a token
                num_drafts = 0
        self._head.draft(out, None, on_device, num_drafts)

    @torch.inference_mode()
    def draft_after(self, out: StepOut, tokens: Tensor, counts: VerifiedCounts, num_drafts: int) -> None:
        """``draft_next`` of a step with drafts. ``tokens``: those that ``verify`` got. A captured step has done it."""
        assert out.drafts is not None
        if self._head is not None and counts is not out.drafts.verified:
            rows = RowsOfStep.of(out, tokens, counts)
            self._head.draft(out, rows, out.drafts.tensors.known_after, num_drafts)

    @torch.inference_mode()
    def propose(self, packed: PackedStep) -> Tensor:
        """The drafts of a step, at the places of their tokens ``[tokens]`` int64; NO_DRAFT at others."""
        assert packed.drafts is not None
        drafts, shape = packed.drafts, packed.shape
        if shape.num_drafts and self._captured_drafts is not None:
            draft_ids = self._captured_drafts[: shape.tokens].fill_(NO_DRAFT)
        else:
            draft_ids = self._no_drafts(shape.tokens)
        token_ids, self._found = self._found, None
        if len(places := drafts.draft_tokens):
            if token_ids is None:
                token_ids = self._propose(packed.reqs, drafts.drafts, packed.rows, drafts.ready_len)
            draft_ids.index_copy_(0, to_device(places, draft_ids.device), token_ids)
        return draft_ids

    def _propose(self, reqs: Sequence[InferReq], counts: Int64Array, rows: Int64Array, known: Int64Array) -> Tensor:
        """Drafts that grammars allow. ``known``: computed tokens of each request as far as the host knows, or COUNTED.

        All tokens of a request with a grammar are known.
        """
        with_counts = zip(reqs, counts.tolist(), known.tolist(), strict=True)
        constrained = [(req, computed) for req, count, computed in with_counts if count and req.grammar]
        if self._table is not None:
            for req, computed in constrained:
                self._table.catch_up(req, computed)
        drafts = self.proposer.propose(reqs, counts, self._ready_len(rows, known))
        self._grammars = GrammarDrafts()
        if not constrained:
            return drafts
        return to_device(self._grammars.allowed(reqs, counts, known, drafts.cpu().numpy()), drafts.device)

    def logit_reqs(self, packed: PackedStep, draft_ids: Tensor) -> list[InferReq]:
        """The request of each row of logits, as its rules see it: with the drafts before the row."""
        drafts = packed.drafts
        assert drafts is not None
        if not any(count and req.reads_tokens for req, count in zip(packed.reqs, drafts.drafts.tolist(), strict=True)):
            return packed.logit_reqs
        reqs: list[InferReq] = []
        on_host = np.maximum(draft_ids.cpu().numpy(), 0).astype(np.int32)  # nothing is sampled after a missing draft
        for req, count, end in zip(packed.reqs, drafts.drafts.tolist(), np.cumsum(drafts.q_len).tolist(), strict=True):
            before = on_host[end - count : end]
            reqs.append(req)
            reqs += self._after_drafts(req, before) if req.reads_tokens else [req] * count
        return reqs

    def _after_drafts(self, req: InferReq, draft_ids: Int32Array) -> list[DraftedReq]:
        ends = range(1, len(draft_ids) + 1)
        return [DraftedReq(req, draft_ids[:end], self._grammars.after(req, end)) for end in ends]

    @torch.inference_mode()
    def run(
        self,
        packed: PackedStep,
        shape: StepShape,
        prompts: StepPromptLogprobs | None,
        draft_ids: Tensor,
        is_verified_later: bool = False,
    ) -> StepOut:
        """``draft_ids``: those of ``propose``.

        ``is_verified_later``: tokens will be sampled in another way than by temperature alone. A captured step would
        have changed the states of recurrent layers by then.
        """
        assert packed.drafts is not None
        drafts = packed.drafts
        known_after = None if self._head is None else self._head.known_after(packed)
        inputs = np.concatenate((packed.inputs, drafts.packed(shape, known_after)))
        if shape.num_drafts and not (is_verified_later and self._batch.states is not None):
            return self._runner.replay(inputs, shape)
        on_device = to_device(inputs, self._model.device)
        if shape.num_drafts:
            return self._compute_padded(on_device, shape)
        columns, tensors = self._split(on_device, packed, shape)
        step_drafts = StepDrafts(tensors, draft_ids, drafts.max_drafts, drafts.num_drafting)
        return self._compute(columns, shape, step_drafts, prompts, packed.images)

    @torch.inference_mode()
    def run_stage(self, packed: PackedStep, shape: StepShape) -> None:
        """A step in a stage of a pipeline that is not the last one. The router has sent its drafts, if it has any."""
        if packed.drafts is None:
            self._runner.run_stage(packed.inputs, shape, packed.images)
            return
        inputs = np.concatenate((packed.inputs, packed.drafts.packed(shape)))
        columns, tensors = self._split(to_device(inputs, self._model.device), packed, shape)
        step = self._runner.model_input(self._located(columns, tensors), shape, packed.images)
        if step.states is not None and packed.drafts.num_drafting:
            assert self._stage_states is not None
            on_host = columns_of(packed.inputs, shape, has_states=True).states
            assert on_host is not None
            drafted = DraftedStep(packed.rows, packed.drafts, tensors)
            step = replace(step, states=self._stage_states.record(step.states, on_host, drafted))
        self._model.send_to_next_stage(self._model.hidden_states(step))

    @torch.inference_mode()
    def take_lengths(self, step: Step) -> None:
        """In a stage that is not the last one, before the step is packed: of requests whose drafts are verified."""
        rows, accepted, columns = NO_INT64, NO_INT32, self._batch.columns
        if len(step.ready_lens):
            rows = np.array([req.row for req in self._batch.reqs_of(int64s(step.decode_ids))], dtype=np.int64)
            accepted = (int32s(step.ready_lens) - columns.cache_len[rows]).astype(np.int32)
            columns.accept(rows, accepted, columns.drafts_in_flight[rows])
        if self._stage_states is not None:
            self._stage_states.advance(rows, accepted)

    def reset(self) -> None:
        """The batch has lost all requests."""
        if self._stage_states is not None:
            self._stage_states.clear()

    def _split(self, inputs: Tensor, packed: PackedStep, shape: StepShape) -> tuple[StepColumns, DraftTensors]:
        """The input of a step that is not captured."""
        assert packed.drafts is not None
        columns = columns_of(inputs[: len(packed.inputs)], shape, self._batch.states is not None)
        return columns, DraftTensors.of(inputs[len(packed.inputs) :], shape, packed.drafts.num_rows)

    @torch.inference_mode()
    def propose_next(self, sampled: Sampled, num_drafts: int) -> Proposals | None:
        """Drafts for the next steps of these requests. None: the model is no pipeline, and finds them then."""
        if self._model.pp.size == 1 or not num_drafts or not len(sampled.req_ids):
            return None
        reqs = self._batch.reqs_of(sampled.req_ids)
        rows = np.array([req.row for req in reqs], dtype=np.int64)
        counts = np.full(len(rows), num_drafts, dtype=np.int64)
        draft_ids = self.proposer.propose(reqs, counts, self._ready_len(rows, ready_len(rows, self._batch.columns)))
        if self._synthetic is not None:
            draft_ids = draft_ids.clamp(min=0)
        return Proposals(sampled.req_ids, draft_ids.view(len(rows), num_drafts))

    @torch.inference_mode()
    def masked(self, out: StepOut, masks: StepMasks) -> StepOut:
        """The step with tokens that the masks allow."""
        assert out.drafts is not None
        tokens = self._runner.sample(out.logits, out.drafts.sampled_at, masks)
        return out._replace(tokens=tokens, drafts=out.drafts._replace(verified=None))

    @torch.inference_mode()
    def verify(self, out: StepOut, tokens: Tensor) -> VerifiedCounts:
        """Accept drafts, and count them in the lengths of requests. ``tokens``: as they are sampled at last.

        It may be called again with other tokens of the same step.
        """
        drafts, reqs, count = out.drafts, out.columns.reqs, len(tokens)
        assert drafts is not None
        tokens = torch.cat((tokens, out.tokens[len(tokens) :]))  # of padding
        tensors = drafts.tensors
        logit_reqs = tensors.logit_reqs.long()
        first_rows = tensors.first_rows.long()
        number = torch.arange(len(tokens), device=tokens.device) - first_rows[logit_reqs]
        is_draft = number < tensors.draft_counts[logit_reqs]
        if self._synthetic is None:
            drafts_after = torch.where(is_draft, drafts.drafts_after, NO_DRAFT)
            is_draft = drafts_after != NO_DRAFT
            counts, last_ids = verify(tokens, drafts_after, first_rows, drafts.max_drafts)
        else:
            is_accepted = is_draft & self._synthetic.accepts(number, *drafts.sampled_at[1:])
            counts, last_ids = accept(is_accepted, tokens, first_rows, drafts.max_drafts)
        rows = reqs["row"].long()
        self._batch.last_ids.index_copy_(0, rows, last_ids)
        computed = tensors.q_len - tensors.draft_counts + counts.int() - 1
        self._batch.lengths.index_copy_(0, rows, reqs["ready_len"] + computed)
        if self._table is not None:
            rows = out.columns.tokens["row"][tensors.logit_tokens.long()[:count]]
            self._table.record(rows, drafts.b_position[:count], tokens[:count])
        proposed = torch.zeros_like(counts).index_add_(0, logit_reqs, is_draft.long())
        return VerifiedCounts(counts[logit_reqs], proposed[logit_reqs])

    def _no_drafts(self, count: int) -> Tensor:
        return torch.full((count,), NO_DRAFT, dtype=torch.int64, device=self._model.device)

    def _ready_len(self, rows: Int64Array, known: Int64Array) -> Tensor:
        """Tokens of each request that are computed, int32 on the device. ``known``: as far as the host knows."""
        b_row, b_known = to_device(np.stack((rows, known)), self._model.device)
        return torch.where(b_known != COUNTED, b_known, self._batch.lengths[b_row]).int()

    @torch.inference_mode()
    def advance_states(self, out: StepOut, counts: VerifiedCounts) -> None:
        """Let the states of recurrent layers see the accepted tokens. Called once, with the last counts."""
        if out.replay is not None:
            out.replay.advance(counts)

    def _compute_captured(self, inputs: Tensor, shape: StepShape) -> StepOut:
        """The function that is captured."""
        out = self._compute_padded(inputs, shape)
        assert out.drafts is not None
        verified = self.verify(out, out.tokens)
        self.advance_states(out, verified)
        if self._head is not None:
            rows = RowsOfStep.of(out, out.tokens, verified)
            self._head.draft(out, rows, out.drafts.tensors.known_after, shape.next_drafts)
        return out._replace(drafts=out.drafts._replace(verified=verified), replay=None)

    def _compute_padded(self, inputs: Tensor, shape: StepShape) -> StepOut:
        """A step of a captured shape. It reads the drafts that ``propose`` has written."""
        assert self._captured_drafts is not None
        end = len(inputs) - packed_size(shape)
        tensors = DraftTensors.of(inputs[end:], shape, captured_rows(shape))
        drafts = StepDrafts(tensors, self._captured_drafts[: shape.tokens], shape.num_drafts, shape.requests)
        return self._compute(self._runner.columns(inputs[:end], shape), shape, drafts)

    def _compute(
        self,
        columns: StepColumns,
        shape: StepShape,
        step_drafts: StepDrafts,
        prompts: StepPromptLogprobs | None = None,
        images: PackedImages | None = None,
    ) -> StepOut:
        tensors, draft_ids, max_drafts, num_drafting = step_drafts
        columns = self._located(columns, tensors)
        token_ids = columns.tokens["token_id"]
        token_ids.copy_(torch.where(draft_ids != NO_DRAFT, draft_ids.int(), token_ids))
        rows, reqs = tensors.logit_tokens.long(), tensors.logit_reqs.long()
        step = replace(self._runner.model_input(columns, shape, images), logit_rows=rows)
        replay = None
        if step.states is not None and num_drafting:
            replay = StateReplay(step.states, tensors, num_drafting, max_drafts)
            step = replace(step, states=replay.recording)
        is_split = shape.num_drafts > 0 and not shape.has_decodes and shape.tokens <= MAX_SPLIT_TOKENS
        logits = self._runner.logits(_as_decodes(step, columns) if is_split else step, prompts)
        b_position = columns.tokens["position"][rows] + 1
        sampled_at = columns.reqs["temperature"][reqs], columns.reqs["seed"][reqs], b_position
        tokens = self._runner.sample(logits, sampled_at, None)
        drafts_after = torch.cat((draft_ids[1:], draft_ids.new_full((1,), NO_DRAFT)))[rows]
        drafts = DraftRows(sampled_at, step.input_ids[rows], drafts_after, tensors, max_drafts)
        for_head = self._runner.for_head
        for_head = None if for_head is None else HeadInput.of(step, for_head.states)
        return StepOut(logits, tokens, columns, drafts, for_head, replay)

    def _located(self, columns: StepColumns, tensors: DraftTensors) -> StepColumns:
        """The input as the host would have made it, had it known the lengths."""
        batch, tokens, reqs = self._batch, columns.tokens, columns.reqs
        step_reqs = ops.StepReqs(reqs["row"], reqs["start"], reqs["ready_len"], tensors.slot_len)
        located = ops.locate_tokens(tokens["slot"], tensors.token_reqs, step_reqs, batch.lengths, batch.req_to_token)
        group_slots = tuple(
            ops.locate_tokens(slots, tensors.token_reqs, step_reqs, batch.lengths, table).slots
            for slots, table in zip(columns.group_slots, batch.group_req_to_token, strict=True)
        )
        seq_len = located.b_ready_len + tensors.q_len
        return columns._replace(
            tokens=tokens | {"position": located.positions, "slot": located.slots},
            reqs=reqs | {"ready_len": located.b_ready_len, "seq_len": seq_len},
            group_slots=group_slots,
        )


def _as_decodes(step: ModelInput, columns: StepColumns) -> ModelInput:
    """The step with each token as a request of its own: the KV of those before it is written when it attends."""
    positions = step.position_ids
    places = torch.arange(len(positions), dtype=torch.int32, device=positions.device)

    def attn(group: ops.AttnBatch) -> ops.AttnBatch:
        rows = columns.tokens["row"]
        return ops.AttnBatch(group.req_to_token, rows, places, positions + 1, positions, has_decodes=True)

    groups = tuple(KvGroupInput(group.mem_index, attn(group.attn)) for group in step.kv_groups)
    return replace(step, attn=attn(step.attn), kv_groups=groups, is_prefill=False)
