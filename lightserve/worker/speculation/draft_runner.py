"""Computes a step with drafts: finds its tokens, verifies the drafts, and counts what is accepted on the device."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.common.basemodel import TpPartBaseModel
from lightserve.common.device import to_device
from lightserve.config.speculation import SpeculativeConfig
from lightserve.messages.int_arrays import Int64Array
from lightserve.messages.step import Step
from lightserve.worker.batch.infer_batch import InferBatch, PackedStep
from lightserve.worker.batch.infer_req import InferReq
from lightserve.worker.batch.step_input import StepColumns, StepShape, columns_of
from lightserve.worker.collector import VerifiedCounts
from lightserve.worker.sampling.logprobs import StepPromptLogprobs
from lightserve.worker.sampling.step_masks import StepMasks
from lightserve.worker.sampling.verification import NO_DRAFT, verify
from lightserve.worker.speculation.draft_input import DraftInput, DraftTensors
from lightserve.worker.speculation.heads.head import DraftHead
from lightserve.worker.speculation.heads.proposer import HeadProposer, RowsOfStep
from lightserve.worker.speculation.ngram import NgramProposer, without_missing_drafts
from lightserve.worker.speculation.proposer import NoProposer, Proposer
from lightserve.worker.speculation.token_table import TokenTable
from lightserve.worker.step_runner import StepOut, StepRunner


class DraftOut(NamedTuple):
    """A step whose drafts are not verified yet. It has a row of logits for each token that may be sampled."""

    step: StepOut  # [rows]
    b_position: Tensor  # [rows] int32: of the tokens that are sampled
    drafts_after: Tensor  # [rows] int64: the draft after each row, or NO_DRAFT
    tensors: DraftTensors
    max_drafts: int
    known_after: Int64Array | None = None  # see HeadProposer


class DraftRunner:
    """No graph is captured of these steps: they are launched kernel by kernel."""

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
        self._table: TokenTable | None = None
        self._ngram: NgramProposer | None = None  # that says before a step which drafts it has
        self.head = None if head is None else HeadProposer(head, batch, runner, self.num_drafts)
        if self.head is not None:
            self.proposer = self.head
        elif config is not None:
            self._table = TokenTable(model.req_manager.max_reqs, model.req_manager.max_len, model.device)
            self.proposer = ngram = NgramProposer(config, self._table)
            self._ngram = ngram if may_leave_out else None

    def add(self, req: InferReq) -> None:
        """A request that enters the batch."""
        if self.head is not None:
            self.head.add(req)
        if self._table is not None:
            self._table.add(req)

    def planned(self, step: Step) -> Step:
        """The step as it is to be computed: on a CPU without the drafts that nobody proposes, which would cost time."""
        if self._ngram is None or not len(step.draft_counts):
            return step
        return without_missing_drafts(step, self._batch, self._ngram)

    @torch.inference_mode()
    def record(self, columns: StepColumns, tokens: Tensor) -> None:
        """What a step without drafts has sampled."""
        if self._table is not None:
            reqs, count = columns.reqs, len(tokens)
            self._table.record(reqs["row"][:count], reqs["seq_len"][:count], tokens)

    @torch.inference_mode()
    def draft_next(self, packed: PackedStep, out: StepOut) -> None:
        """After a step without drafts, when its tokens are sampled: draft those of the next step."""
        if self.head is not None:
            self.head.draft(out, None, self.head.known_after(packed))

    @torch.inference_mode()
    def run(
        self, packed: PackedStep, shape: StepShape, prompts: StepPromptLogprobs | None, masks: StepMasks | None
    ) -> DraftOut:
        assert packed.drafts is not None
        device = self._model.device
        tensors = packed.drafts.to(device)
        columns = self._located(columns_of(to_device(packed.inputs, device), shape), tensors)
        drafts_after = self._add_drafts(packed, packed.drafts, columns, tensors)
        rows = tensors.logit_tokens.long()
        step = replace(self._runner.model_input(columns, shape), logit_rows=rows)
        logits = self._runner.logits(step, prompts)
        b_position = columns.tokens["position"][rows] + 1
        reqs = tensors.logit_reqs.long()
        tokens = self._runner.sample(
            logits, (columns.reqs["temperature"][reqs], columns.reqs["seed"][reqs], b_position), masks
        )
        out = StepOut(logits, tokens, columns, self._runner.for_head)
        known = None if self.head is None else self.head.known_after(packed)
        return DraftOut(out, b_position, drafts_after, tensors, packed.drafts.max_drafts, known)

    @torch.inference_mode()
    def verify(self, out: DraftOut, tokens: Tensor) -> VerifiedCounts:
        """Accept drafts, and count them in the lengths of requests. ``tokens``: as they are sampled at last."""
        reqs, tensors = out.step.columns.reqs, out.tensors
        first_rows = tensors.first_rows.long()
        counts, last_ids = verify(tokens, out.drafts_after, first_rows, out.max_drafts)
        rows = reqs["row"].long()
        self._batch.last_ids.index_copy_(0, rows, last_ids)
        computed = tensors.q_len - tensors.draft_counts + counts.int() - 1
        self._batch.lengths.index_copy_(0, rows, reqs["ready_len"] + computed)
        if self._table is not None:
            self._table.record(rows[tensors.logit_reqs.long()], out.b_position, tokens)
        if self.head is not None and out.known_after is not None:
            at = RowsOfStep(tensors.logit_tokens.long(), tokens, first_rows + counts - 1, first_rows)
            self.head.draft(out.step, at, out.known_after)
        is_draft = (out.drafts_after != NO_DRAFT).long()
        proposed = torch.zeros_like(counts).index_add_(0, tensors.logit_reqs.long(), is_draft)
        return VerifiedCounts(
            *(torch.zeros_like(tokens).index_copy_(0, first_rows, values) for values in (counts, proposed))
        )

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

    def _add_drafts(
        self, packed: PackedStep, drafts: DraftInput, columns: StepColumns, tensors: DraftTensors
    ) -> Tensor:
        """Write the drafts into the input. Returns the draft after each row of logits, or NO_DRAFT."""
        token_ids = self.proposer.propose(packed.reqs, drafts.drafts, columns.reqs["ready_len"])
        draft_rows = tensors.draft_rows.long()
        columns.tokens["token_id"][tensors.logit_tokens[draft_rows].long()] = token_ids.int()
        drafts_after = token_ids.new_full(tensors.logit_tokens.shape, NO_DRAFT)
        return drafts_after.index_copy_(0, draft_rows - 1, token_ids)
