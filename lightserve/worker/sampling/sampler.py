"""Samples the tokens of requests whose rules go beyond temperature and grammar; the step itself samples the others."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, chain

import torch
from torch import Tensor

from lightserve.common import ops
from lightserve.messages.params import INT32_MAX
from lightserve.worker.batch.infer_req import InferReq
from lightserve.worker.sampling.logits import LogitRules, floats, int32s, int64s
from lightserve.worker.sampling.logprobs import GatherLogits, SampledLogprobs
from lightserve.worker.sampling.req_rules import Filters
from lightserve.worker.sampling.step_masks import ConstrainedBatch, StepMasks
from lightserve.worker.sampling.token_history import TokenHistory

NONE_ALLOWED = -2  # in place of a token: the logits are numbers, but the rules of the request forbid every token


@dataclass(frozen=True, slots=True)
class TypicalFilter:
    rows: slice  # of the random rows
    b_typical_p: Tensor


@dataclass(frozen=True, slots=True)
class TopFilter:
    """Top-k, top-p and min-p."""

    rows: slice  # of the random rows
    b_top_k: Tensor
    b_top_p: Tensor
    b_min_p: Tensor


@dataclass(frozen=True, slots=True)
class RandomRows:
    """The rows that are sampled at random, in the order of Filters."""

    reqs: list[InferReq]
    rows: Tensor | None  # [random] int64, of the logits; None: all rows, in their order
    temperature: Tensor  # [random, 1] float32
    b_seed: Tensor
    top: TopFilter | None
    typical: TypicalFilter | None


@dataclass(frozen=True, slots=True)
class WantedLogprobs:
    """The rows of the batch that want logprobs: of the model's logits, or of those that were sampled from."""

    raw: dict[int, int]  # row: how many of the most likely tokens
    processed: dict[int, int]  # the same; the step itself does not sample these rows
    raw_rows: Tensor  # [raw] int64
    of_sampler: Tensor  # [processed] int64, among the rows that Sampler samples
    random: RandomRows | None  # of the processed rows

    @classmethod
    def of(cls, reqs: list[InferReq], device: torch.device) -> WantedLogprobs | None:
        counts = {row: req.sampling.logprobs for row, req in enumerate(reqs) if req.sampling.logprobs is not None}
        if not counts:
            return None
        processed = {row: k for row, k in counts.items() if reqs[row].sampling.processed_logprobs}
        raw = {row: k for row, k in counts.items() if row not in processed}
        sampler_rows = [row for row, req in enumerate(reqs) if req.rules.needs_sampler]
        of_sampler = [index for index, row in enumerate(sampler_rows) if row in processed]
        random = _random_rows([reqs[row] for row in processed], device)
        return cls(raw, processed, int64s(list(raw), device), int64s(of_sampler, device), random)

    @property
    def counts(self) -> dict[int, int]:
        return self.raw | self.processed

    def processed_logits(self, changed: Tensor) -> Tensor:
        """After temperature and filters. ``changed``: those after all rules, of the rows that Sampler samples."""
        logits = changed[self.of_sampler].float()
        random = self.random
        if random is None:
            return logits
        scaled = _scaled_and_filtered(logits if random.rows is None else logits[random.rows], random)
        return scaled if random.rows is None else logits.index_copy(0, random.rows, scaled)


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """The parameters of a batch's requests as tensors. It is made again only when the requests change.

    Rows of ``rules`` and ``random`` count the requests that Sampler samples, not all requests.
    """

    reqs: list[InferReq]
    sampler_reqs: list[InferReq]  # the step itself does not sample their tokens
    sampler_rows: Tensor | None  # [sampler_reqs] int64, their rows in the batch; None: all rows
    constrained: ConstrainedBatch | None
    rules: LogitRules
    random: RandomRows | None  # the other rows are greedy
    logprobs: WantedLogprobs | None  # None: no request wants any

    @property
    def needs_tokens_in_flight(self) -> bool:
        return self.rules.need_tokens_in_flight


def make_plan(reqs: list[InferReq], vocab: int, device: torch.device) -> SamplingPlan:
    sampler_reqs = [(row, req) for row, req in enumerate(reqs) if req.rules.needs_sampler]
    rows = [(i, req) for i, (_, req) in enumerate(sampler_reqs)]
    return SamplingPlan(
        reqs=list(reqs),
        sampler_reqs=[req for _, req in sampler_reqs],
        sampler_rows=None if len(sampler_reqs) == len(reqs) else int64s([row for row, _ in sampler_reqs], device),
        constrained=ConstrainedBatch.of(reqs, device),
        rules=LogitRules.of(rows, vocab, device),
        random=_random_rows([req for _, req in rows], device),
        logprobs=WantedLogprobs.of(reqs, device),
    )


def _random_rows(sampler_reqs: list[InferReq], device: torch.device) -> RandomRows | None:
    by_filters: list[list[int]] = [[] for _ in Filters]
    for row, req in enumerate(sampler_reqs):
        if req.rules.filters is not None:
            by_filters[req.rules.filters].append(row)
    rows = list(chain.from_iterable(by_filters))
    if not rows:
        return None
    reqs = [sampler_reqs[row] for row in rows]
    typical_end, both_end, top_end, _ = accumulate(map(len, by_filters))
    return RandomRows(
        reqs=reqs,
        rows=None if rows == list(range(len(sampler_reqs))) else int64s(rows, device),
        temperature=floats([req.sampling.temperature for req in reqs], device)[:, None],
        b_seed=int64s([req.seed for req in reqs], device),
        top=_top_filter(reqs, slice(typical_end, top_end), device),
        typical=_typical_filter(reqs, slice(both_end), device),
    )


def _top_filter(reqs: list[InferReq], rows: slice, device: torch.device) -> TopFilter | None:
    filtered = [req.sampling for req in reqs[rows]]
    if not filtered:
        return None
    return TopFilter(
        rows=rows,
        b_top_k=int32s([sampling.top_k if sampling.top_k > 0 else INT32_MAX for sampling in filtered], device),
        b_top_p=floats([sampling.top_p for sampling in filtered], device),
        b_min_p=floats([sampling.min_p for sampling in filtered], device),
    )


def _typical_filter(reqs: list[InferReq], rows: slice, device: torch.device) -> TypicalFilter | None:
    masses = [req.sampling.typical_p for req in reqs[rows]]
    return TypicalFilter(rows, floats(masses, device)) if masses else None


class Sampler:
    """Samples the requests of ``SamplingPlan.sampler_reqs``.

    It keeps the plan of the last batch, and the tokens that penalties and watermarks depend on.
    """

    def __init__(self, vocab: int, device: torch.device, last_ids: Tensor, gather: GatherLogits) -> None:
        """``gather`` gives the logits of the whole vocabulary, from those of this rank's tokens."""
        self._gather = gather
        self._vocab = vocab
        self._device = device
        self._plan: SamplingPlan | None = None
        self._history = TokenHistory(vocab, last_ids)
        self._processed: Tensor | None = None  # logits of the step that is sampled, for logprobs

    @torch.inference_mode()
    def prepare(self, reqs: list[InferReq]) -> SamplingPlan:
        """The plan of a step. Called before the step is launched, which overwrites the last tokens."""
        if self._plan is None or self._plan.reqs != reqs:
            self._plan = make_plan(reqs, self._vocab, self._device)
        self._plan.rules.record(self._history)
        return self._plan

    @torch.inference_mode()
    def sample(
        self,
        plan: SamplingPlan,
        logits: Tensor,
        tokens: Tensor,
        masks: StepMasks | None = None,
        b_position: Tensor | None = None,
    ) -> Tensor:
        """Replace the tokens of the requests in ``plan.sampler_reqs``. ``tokens``: ``[batch]``, sampled by the step.

        ``b_position``: of these tokens, ``[batch]`` int32; None: the end of each request, as far as the host knows.
        ``logits``, of this rank's tokens, do not change. If the step found no token for a row, the row gets none here
        either: its logits are not finite, which masks may hide.
        """
        if not plan.sampler_reqs:
            return tokens
        if masks is not None and not masks.has_sampler_rows:
            masks = None
        if plan.sampler_rows is None:
            return _merge(tokens, self._sample(self._gather(logits), plan, masks, b_position))
        b_position = None if b_position is None else b_position[plan.sampler_rows]
        sampled = self._sample(self._gather(logits[plan.sampler_rows]), plan, masks, b_position)
        return tokens.index_copy(0, plan.sampler_rows, _merge(tokens[plan.sampler_rows], sampled))

    @torch.inference_mode()
    def logprobs(self, plan: SamplingPlan, tokens: Tensor, logits: Tensor) -> SampledLogprobs | None:
        """``logits``: of this rank's tokens, as the model computed them. Called after ``sample``."""
        wanted, processed = plan.logprobs, self._processed
        self._processed = None
        if wanted is None:
            return None
        parts = [self._gather(logits[wanted.raw_rows]).float()] if wanted.raw else []
        parts += [] if processed is None else [processed]
        return SampledLogprobs(tokens, torch.cat(parts), wanted.counts)

    def _sample(self, logits: Tensor, plan: SamplingPlan, masks: StepMasks | None, b_position: Tensor | None) -> Tensor:
        """``logits`` and ``b_position``: rows of the requests that Sampler samples."""
        changed = plan.rules.apply(logits, masks, self._history, in_place=plan.sampler_rows is not None)
        if plan.logprobs is not None and plan.logprobs.processed:
            self._processed = plan.logprobs.processed_logits(changed)
        if plan.random is None:
            return _sample_greedily(changed)
        tokens = _sample_randomly(changed, plan.random, b_position)
        if plan.random.rows is None:
            return tokens
        return _sample_greedily(changed).index_copy(0, plan.random.rows, tokens)


def _sample_randomly(logits: Tensor, random: RandomRows, b_position: Tensor | None) -> Tensor:
    rows = logits if random.rows is None else logits[random.rows]
    if b_position is None:
        b_position = int32s([req.total_len for req in random.reqs], logits.device)
    elif random.rows is not None:
        b_position = b_position[random.rows]
    if not (random.top or random.typical):
        return ops.sample(rows, random.temperature[:, 0], random.b_seed, b_position)
    scaled = _scaled_and_filtered(rows, random)
    return ops.sample(scaled, torch.ones_like(random.temperature[:, 0]), random.b_seed, b_position)


def _scaled_and_filtered(rows: Tensor, random: RandomRows) -> Tensor:
    """The logits after temperature and filters."""
    scaled = rows.float() / random.temperature
    if random.top:
        ops.top_k_top_p_min_p(scaled[random.top.rows], random.top.b_top_k, random.top.b_top_p, random.top.b_min_p)
    if random.typical:
        ops.typical_p(scaled[random.typical.rows], random.typical.b_typical_p)
    return scaled


def _sample_greedily(logits: Tensor) -> Tensor:
    zeros = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    return ops.sample(logits, zeros.float(), zeros, zeros.int())


def _merge(tokens: Tensor, sampled: Tensor) -> Tensor:
    """``sampled``, but NO_TOKEN where the step found none, and NONE_ALLOWED where only the rules left none."""
    sampled = sampled.where(sampled != ops.NO_TOKEN, NONE_ALLOWED)
    return sampled.where(tokens != ops.NO_TOKEN, ops.NO_TOKEN)
