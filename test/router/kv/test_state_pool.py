"""The seam of KV groups carries recurrent state. The brute-force tests of test_scheduler.py and test_histories.py run
with and without such a pool: forks, preemptions, evictions, aborts, failed steps, and drafts that are refused."""

from __future__ import annotations

import numpy as np
import pytest

from lightserve.messages.control import SlidingWindowKv
from test.router.scheduler.test_scheduler import Server, make, make_req, truth
from test.router.state_pool import StatePool

CHUNK = 32


def server_of(state_rows: int, depth: int = 1, windowed: SlidingWindowKv | None = None) -> Server:
    return Server(make(1000, windowed=windowed, state_rows=state_rows, batch_max_tokens=CHUNK, chunk_size=CHUNK), depth)


def prompt(length: int, first: int = 1000) -> list[int]:
    return list(range(first, first + length))


def states_of(server: Server) -> StatePool:
    pool = server.scheduler.only_group.pool.groups[-1]
    assert isinstance(pool, StatePool)
    return pool


def test_a_prefix_is_continued_where_a_chunk_ended() -> None:
    server = server_of(state_rows=20)
    server.run([make_req(0, prompt(100), 1)])

    for number, length in enumerate([100, 99, 70, 31], start=1):
        server.run([req := make_req(number, [*prompt(length), 1, 2], 1)])
        assert req.cached_len == max(end for end in (0, 32, 64, 96, 100) if end <= length)


def test_the_next_turn_of_a_chat_continues_the_state_of_the_last_answer() -> None:
    server = server_of(state_rows=20)
    first = make_req(0, prompt(50), 20)
    first.eos_ids = ()
    server.run([first])

    server.run([second := make_req(1, [*first.token_ids[:-1], 5000, 5001], 5)])

    assert second.cached_len == 50 + 19  # the last output is never computed


def test_a_prefix_whose_states_were_evicted_keeps_its_kv_and_is_computed_again() -> None:
    server = server_of(state_rows=4)
    server.run([make_req(0, prompt(100), 1)])
    server.run([make_req(1, prompt(200, 5000), 1)])  # takes all rows

    server.run([again := make_req(2, prompt(100), 5)])

    assert server.scheduler.only_group.pool.cached_tokens > 200
    assert again.cached_len == 0
    assert again.output_ids == truth(again.prompt_ids, 2, 5)
    server.assert_idle()


@pytest.mark.parametrize("depth", [1, 2])
def test_choices_of_one_prompt_begin_with_one_state_and_write_their_own(depth: int) -> None:
    server = server_of(state_rows=20, depth=depth)
    reqs = [make_req(i, [*prompt(64), 1], 20, salt="group 1", keeps_kv_cached=False) for i in range(8)]

    server.run(reqs)

    assert all(req.output_ids == truth(req.prompt_ids, req.seed, 20) for req in reqs)
    assert sum(req.cached_len == 64 for req in reqs) == 7
    assert states_of(server).slots.num_unheld == 0
    server.assert_idle()


def test_requests_wait_if_no_row_is_left_for_them() -> None:
    server = server_of(state_rows=3)

    server.run([make_req(i, prompt(10, 1000 * i), 20) for i in range(8)])

    assert max(map(len, server.steps)) == 3
    assert server.scheduler.num_preemptions == 0
    server.assert_idle()


def test_a_preempted_request_continues_its_state() -> None:
    server = server_of(state_rows=6)
    req = make_req(0, prompt(100), 50)
    req.eos_ids = ()
    server.scheduler.add(req)
    for _ in range(20):
        server.step()

    server.scheduler.only_group.preemption.preempt_newest()
    server.run([])

    assert server.worker.computed == 100 + 49
    server.assert_idle()


def test_no_prefix_keeps_a_state_that_may_have_seen_accepted_drafts() -> None:
    """After failed steps, a request is planned from tokens that were certain before its drafts were accepted."""
    server = Server(make(1000, state_rows=8, num_drafts=3))
    req = make_req(0, prompt(10), 200)
    req.eos_ids = ()
    server.scheduler.add(req)
    known = [0, 0]
    while known[-1] - known[-2] < 3:
        server.step()
        known.append(req.output_len)
    text = req.token_ids

    server.fail_steps()

    server.run([again := make_req(1, text, 5)])
    assert again.output_ids == truth(text.tolist(), 1, 5)
    server.assert_idle()


def test_a_prefix_is_continued_where_all_groups_can() -> None:
    """The window of the end has its slots, but a state was kept only where its window has lost them."""
    server = server_of(state_rows=20, windowed=SlidingWindowKv(size=100, window=8, kept_tokens=12))
    server.run([make_req(0, prompt(100), 1)])
    pool = server.scheduler.only_group.pool
    window, states = pool.groups
    tokens = pool._cache.find_slots(np.array(prompt(100), dtype=np.int32))
    states.remove_cached(tokens[99:])
    assert [group.usable_len(tokens) for group in pool.groups] == [100, 96]

    window.remove_cached(tokens[90:96])

    assert window.usable_len(tokens[:96]) == 90
    assert pool.cached_len(make_req(1, [*prompt(100), 1])) == 64
