"""Several attention groups: every round has a step for each group, and every request its text."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from lightserve.errors import WorkerDiedError
from lightserve.messages.block_hash import BLOCK_TOKENS
from lightserve.messages.step import ReqFailed, Step, TokenColumns, TokenOut
from lightserve.router.req import Req
from lightserve.router.scheduler import Scheduler
from lightserve.router.scheduler.placement import GroupLoad, choose_group
from test.router.scheduler.test_scheduler import KvWorker, endless, make_group, make_req, prompts, truth

NUM_GROUPS = 3


class Server:
    """The router's loop, and a fake worker for each group. A worker that dies takes the others with it."""

    def __init__(self, depth: int = 1, poison: frozenset[int] = frozenset(), **limits: Any) -> None:
        self.scheduler = Scheduler(*(make_group(**limits) for _ in range(NUM_GROUPS)))
        self.rounds: list[Step] = []
        self.crashing: list[int] = []
        self._depth = depth
        self._poison = poison
        self._in_flight: deque[list[TokenOut]] = deque()
        self.workers = self._new_workers()

    def _new_workers(self) -> list[KvWorker]:
        return [KvWorker(group, self._poison) for group in self.scheduler.groups]

    def defer_again(self, predicate: Callable[[Req], bool]) -> list[Req]:
        return [req for group in self.scheduler.groups for req in group.queue.defer_again(predicate)]

    def step(self) -> bool:
        """Whether anything was done."""
        depth = 1 if self.scheduler.is_isolating_crash else self._depth
        while len(self._in_flight) < depth and (step := self.scheduler.next_step()):
            assert len(step.groups) == NUM_GROUPS, "a rank would wait for one that has no step"
            self.rounds.append(step)
            try:
                outs = [worker.run(own) for worker, own in zip(self.workers, step.groups, strict=True)]
            except WorkerDiedError:
                self.crash()
                return True
            self._in_flight.append([out for own in outs for out in own])
        if not self._in_flight:
            return False
        self.scheduler.complete_step()
        self._process(self._in_flight.popleft())
        return True

    def _process(self, outs: list[TokenOut]) -> None:
        """As the output processor does it: in columns if possible."""
        tokens = TokenColumns.of([(out.req_id, [out.token.id]) for out in outs])
        is_known = self.scheduler.process_plain(tokens)
        assert sum(self.scheduler.observe_gaps(tokens.req_ids[is_known], 0.0)[1]) == is_known.sum()
        for out in tokens.where(~is_known).outs():
            self.scheduler.process_req([out])

    def crash(self) -> None:
        self._in_flight.clear()
        crashing_request = self.scheduler.recover_from_crash()
        if crashing_request is not None:
            self.crashing.append(crashing_request.req_id)
        self.workers = self._new_workers()

    def run(self, reqs: list[Req]) -> None:
        for req in reqs:
            self.scheduler.add(req)
        while self.step():
            pass

    def group_of(self, req_id: int) -> int:
        """Where the request runs."""
        return next(at for at, worker in enumerate(self.workers) if req_id in worker.reqs)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.tuples(prompts, st.integers(1, 20)), min_size=1, max_size=12),
    st.sampled_from([1, 2]),
    st.sampled_from([120, 1000]),
)
def test_every_request_gets_its_text_whatever_the_other_groups_compute(
    sizes: list[tuple[list[int], int]], depth: int, num_slots: int
) -> None:
    server = Server(depth, num_slots=num_slots)
    reqs = [make_req(i, prompt, count) for i, (prompt, count) in enumerate(sizes)]

    server.run(reqs)

    for req, (prompt, count) in zip(reqs, sizes, strict=True):
        assert req.token_ids[len(prompt) :].tolist() == truth(prompt, req.req_id, count)
    assert server.scheduler.num_running == server.scheduler.num_waiting == 0
    assert all(group.pool.used == 0 for group in server.scheduler.groups)
    assert not any(worker.reqs for worker in server.workers)


def test_idle_groups_get_steps_without_rows_while_one_computes_and_none_get_any_afterwards() -> None:
    server = Server()

    server.run([make_req(0, [1, 2, 3])])

    computed = [[own.num_tokens for own in step.groups] for step in server.rounds if step.num_tokens]
    assert computed[0] == [3, 0, 0]
    assert set(map(tuple, computed[1:])) == {(1, 0, 0)}
    assert server.scheduler.next_step() is None


def test_requests_spread_over_the_groups_and_one_round_computes_all_of_them() -> None:
    server = Server()
    for i in range(NUM_GROUPS):
        server.scheduler.add(endless(i))

    server.step()

    assert {server.group_of(i) for i in range(NUM_GROUPS)} == set(range(NUM_GROUPS))
    (step,) = server.rounds
    assert (step.num_rows, step.num_tokens, step.num_decodes) == (3, 9, 0)


def test_an_aborted_failed_or_expired_request_leaves_its_own_group_only() -> None:
    server = Server()
    late = endless(2)
    late.deadline_s = 5.0
    for req in (endless(0), endless(1), late):
        server.scheduler.add(req)
    server.step()
    server.scheduler.next_step()  # so that all are in flight

    aborted = server.scheduler.abort(0)
    failed = server.scheduler.fail(ReqFailed(1, 500, "why"))
    expired = server.scheduler.drop(lambda req: req.is_expired(6.0))

    assert [req.req_id for req in (aborted, failed, *expired) if req is not None] == [0, 1, 2]
    assert server.scheduler.abort(0) is None
    assert server.scheduler.num_running == 0
    assert all(group.pool.used == 0 for group in server.scheduler.groups)


def test_a_request_that_comes_back_gets_no_token_of_another_group() -> None:
    server = Server(depth=3)
    for req in map(endless, range(NUM_GROUPS)):
        server.scheduler.add(req)
    server.step()
    server.scheduler.abort(0)
    for req_id in (3, 4):  # so that it would go to another group
        server.scheduler.add(endless(req_id))
    back = make_req(0, [4, 5, 6], 20, seed=3)

    server.scheduler.add(back)
    while back.finish_reason is None:
        server.step()

    assert back.output_ids == truth([4, 5, 6], 3, 20)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("poison", [{3}, {0, 5}, {7}])
def test_a_request_that_crashes_workers_is_found_and_those_of_all_groups_get_their_text(
    depth: int, poison: set[int]
) -> None:
    server = Server(depth, frozenset(poison), num_slots=4000)
    reqs = [make_req(i, [10 + i, 20, 30], 12) for i in range(9)]

    server.run(reqs)

    assert set(server.crashing) == poison
    for req in reqs:
        if req.req_id not in poison:
            assert req.token_ids[3:].tolist() == truth([10 + req.req_id, 20, 30], req.req_id, 12)


def test_a_suspect_runs_alone_in_all_groups() -> None:
    server = Server(depth=2, num_slots=4000)
    for i in range(6):
        server.scheduler.add(endless(i))
    server.step()  # it leaves one in flight
    server.crash()

    isolated = [server.rounds.pop() for _ in range(6) if server.step()]

    assert [step.num_rows for step in isolated] == [1] * 6
    assert server.scheduler.is_isolating_crash is False


def begin_and_crash(num_reqs: int) -> Server:
    """All requests may have crashed the workers: one in each group, or several."""
    server = Server(num_slots=4000)
    for i in range(num_reqs):
        server.scheduler.add(endless(i))
    server.step()
    server.scheduler.next_step()  # so that all are in flight
    server.crash()
    server.rounds.clear()
    return server


def test_other_groups_go_on_while_a_suspect_is_held() -> None:
    server = begin_and_crash(1)
    held = server.defer_again(lambda req: True)
    others = [make_req(10 + i, [30 + i, 2]) for i in range(NUM_GROUPS)]

    server.run(others)

    assert all(req.finish_reason is not None for req in others)
    server.scheduler.make_ready(held[0])
    server.rounds.clear()
    server.step()
    assert [step.num_rows for step in server.rounds] == [1]


def test_a_suspect_runs_alone_while_that_of_another_group_is_held() -> None:
    """Both groups have other requests, which are not computed beside a suspect."""
    server = begin_and_crash(NUM_GROUPS)
    held = server.defer_again(lambda req: req.req_id == 0)
    for i in range(NUM_GROUPS):
        server.scheduler.add(endless(10 + i))

    for _ in range(20):
        server.step()

    suspects = set(range(NUM_GROUPS))
    rounds = [[row.req_id for step in one.groups for row in step.rows] for one in server.rounds]
    alone = [ids for ids in rounds if not suspects.isdisjoint(ids)][: NUM_GROUPS - 1]
    assert sorted(alone) == [[1], [2]]
    assert any(10 in ids for ids in rounds), "the group of the held one goes on"
    server.scheduler.make_ready(held[0])
    server.rounds.clear()
    while server.scheduler.is_isolating_crash:
        server.step()
    assert [[row.req_id for step in one.groups for row in step.rows] for one in server.rounds].count([0]) == 1


def test_the_duration_of_a_step_counts_for_the_group_with_the_most_tokens() -> None:
    scheduler = Scheduler(*(make_group(batch_max_tokens=512, chunk_size=512) for _ in range(NUM_GROUPS)))
    for i, length in enumerate((40, 300, 50)):
        scheduler.add(make_req(i, list(range(length))))
    observed: list[tuple[int, float]] = []
    for group in scheduler.groups:
        group.chunking.cost.observe = lambda tokens, pairs, seconds: observed.append((tokens, seconds))  # type: ignore[method-assign]
    scheduler.next_step()

    scheduler.complete_step(0.5)

    assert observed == [(300, 0.5)]


def test_a_held_request_starts_after_its_release() -> None:
    server = Server()
    req = make_req(0, [1, 2, 3])
    server.scheduler.defer(req)
    before = server.scheduler.num_blocked, server.scheduler.next_step()

    server.scheduler.make_ready(req)
    server.run([])

    assert before == (1, None)
    assert req.finish_reason is not None


def loads(*values: tuple[int, ...]) -> list[GroupLoad]:
    return [GroupLoad(*value) for value in values]


@pytest.mark.parametrize(
    ("values", "group"),
    [
        (loads((0, 0, 0), (0, 0, 0)), 0),
        (loads((1, 50, 0), (1, 20, 0)), 1),  # the fewest tokens
        (loads((4, 90, 2 * BLOCK_TOKENS), (1, 20, 0)), 1),  # it would have too many requests
        (loads((1, 90, 2 * BLOCK_TOKENS), (1, 20, 0)), 0),  # the longest prefix
        (loads((1, 90, 2 * BLOCK_TOKENS), (1, 20, 2 * BLOCK_TOKENS + 1)), 1),  # as long: the fewest tokens
        (loads((1, 90, BLOCK_TOKENS - 1), (1, 20, 0)), 1),  # too short to count
        (loads((0, 0, 0, 70), (0, 0, 0, 30)), 1),  # idle: the smallest cache
    ],
)
def test_a_request_goes_to_the_group_with_its_prefix_and_the_fewest_tokens(values: list[GroupLoad], group: int) -> None:
    assert choose_group(values) == group
