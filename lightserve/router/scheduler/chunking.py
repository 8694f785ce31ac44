"""How the prompt tokens of a step are divided among the requests that prefill."""

from __future__ import annotations

import math

from lightserve.router.policy import Policy
from lightserve.router.req import Req
from lightserve.router.scheduler.chunk_sizing import bounded_tokens, long_prompt_tokens, prompt_tokens
from lightserve.router.scheduler.decodes import Decodes
from lightserve.router.scheduler.limits import SchedulerLimits
from lightserve.router.scheduler.step_cost import StepCost

SHARE_OF_OLDEST = 0.25  # of a step's prompt tokens: a long prompt continues beside any number of short ones
# Prompts with at most so many tokens left are computed in the order of arrival, before all others. Shortest first would
# make the TTFT p99 6 % longer at 20 requests per second of 256 to 768 tokens.
SHORT_PROMPT = 1_024

Chunk = tuple[Req, int]  # the request, and how many of its next tokens to compute


class Chunking:
    def __init__(self, limits: SchedulerLimits, policy: Policy, max_chunk: int) -> None:
        """``max_chunk``: tokens; a longer prompt is computed in chunks in any case, because of the KV pool."""
        self.cost = StepCost()
        self._limits = limits
        self._policy = policy
        self._max_chunk = max_chunk

    @property
    def max_span(self) -> int:
        """The most tokens that must not be divided: what the workers have memory for, and the KV pool."""
        return min(self._limits.batch_max_tokens, self._max_chunk)

    def budget(self, prompts: list[Req], decodes: Decodes, num_waiting: int, context: float = 0.0) -> int:
        """Prompt tokens of the next step, in which ``prompts`` prefill beside decodes.

        Waiting requests make a step longer. A long prompt does so only beside few streams, because it takes long.
        """
        beside = decodes.num_tokens
        short = sum(req.unplanned <= SHORT_PROMPT for req in prompts)
        tokens = prompt_tokens(self._limits, beside, max(short + num_waiting, 1), context)
        if self._limits.long_prompt_step_s and short < len(prompts):
            tokens = long_prompt_tokens(self._limits, self.cost, decodes, context, tokens)
        return bounded_tokens(self._limits, self.cost, beside, context, tokens)

    def reserved(self, budget: int) -> int:
        """How much of the budget one prompt is sure to get, so that admission counts it as taken."""
        return budget if self._limits.chunk_size is None else math.ceil(budget * SHARE_OF_OLDEST)

    def divide(self, prompts: list[Req], decodes: Decodes, num_waiting: int, available: int) -> list[Chunk]:
        """``available``: slots of the KV pool for these prompts."""
        budget = self.budget(prompts, decodes, num_waiting)
        if self._limits.chunk_size is None:
            return self._whole_prompts(prompts, budget, available)
        chunks = self._divide_by_need(prompts, budget, available)
        tokens = sum(count for _, count in chunks)
        context = sum(count * req.planned_len for req, count in chunks) / max(tokens, 1)
        if not context:
            return chunks
        return self._divide_by_need(prompts, self.budget(prompts, decodes, num_waiting, context), available)

    def _divide_by_need(self, prompts: list[Req], budget: int, available: int) -> list[Chunk]:
        """Short prompts go first, so that a long one does not delay them. The oldest prompt always gets its share.

        If it continues with a span that must not be divided, that is its share. One that is longer than the budget is
        the only chunk of its step. Spans of other prompts wait until they fit, or their prompt is the oldest.
        """
        oldest, share = prompts[0], math.ceil(budget * SHARE_OF_OLDEST)
        left = min(budget, available)
        if oldest.boundaries:
            least = oldest.boundaries.shortest_chunk(oldest.planned_len)
            share = max(share, least)
            left = least if budget < least <= available else left
        counts = {req.req_id: 0 for req in prompts}
        by_need = sorted(prompts, key=lambda req: (self._policy.priority(req), max(req.unplanned, SHORT_PROMPT)))
        for req, most in ((oldest, share), *((req, budget) for req in by_need)):
            planned = counts[req.req_id]
            count = _allowed(req, planned + max(0, min(req.unplanned - planned, most, left)))
            counts[req.req_id] = count
            left -= count - planned
        return [(req, counts[req.req_id]) for req in prompts if counts[req.req_id]]

    def _whole_prompts(self, prompts: list[Req], budget: int, available: int) -> list[Chunk]:
        """In their order. The last prompt may exceed the budget."""
        chunks = []
        for req in prompts:
            count = _allowed(req, min(req.unplanned, self._max_chunk))
            if budget > 0 and 0 < count <= available:
                chunks.append((req, count))
                budget -= count
                available -= count
        return chunks


def _allowed(req: Req, most: int) -> int:
    """How many of its next tokens a chunk may have, at most ``most``."""
    return req.boundaries.longest_chunk(req.planned_len, most) if req.boundaries else most
