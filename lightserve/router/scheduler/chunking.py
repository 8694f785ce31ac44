"""How many prompt tokens a step computes beside its decodes, and how they are divided among the requests that prefill.

Of the functions, ``decodes`` are tokens: with drafts, a stream computes several.
"""

from __future__ import annotations

import math

from lightserve.router.policy import Policy
from lightserve.router.req import Req
from lightserve.router.scheduler.decodes import Decodes
from lightserve.router.scheduler.limits import SchedulerLimits
from lightserve.router.scheduler.step_cost import StepCost

TOKENS_PER_DECODE = 2  # a step with prompts grows by so many tokens per decoding request
# It grows by more per decode beyond MANY_DECODES: such a step is long anyway. Otherwise prompts arrive faster than they
# are computed: of 256 streams with prompts of 1,024 tokens, steps of 1,024 tokens keep 50 waiting for 2 s each.
MANY_DECODES, TOKENS_PER_DECODE_OF_MANY = 128, 12
FIRST_WAITING = 3  # each of the first waiting requests makes a step longer by a quarter of a chunk
CHUNKS_PER_WAITING = 1 / 128  # chunks that every waiting request adds: a long queue needs long steps
MAX_CHUNKS = 4  # not counting the tokens for decodes
MAX_CHUNKS_BESIDE_MANY = 5  # counting the tokens for decodes: 1,280 prompt tokens with 256 or more decodes on a GPU
# A step is shorter if its prompt tokens have between SHORT_CONTEXT and MEDIUM_CONTEXT tokens before them.
SHORT_CONTEXT, MEDIUM_CONTEXT, MAX_SHORTENING = 500, 1_500, 1 / 3
# It shrinks further after LONG_CONTEXT tokens. With CONTEXT_OF_EQUAL_COST tokens before it, the attention of a token
# takes as long as its matmuls (26 us), for Llama-3-8B on one H200: see simulate/gpu.py.
LONG_CONTEXT, CONTEXT_OF_EQUAL_COST = 9_000, 27_000
MIN_CHUNK = 1 / 8  # of the chunk size, after any context
MIN_SHARE = 1 / 16  # of batch_max_tokens, with any number of decodes
TOO_SMALL = 3 / 4  # of the smallest preferred size: smaller steps are not rounded
# Long prompts make steps longer beside up to FEW_STREAMS, not beside MANY_STREAMS, and in between partly.
FEW_STREAMS, MANY_STREAMS = 6, 16

SHARE_OF_OLDEST = 0.25  # of a step's prompt tokens: a long prompt continues beside any number of short ones
# Prompts with at most so many tokens left are computed in the order of arrival, before all others. Shortest first would
# make the TTFT p99 6 % longer at 20 requests per second of 256 to 768 tokens.
SHORT_PROMPT = 1_024

Chunk = tuple[Req, int]  # the request, and how many of its next tokens to compute


class Chunking:
    def __init__(self, limits: SchedulerLimits, policy: Policy, max_chunk: int) -> None:
        """``max_chunk``: tokens; a longer prompt is computed in chunks in any case, because of the KV pool."""
        self.cost = StepCost()
        self.cost_alone = StepCost()  # of steps beside which no encoder used the device
        self._limits = limits
        self._policy = policy
        self._max_chunk = max_chunk

    def observe(self, tokens: int, pairs: float, seconds: float, is_alone: bool) -> None:
        """A step with prompts has ended. See StepCost."""
        self.cost.observe(tokens, pairs, seconds)
        if is_alone:
            self.cost_alone.observe(tokens, pairs, seconds)

    @property
    def max_span(self) -> int:
        """The most tokens that must not be divided: what the workers have memory for, and the KV pool."""
        return min(self._limits.batch_max_tokens, self._max_chunk)

    def budget(self, prompts: list[Req], decodes: Decodes, num_waiting: int, context: float = 0.0) -> int:
        """Prompt tokens of the next step, in which ``prompts`` prefill beside decodes.

        Waiting requests make a step longer. A long prompt does so only beside few streams, because it takes long. An
        encoder that uses the device too does not make its chunks smaller, which would only be less efficient.
        """
        beside = decodes.num_tokens
        short = sum(req.unplanned <= SHORT_PROMPT for req in prompts)
        tokens = prompt_tokens(self._limits, beside, max(short + num_waiting, 1), context)
        if self._limits.long_prompt_step_s and short < len(prompts):
            cost = self.cost_alone if self.cost_alone.is_known else self.cost
            tokens = long_prompt_tokens(self._limits, cost, decodes, context, tokens)
        return bounded_tokens(self._limits, self.cost, beside, context, tokens)

    def reserved(self, budget: int) -> int:
        """How much of the budget one prompt is sure to get, so that admission counts it as taken."""
        return budget if self._limits.chunk_size is None else math.ceil(budget * SHARE_OF_OLDEST)

    def divide(
        self, prompts: list[Req], decodes: Decodes, num_waiting: int, available: int, most: int | None = None
    ) -> list[Chunk]:
        """``available``: slots of the KV pool for these prompts. ``most``: tokens, if not the budget of the step."""
        most = self._limits.batch_max_tokens if most is None else most
        budget = min(self.budget(prompts, decodes, num_waiting), most)
        if self._limits.chunk_size is None:
            return self._whole_prompts(prompts, budget, available)
        chunks = self._divide_by_need(prompts, budget, available)
        tokens = sum(count for _, count in chunks)
        context = sum(count * req.planned_len for req, count in chunks) / max(tokens, 1)
        if not context:
            return chunks
        budget = min(self.budget(prompts, decodes, num_waiting, context), most)
        return self._divide_by_need(prompts, budget, available)

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


def prompt_tokens(limits: SchedulerLimits, decodes: int, waiting: int, context: float = 0.0) -> int:
    """Prompt tokens of a step with ``decodes`` decoding requests, while ``waiting`` requests have no first token.

    Without decodes, prompts fill the step. The more requests decode, the longer their step takes anyway, and the more
    prompt tokens it can take at little extra latency. ``context``: the average number of tokens before a prompt token;
    they make its attention more expensive.
    """
    if decodes == 0:
        return limits.batch_max_tokens
    room = max(limits.batch_max_tokens - decodes, int(limits.batch_max_tokens * MIN_SHARE), 1)
    if limits.chunk_size is None:
        return room
    tokens = _beside_decodes(limits, limits.chunk_size, decodes, waiting, context)
    if context > LONG_CONTEXT:
        shrunk = tokens / (1 + (context - LONG_CONTEXT) / CONTEXT_OF_EQUAL_COST)
        tokens = _fit_device(
            limits.preferred_step_tokens, round(max(shrunk, limits.chunk_size * MIN_CHUNK, 1)), decodes
        )
    return max(min(room, tokens), 1)


def long_prompt_tokens(limits: SchedulerLimits, cost: StepCost, decodes: Decodes, context: float, usual: int) -> int:
    """Prompt tokens of a step with a long prompt: as many as ``long_prompt_step_s`` allows, ``usual`` at least.

    Small chunks are inefficient, and a long prompt has many of them. Few streams do not mind if their steps are longer
    for a while: it ends sooner. Many would wait longer in sum than the prompt gains.
    """
    streams, beside = len(decodes.rows), decodes.num_tokens
    share = min(max((MANY_STREAMS - streams) / (MANY_STREAMS - FEW_STREAMS), 0), 1)
    tokens = cost.tokens_within(limits.long_prompt_step_s, context)
    if not streams or not share or tokens is None:
        return usual
    longer = _size_within(limits, round(usual + (tokens - beside - usual) * share) + beside) - beside
    return max(usual, min(longer, limits.batch_max_tokens - beside))


def bounded_tokens(limits: SchedulerLimits, cost: StepCost, decodes: int, context: float, tokens: int) -> int:
    """At most ``tokens`` prompt tokens: as many as ``max_step_s`` allows beside decodes, and a few in any case."""
    if limits.max_step_s is None or limits.chunk_size is None or not decodes:
        return tokens
    most = cost.tokens_within(limits.max_step_s, context)
    least = max(round(limits.chunk_size * MIN_CHUNK), 1)
    return tokens if most is None else min(tokens, max(most - decodes, least))


def _size_within(limits: SchedulerLimits, total: int) -> int:
    """The largest size that the device computes efficiently and that is not above ``total``."""
    sizes = limits.preferred_step_tokens
    if not sizes or total < sizes[0]:
        return total
    if total > sizes[-1]:
        return total // sizes[0] * sizes[0]
    return max(size for size in sizes if size <= total)


def _beside_decodes(limits: SchedulerLimits, chunk_size: int, decodes: int, waiting: int, context: float) -> int:
    """Prompt tokens after a context of up to LONG_CONTEXT tokens."""
    chunks = min(1 + min(waiting, FIRST_WAITING) / 4 + waiting * CHUNKS_PER_WAITING, MAX_CHUNKS)
    length = min(max(context - SHORT_CONTEXT, 0) / (MEDIUM_CONTEXT - SHORT_CONTEXT), 1)
    for_decodes = TOKENS_PER_DECODE * decodes + TOKENS_PER_DECODE_OF_MANY * max(decodes - MANY_DECODES, 0)
    total = round((chunks * chunk_size + for_decodes) * (1 - MAX_SHORTENING * length))
    if not limits.preferred_step_tokens:
        return total - decodes
    most = max(decodes, chunk_size) + MAX_CHUNKS_BESIDE_MANY * chunk_size
    return _fit_device(limits.preferred_step_tokens, min(total, most) - decodes, decodes)


def _fit_device(sizes: tuple[int, ...], tokens: int, decodes: int) -> int:
    """Round the step to a size that the device computes efficiently, if that leaves at least half of ``tokens``.

    The sizes say nothing about steps that are much smaller. Larger steps are multiples of the smallest size.
    """
    total = tokens + decodes
    if not sizes or total < TOO_SMALL * sizes[0]:
        return tokens
    multiple = round(total / sizes[0]) * sizes[0]
    candidates = [multiple] if total > sizes[-1] else sizes
    fitting = [size for size in candidates if 2 * (size - decodes) >= tokens]
    return min(fitting, key=lambda size: abs(size - total), default=total) - decodes
