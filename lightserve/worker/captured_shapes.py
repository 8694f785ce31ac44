"""The shapes of steps that are captured as graphs, and which of them a step is padded to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightserve.common.device import GraphRanges
from lightserve.worker.batch.shared_prefixes import MIN_MEMBERS
from lightserve.worker.batch.step_input import StepShape

MANY_DRAFTING = 32  # requests: more of them, each with all its drafts, take longer than the weights


def graph_shapes(max_reqs: int, ranges: GraphRanges, shares_prefixes: bool = True) -> Iterator[StepShape]:
    """The shapes that are worth capturing for a server that runs ``max_reqs`` requests at once."""
    most = _most_decodes(max_reqs, ranges)
    for count in ranges.decodes:
        if count <= most:
            yield StepShape(count, count, has_decodes=True, has_prompts=False)
        if shares_prefixes and MIN_MEMBERS <= count <= most:
            yield StepShape(count, count, has_decodes=True, has_prompts=False, has_shared=True)
    for tokens in ranges.tokens:
        is_launch_bound = tokens <= ranges.max_launch_bound_tokens
        if is_launch_bound:
            yield StepShape(tokens, ranges.prefill_requests, has_decodes=False, has_prompts=True)
        for requests in _requests_beside(tokens, most, ranges):
            if is_launch_bound or requests > ranges.slow_launch_requests:
                yield StepShape(tokens, requests, has_decodes=True, has_prompts=True)
                if shares_prefixes and tokens <= ranges.max_shared_tokens:
                    yield StepShape(tokens, requests, has_decodes=True, has_prompts=True, has_shared=True)


def graph_shape_for(shape: StepShape, ranges: GraphRanges) -> StepShape | None:
    """The smallest shape of ``graph_shapes`` that holds this one; None if the padding would cost too much."""
    if not shape.has_prompts:
        count = _next_size(shape.requests, ranges.decodes)
        return None if count is None else shape._replace(tokens=count, requests=count)
    tokens = _next_size(shape.tokens, ranges.tokens)
    if tokens is None or tokens - shape.tokens > ranges.max_padding:
        return None
    if not shape.has_decodes and shape.requests <= ranges.prefill_requests:
        return shape._replace(tokens=tokens, requests=ranges.prefill_requests)
    requests = _next_size(shape.requests, ranges.requests)
    if requests is None or requests >= ranges.tokens[-1]:
        return None
    tokens = max(tokens, _next_size(requests + 1, ranges.tokens) or tokens)
    return shape._replace(tokens=tokens, requests=requests, has_decodes=True)


def draft_shapes(max_reqs: int, ranges: GraphRanges, num_drafts: int, has_head: bool = False) -> Iterator[StepShape]:
    """Shapes of steps that compute decodes, and drafts after them.

    The tokens of a request are not padded, only those of the whole step. So many requests with few drafts each have
    shapes of their own. If a head drafts after the step, few requests have shapes for fewer drafts of it.
    """
    most = _most_decodes(max_reqs, ranges)
    for requests in ranges.decodes:
        for drafts in _padded_drafts(requests, num_drafts):
            tokens = requests * (1 + drafts)
            if requests <= most and tokens <= ranges.max_draft_tokens:
                shape = StepShape(tokens, requests, has_decodes=False, has_prompts=True, num_drafts=num_drafts)
                for following in _next_drafts(requests, num_drafts) if has_head else (0,):
                    yield shape._replace(next_drafts=following)


def mixed_draft_shapes(
    max_reqs: int, ranges: GraphRanges, num_drafts: int, has_head: bool = False
) -> Iterator[StepShape]:
    """Shapes of steps that compute prompts beside decodes with drafts.

    Launching one takes twice as long as without drafts, so all are captured that a step is padded to.
    """
    most = _most_decodes(max_reqs, ranges)
    for tokens in ranges.tokens if num_drafts else ():
        for requests in _requests_beside(tokens, most, ranges):
            shape = StepShape(tokens, requests, has_decodes=True, has_prompts=True, num_drafts=num_drafts)
            yield shape._replace(next_drafts=num_drafts if has_head else 0)


def _next_drafts(requests: int, num_drafts: int) -> tuple[int, ...]:
    """Drafts of each of so many requests that a head computes after a captured step: 1, 2, 4 ... and all.

    Few requests often have fewer drafts than that, and a pass of a head that nobody needs takes 5 % of their steps.
    """
    if requests >= MANY_DRAFTING:
        return (num_drafts,)
    return (*[1 << bits for bits in range((num_drafts - 1).bit_length())], num_drafts)


def _padded_drafts(requests: int, num_drafts: int) -> tuple[int, ...]:
    """Drafts of each of so many requests that a captured step has room for."""
    if not num_drafts:
        return ()
    if requests < MANY_DRAFTING:
        return (num_drafts,)
    half = num_drafts // 2
    return tuple(sorted({half, (half + num_drafts) // 2, num_drafts} - {0}))


def draft_shape_for(shape: StepShape, ranges: GraphRanges, num_drafts: int, has_head: bool = False) -> StepShape | None:
    """The smallest shape of ``draft_shapes``, or of ``mixed_draft_shapes``, that holds this one."""
    if shape.has_decodes:
        larger = graph_shape_for(shape, ranges)
        following = num_drafts if has_head else 0
        return None if larger is None else larger._replace(num_drafts=num_drafts, next_drafts=following)
    requests = _next_size(shape.requests, ranges.decodes)
    if requests is None:
        return None
    tokens = _next_size(shape.tokens, [requests * (1 + drafts) for drafts in _padded_drafts(requests, num_drafts)])
    if tokens is None:
        return None
    following = _next_size(shape.next_drafts, _next_drafts(requests, num_drafts)) or num_drafts if has_head else 0
    return shape._replace(tokens=tokens, requests=requests, num_drafts=num_drafts, next_drafts=following)


def _most_decodes(max_reqs: int, ranges: GraphRanges) -> int:
    """Of a captured step."""
    return _next_size(max_reqs, ranges.decodes) or ranges.decodes[-1]


def _requests_beside(tokens: int, most: int, ranges: GraphRanges) -> list[int]:
    """Numbers of requests of captured steps with so many tokens, of prompts beside at most ``most`` decodes."""
    return [requests for requests in ranges.requests if requests < min(tokens, most + ranges.prefill_requests + 1)]


def _next_size(count: int, sizes: Sequence[int]) -> int | None:
    return next((size for size in sizes if size >= count), None)
