"""Logits to tokens for a batch of requests, each with its own parameters."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.router.model_infer.infer_batch import InferReq
from lightserve.router.model_infer.sampling_plan import (
    Allowed,
    Drawn,
    Penalised,
    Rows,
    SamplingPlan,
    make_plan,
    to_device,
)
from lightserve.router.model_infer.seen_tokens import SeenTokens

TokenLogprobs = tuple[float | None, list[tuple[int, float]] | None]  # the chosen token's, and the likeliest tokens
NOT_ASKED: TokenLogprobs = (None, None)


class Sampler:
    """Keeps from step to step what need not be made again: the plan of a batch, and which tokens a request has seen."""

    def __init__(self) -> None:
        self._plan: SamplingPlan | None = None
        self._seen: SeenTokens | None = None  # as long as nobody is penalised, no memory is taken

    @torch.inference_mode()
    def sample(self, logits: Tensor, reqs: list[InferReq]) -> Tensor:
        """A token for each row of ``logits``, ``[batch]``. The logits stay as they are."""
        plan = self._plan_of(reqs, logits)
        changed = self._change(logits, plan)
        if plan.drawn is None:
            return ops.argmax(changed)
        tokens = _draw(changed, plan.drawn)
        if plan.drawn.rows is None:
            return tokens
        return ops.argmax(changed).index_copy(0, plan.drawn.rows, tokens)

    @torch.inference_mode()
    def logprobs(self, tokens: Tensor, logits: Tensor, reqs: list[InferReq]) -> list[TokenLogprobs]:
        """Where a request asked, log-probabilities before anything changed the logits."""
        asking = self._plan_of(reqs, logits).asking
        found = [NOT_ASKED] * len(reqs)
        if asking:
            for row, logprobs in _logprobs(tokens, logits, asking).items():
                found[row] = logprobs
        return found

    def _plan_of(self, reqs: list[InferReq], logits: Tensor) -> SamplingPlan:
        if self._plan is None or self._plan.reqs != reqs:
            self._plan = make_plan(reqs, logits.shape[1], logits.device)
        return self._plan

    def _change(self, logits: Tensor, plan: SamplingPlan) -> Tensor:
        """``logits``, or a copy in which tokens are forbidden, biased and penalised."""
        forbidden = [(row, token) for row, req in plan.placed for token in req.forbidden_next()]
        if not (forbidden or plan.allowed or plan.bias or plan.penalised):
            return logits
        logits = logits.clone()
        if plan.allowed:
            _forbid_others(logits, plan.allowed)
        if plan.bias:
            logits[plan.bias.entry_rows, plan.bias.token_ids] += plan.bias.values
        if forbidden:
            _forbid(logits, forbidden)
        if plan.penalised:
            self._penalise(logits, plan.penalised)
        return logits

    def _penalise(self, logits: Tensor, penalised: Penalised) -> None:
        if self._seen is None:
            self._seen = SeenTokens(logits.shape[1], logits.device)
        ops.apply_penalties(logits, penalised.penalties(self._seen.update(penalised.reqs)))


def _forbid(logits: Tensor, entries: list[tuple[int, int]]) -> None:
    known = [(row, token) for row, token in entries if token < logits.shape[1]]
    rows = to_device([row for row, _ in known], np.int64, logits.device)
    token_ids = to_device([token for _, token in known], np.int64, logits.device)
    logits[rows, token_ids] = float("-inf")


def _forbid_others(logits: Tensor, allowed: Allowed) -> None:
    kept = logits[allowed.entry_rows, allowed.token_ids]
    logits.index_fill_(0, allowed.rows, float("-inf"))
    logits[allowed.entry_rows, allowed.token_ids] = kept


def _draw(logits: Tensor, drawn: Drawn) -> Tensor:
    rows = logits if drawn.rows is None else logits[drawn.rows]
    scaled = rows / drawn.temperature
    if drawn.top:
        ops.cut_logits(scaled[drawn.top.rows], drawn.top.b_top_k, drawn.top.b_top_p, drawn.top.b_min_p)
    if drawn.typical:
        ops.cut_atypical(scaled[drawn.typical.rows], drawn.typical.b_typical_p)
    b_position = to_device([len(req.token_ids) for req in drawn.reqs], np.int32, logits.device)
    return ops.sample(scaled, drawn.b_seed, b_position)


def _logprobs(tokens: Tensor, logits: Tensor, asking: Rows) -> dict[int, TokenLogprobs]:
    rows = to_device([row for row, _ in asking], np.int64, logits.device)
    counts = [req.sampling.logprobs or 0 for _, req in asking]
    logprobs = logits[rows].log_softmax(-1)
    chosen = logprobs.gather(1, tokens[rows, None])[:, 0].tolist()
    top = _most_likely(logprobs, max(counts))
    return {row: (chosen[i], top[i][: counts[i]]) for i, (row, _) in enumerate(asking)}


def _most_likely(logprobs: Tensor, count: int) -> list[list[tuple[int, float]]]:
    if count == 0:
        return [[]] * len(logprobs)
    values, token_ids = logprobs.topk(min(count, logprobs.shape[1]))
    pairs = zip(token_ids.tolist(), values.tolist(), strict=True)
    return [list(zip(*pair, strict=True)) for pair in pairs]
