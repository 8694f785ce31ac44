"""Logits to tokens for a batch of requests, each with its own parameters."""

from __future__ import annotations

import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.common.device import copy_to_host
from lightserve.worker.infer_batch import InferReq
from lightserve.worker.sampling.logit_rules import decay_length, forbid, forbid_others, force, limit_first
from lightserve.worker.sampling.plan import (
    Drawn,
    Rows,
    SamplingPlan,
    int32s,
    int64s,
    make_plan,
)
from lightserve.worker.sampling.seen_tokens import SeenTokens
from lightserve.worker.sampling.step_masks import StepMasks

TokenLogprobs = tuple[float | None, list[tuple[int, float]] | None]  # the chosen token's, and the likeliest tokens
NOT_ASKED: TokenLogprobs = (None, None)


class Sampler:
    """What is beyond choosing by temperature and grammar.

    Keeps from step to step what need not be made again: the plan of a batch, and which tokens a request has seen.
    """

    def __init__(self, vocab: int, device: torch.device, last_ids: Tensor) -> None:
        self._vocab = vocab
        self._device = device
        self._last_ids = last_ids
        self._plan: SamplingPlan | None = None
        self._before: Tensor | None = None  # the last tokens of those that are watermarked
        self._seen: SeenTokens | None = None  # as long as nobody is penalised, no memory is taken

    def plan_of(self, reqs: list[InferReq]) -> SamplingPlan:
        if self._plan is None or self._plan.reqs != reqs:
            self._plan = make_plan(reqs, self._vocab, self._device)
        return self._plan

    @torch.inference_mode()
    def look_back(self, reqs: list[InferReq]) -> None:
        """Note the tokens that requests have got, where they count. Before a step is launched: it overwrites them."""
        plan = self.plan_of(reqs)
        if plan.watermarked is not None:
            self._before = self._last_tokens(plan.watermarked.reqs)
        if plan.penalised is None:
            return
        if self._seen is None:
            self._seen = SeenTokens(self._vocab, self._last_ids)
        self._seen.update(plan.penalised.reqs)

    def _last_tokens(self, reqs: list[InferReq]) -> Tensor:
        """``[reqs]`` int64; the host may not know them yet."""
        known = [req.token_ids[-1] if req.is_known else -1 for req in reqs]
        host, rows = int64s(known, self._device), int64s([req.row for req in reqs], self._device)
        return torch.where(host < 0, self._last_ids[rows], host)

    @torch.inference_mode()
    def sample(self, logits: Tensor, reqs: list[InferReq], tokens: Tensor, masks: StepMasks | None = None) -> Tensor:
        """``tokens``, ``[batch]``, that the step chose, with others for the requests with special wishes.

        What these have seen is counted, and what they have said known. The logits stay. A row for which the step found
        no token gets none here either: what is forbidden may hide that its logits are no numbers.
        """
        plan = self.plan_of(reqs)
        if not plan.special:
            return tokens
        if masks is not None and not masks.has_special:
            masks = None
        if plan.special_rows is None:
            return _where_numbers(tokens, self._sample(logits, plan, masks))
        chosen = self._sample(logits[plan.special_rows], plan, masks)
        return tokens.index_copy(0, plan.special_rows, _where_numbers(tokens[plan.special_rows], chosen))

    def _sample(self, logits: Tensor, plan: SamplingPlan, masks: StepMasks | None) -> Tensor:
        changed = self._change(logits, plan, masks)
        if plan.drawn is None:
            return _most_likely(changed)
        tokens = _draw(changed, plan.drawn)
        if plan.drawn.rows is None:
            return tokens
        return _most_likely(changed).index_copy(0, plan.drawn.rows, tokens)

    @torch.inference_mode()
    def logprobs(self, tokens: Tensor, logits: Tensor, reqs: list[InferReq]) -> StepLogprobs | None:
        """Where a request asked, log-probabilities before anything changed the logits."""
        asking = self.plan_of(reqs).asking
        return StepLogprobs(tokens, logits, asking) if asking else None

    def _change(self, logits: Tensor, plan: SamplingPlan, masks: StepMasks | None) -> Tensor:
        """``logits``, or a copy in which tokens are forbidden, biased and penalised."""
        forbidden = [(row, token) for row, req in plan.placed for token in req.forbidden_next()]
        forced = [(row, token) for row, req in plan.thinking if (token := req.forced_next()) is not None]
        if not (forbidden or forced or masks or plan.changes_logits):
            return logits
        logits = logits.to(torch.float32, copy=plan.special_rows is None)
        if masks:
            masks.apply(logits)
        if plan.allowed:
            forbid_others(logits, plan.allowed)
        limit_first(logits, plan.beginning)
        if plan.bias:
            logits[plan.bias.entry_rows, plan.bias.token_ids] += plan.bias.values
        if plan.watermarked and self._before is not None:
            ops.add_watermark(logits, plan.watermarked.rows, self._before)
        if forbidden:
            forbid(logits, forbidden)
        if plan.penalised and self._seen is not None:
            ops.apply_penalties(logits, plan.penalised.penalties(self._seen.table))
        if plan.decayed:
            decay_length(logits, plan.decayed)
        if forced:
            force(logits, forced)
        return logits


class StepLogprobs:
    """Log-probabilities on their way to the host, of the rows that asked for them."""

    def __init__(self, tokens: Tensor, logits: Tensor, asking: Rows) -> None:
        rows = int64s([row for row, _ in asking], logits.device)
        self._rows = [row for row, _ in asking]
        self._counts = [req.sampling.logprobs or 0 for _, req in asking]
        logprobs = logits[rows].float().log_softmax(-1)
        chosen = logprobs.gather(1, tokens[rows, None].clamp(min=0))[:, 0]
        values, token_ids = logprobs.topk(min(max(self._counts), logprobs.shape[1]))
        self._to_host = copy_to_host(chosen, values, token_ids)

    def by_row(self) -> dict[int, TokenLogprobs]:
        chosen, values, token_ids = (tensor.tolist() for tensor in self._to_host.tensors())
        tops = [
            list(zip(ids[:count], row[:count], strict=True))
            for ids, row, count in zip(token_ids, values, self._counts, strict=True)
        ]
        return dict(zip(self._rows, zip(chosen, tops, strict=True), strict=True))


def _draw(logits: Tensor, drawn: Drawn) -> Tensor:
    rows = logits if drawn.rows is None else logits[drawn.rows]
    b_position = int32s([req.total_len for req in drawn.reqs], logits.device)
    if not (drawn.top or drawn.typical):
        return ops.sample(rows, drawn.temperature[:, 0], drawn.b_seed, b_position)
    scaled = rows.float() / drawn.temperature
    if drawn.top:
        ops.top_k_top_p_min_p(scaled[drawn.top.rows], drawn.top.b_top_k, drawn.top.b_top_p, drawn.top.b_min_p)
    if drawn.typical:
        ops.typical_p(scaled[drawn.typical.rows], drawn.typical.b_typical_p)
    return ops.sample(scaled, torch.ones_like(drawn.temperature[:, 0]), drawn.b_seed, b_position)


def _where_numbers(tokens: Tensor, chosen: Tensor) -> Tensor:
    """``chosen`` where the step found a token. A row of which the rules left nothing gets token 0."""
    return chosen.clamp(min=0).where(tokens != ops.NO_TOKEN, ops.NO_TOKEN)


def _most_likely(logits: Tensor) -> Tensor:
    zeros = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    return ops.sample(logits, zeros.float(), zeros, zeros.int())
