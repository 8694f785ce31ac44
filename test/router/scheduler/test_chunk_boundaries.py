"""Chunks end where they must and divide no span, against brute force, whatever else the scheduler does."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from lightserve.messages.step import Step
from lightserve.router.chunk_boundaries import NO_BOUNDARIES, ChunkBoundaries, Span, in_blocks
from lightserve.router.req import Req
from lightserve.router.scheduler import Scheduler
from test.router.scheduler.test_scheduler import Server, beside_a_stream, make, make_req, truth

Boundaries = tuple[list[int], list[Span]]


@st.composite
def boundaries_within(draw: st.DrawFn, length: int) -> Boundaries:
    """For a prompt of ``length`` tokens."""
    cuts = draw(st.lists(st.integers(0, length), unique=True, max_size=8).map(sorted))
    spans = [(begin, end) for begin, end in pairwise(cuts) if draw(st.booleans())]
    ends = draw(st.lists(st.integers(1, length), unique=True, max_size=3))
    return [end for end in ends if not any(begin < end < after for begin, after in spans)], spans


def is_allowed(ends: list[int], spans: list[Span], begin: int, end: int) -> bool:
    """Whether a chunk may have these positions."""
    return not any(begin < must_end < end for must_end in ends) and not any(a < end < b for a, b in spans)


@given(boundaries_within(30), st.integers(0, 29), st.integers(1, 40))
def test_a_chunk_is_the_longest_that_brute_force_allows(drawn: Boundaries, begin: int, most: int) -> None:
    boundaries = ChunkBoundaries(*drawn)

    allowed = [count for count in range(1, 41) if is_allowed(*drawn, begin, begin + count)]

    assert boundaries.longest_chunk(begin, most) == max((count for count in allowed if count <= most), default=0)
    assert boundaries.shortest_chunk(begin) == min(allowed)


@pytest.mark.parametrize("spans", [[(3, 3)], [(5, 2)], [(0, 4), (3, 8)]])
def test_spans_without_tokens_or_that_overlap_are_a_mistake(spans: list[Span]) -> None:
    with pytest.raises(ValueError, match="must not overlap"):
        ChunkBoundaries(spans=spans)


def test_an_end_inside_of_a_span_is_a_mistake() -> None:
    ChunkBoundaries([4, 8], [(4, 8)])
    with pytest.raises(ValueError, match="cannot end inside"):
        ChunkBoundaries([5], [(4, 8)])


class CheckingServer(Server):
    """Checks the chunks of every step."""

    def __init__(self, scheduler: Scheduler, wanted: dict[int, Boundaries], depth: int) -> None:
        super().__init__(scheduler, depth)
        self._wanted = wanted
        self._budget = 0
        chunking = scheduler.only_group.chunking
        compute = chunking.budget

        def budget(*args: Any) -> int:
            self._budget = compute(*args)
            return self._budget

        setattr(chunking, "budget", budget)  # noqa: B010  # mypy: a method

    def launch(self, step: Step) -> None:
        planned = self.scheduler._in_flight[-1][self.scheduler.only_group]
        chunks = list(zip(planned.req_ids.tolist(), planned.counts.tolist(), planned.planned_len.tolist(), strict=True))
        for req_id, count, end in chunks:
            assert is_allowed(*self._wanted[req_id], end - count, end), "a chunk divides what it must not"
        self._check_budget(chunks[planned.num_decodes :])
        super().launch(step)

    def _check_budget(self, chunks: list[tuple[int, int, int]]) -> None:
        """A longer step has a single chunk, the rest of a span. Whole prompts may exceed the budget as ever."""
        is_within = sum(count for _, count, _ in chunks) <= self._budget
        if self.scheduler.limits.chunk_size is None or is_within:
            return
        ((req_id, count, end),) = chunks
        assert any(begin <= end - count and end == after for begin, after in self._wanted[req_id][1])


@st.composite
def loads(draw: st.DrawFn) -> tuple[CheckingServer, list[Req]]:
    """Prompts with a common prefix, so that cached prefixes end anywhere, in a pool that is too small for all."""
    prompts = [
        [100 + i for i in range(draw(st.integers(0, 40)))] + draw(st.lists(st.integers(0, 3), min_size=2, max_size=20))
        for _ in range(draw(st.integers(1, 10)))
    ]
    wanted = {i: draw(boundaries_within(len(prompt))) for i, prompt in enumerate(prompts)}
    most = draw(st.integers(60, 80))  # so that every span fits into a step
    chunk_size = draw(st.sampled_from([3, 3, 16, most, None]))
    scheduler = make(draw(st.integers(85, 160)), batch_max_tokens=most, chunk_size=chunk_size)
    for _ in range(32):
        scheduler.only_group._estimate.observe(1)  # too short: requests are preempted
    reqs = [
        make_req(i, prompt, 20, boundaries=ChunkBoundaries(*wanted[i]) if any(wanted[i]) else NO_BOUNDARIES)
        for i, prompt in enumerate(prompts)
    ]
    return CheckingServer(scheduler, wanted, draw(st.integers(1, 2))), reqs


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(loads(), st.randoms(use_true_random=False))
def test_no_step_divides_a_span_or_passes_an_end_and_budgets_are_kept(
    load: tuple[CheckingServer, list[Req]], rng: random.Random
) -> None:
    server, reqs = load
    group = server.scheduler.only_group
    for req in reqs:
        server.scheduler.add(req)
        if rng.random() < 0.5:
            server.step()
        if len(group.batch) and rng.random() < 0.2:
            group.preemption.preempt(rng.choice(list(group.batch)))

    server.run([])

    for req in reqs:
        assert req.output_ids == truth(req.prompt_ids.tolist(), req.req_id, 20)


def chunks_of(scheduler: Scheduler, server: Server, req: Req) -> list[int]:
    """How many tokens of its prompt each step computes."""
    counts = []
    while req.is_prefilling or req in scheduler.only_group.queue:
        before = req.planned_len
        server.step()
        counts.append(req.planned_len - before)
    return [count for count in counts if count]


def test_a_span_longer_than_the_budget_is_the_only_chunk_of_a_step() -> None:
    scheduler, server = beside_a_stream(1000, batch_max_tokens=256, chunk_size=16)
    image = make_req(1, list(range(100, 300)), boundaries=ChunkBoundaries(spans=[(5, 155)]))
    scheduler.add(image)
    scheduler.add(make_req(2, list(range(300, 400))))

    counts = chunks_of(scheduler, server, image)

    assert counts[:2] == [5, 150]
    assert server.steps[2] == {0, 1}, "the stream goes on, the other prompt waits"


def test_the_rest_of_a_span_is_one_chunk_if_its_begin_is_cached() -> None:
    scheduler, server = beside_a_stream(1000, batch_max_tokens=256, chunk_size=16)
    server.scheduler.add(first := make_req(1, list(range(100, 150)), 1))
    while first.finish_reason is None:
        server.step()
    image = make_req(2, list(range(100, 300)), boundaries=ChunkBoundaries(spans=[(20, 180)]))
    scheduler.add(image)

    counts = chunks_of(scheduler, server, image)

    assert image.cached_len == 50
    assert counts[0] == 50 + 130


def test_a_chunk_ends_where_it_must_though_the_step_has_room() -> None:
    scheduler = make(1000, batch_max_tokens=256, chunk_size=256)
    req = make_req(0, list(range(100, 200)), boundaries=ChunkBoundaries([10, 64, 100]))
    scheduler.add(req)

    assert chunks_of(scheduler, Server(scheduler), req) == [10, 54, 36]


def test_short_prompts_fill_what_a_boundary_leaves_of_a_step() -> None:
    scheduler = make(1000, batch_max_tokens=64, chunk_size=64)
    scheduler.add(make_req(0, list(range(100, 200)), boundaries=ChunkBoundaries([10])))
    scheduler.add(make_req(1, list(range(300, 350))))

    step = scheduler.next_step()

    assert step is not None
    assert [(row.req_id, len(row.slots)) for row in step.chunks] == [(0, 10), (1, 50)]


@pytest.mark.parametrize(("prompt_len", "total_len"), [(1, 1), (64, 64), (65, 65), (200, 200), (200, 207)])
def test_chunks_in_blocks_are_the_same_however_many_tokens_a_step_has(prompt_len: int, total_len: int) -> None:
    boundaries = in_blocks(prompt_len, total_len, 64)
    last = (prompt_len - 1) // 64 * 64

    for most in (64, 70, 150, 1000):
        ends, end = [], 0
        while end < total_len:
            count = boundaries.longest_chunk(end, min(most, total_len - end))
            assert count > 0
            end += count
            ends.append(end)
        assert all(end % 64 == 0 for end in ends if end <= last)
        assert [end for end in ends if end > last] == list(range(prompt_len, total_len + 1))
        assert last == 0 or last in ends


def test_ends_inside_of_a_span_are_left_out() -> None:
    boundaries = ChunkBoundaries(spans=[(10, 20)]).with_ends([5, 15, 20])

    assert [boundaries.longest_chunk(begin, 100) for begin in (0, 5, 20)] == [5, 15, 100]
