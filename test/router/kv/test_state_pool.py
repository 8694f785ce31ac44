"""The seam of KV groups carries recurrent state. The brute-force tests of test_scheduler.py and test_histories.py run
with and without such a pool: forks, preemptions, evictions, aborts, failed steps, and drafts that are refused."""

from __future__ import annotations

import numpy as np
import pytest

from lightserve.messages.control import SlidingWindowKv
from lightserve.router.kv import state_pool
from lightserve.router.kv.state_pool import StatePool
from test.router.scheduler.test_scheduler import Server, make, make_req, truth

CHUNK = 32


def server_of(state_rows: int, depth: int = 1, windowed: SlidingWindowKv | None = None) -> Server:
    return Server(make(1000, windowed=windowed, state_rows=state_rows, batch_max_tokens=CHUNK, chunk_size=CHUNK), depth)


def prompt(length: int, first: int = 1000) -> list[int]:
    return list(range(first, first + length))


def states_of(server: Server) -> StatePool:
    pool = server.scheduler.only_group.pool.groups[-1]
    assert isinstance(pool, StatePool)
    return pool


def test_the_same_prompt_continues_before_its_last_token() -> None:
    server = server_of(state_rows=20)
    server.run([make_req(0, prompt(100), 1)])

    server.run([same := make_req(1, prompt(100), 5), longer := make_req(2, [*prompt(100), 1, 2], 5)])

    assert (same.cached_len, longer.cached_len) == (99, 100)  # the request has ended at 100
    assert all(req.output_ids == truth(req.prompt_ids, req.seed, 5) for req in (same, longer))


def test_the_second_request_with_a_prefix_keeps_the_state_that_the_third_continues() -> None:
    server = server_of(state_rows=20)
    system = prompt(70)
    server.run([make_req(0, [*system, *prompt(50, 2000)], 1)])

    server.run([second := make_req(1, [*system, *prompt(50, 3000)], 1)])
    server.run([third := make_req(2, [*system, *prompt(50, 4000)], 1)])

    assert (second.cached_len, third.cached_len) == (0, 70)


@pytest.mark.parametrize("depth", [1, 2])
def test_each_turn_of_a_chat_continues_the_prompt_before_however_its_answer_began(depth: int) -> None:
    """Two of the four tokens that began it are repeated: they are in the cache, but the state is before them."""
    server = server_of(state_rows=20, depth=depth)
    history, cached_lens = prompt(100), []
    for turn in range(1, 5):
        ids = [*history, 7, 8, 9, 10]
        req = make_req(turn, ids, 30)
        req.generation_prompt_len = 4
        server.run([req])
        assert req.output_ids == truth(ids, req.seed, 30)
        cached_lens.append(req.cached_len)
        history += [7, 8, *prompt(60, 2000 * turn)]

    assert cached_lens == [0, 100, 162, 224]


@pytest.mark.parametrize("depth", [1, 2])
def test_requests_that_come_at_once_compute_what_they_have_in_common_once(depth: int) -> None:
    server = server_of(state_rows=40, depth=depth)
    system = prompt(150)
    reqs = [make_req(i, [*system, *prompt(20, 2000 * i)], 1) for i in range(8)]

    server.run(reqs)

    assert sorted(req.cached_len for req in reqs) == [0] + [150] * 7
    assert server.worker.computed == 150 + 8 * 20


def test_a_long_prompt_keeps_a_state_every_so_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_pool, "INTERVAL", 100)
    server = server_of(state_rows=20)
    server.run([make_req(0, prompt(350), 1)])

    for number, length in enumerate([340, 240, 99], start=1):
        server.run([req := make_req(number, [*prompt(length), 1, 2], 1)])
        assert req.cached_len == length // 100 * 100


def test_a_short_prompt_takes_one_step() -> None:
    server = server_of(state_rows=20)

    server.run([make_req(0, prompt(20), 1)])

    assert sum(map(bool, server.steps)) == 1


@pytest.mark.parametrize("depth", [1, 2])
def test_the_state_before_the_last_token_of_a_prompt_takes_no_step(depth: int) -> None:
    server = server_of(state_rows=20, depth=depth)

    server.run([make_req(0, prompt(100), 1)])

    assert sum(map(bool, server.steps)) == 4  # chunks of 32 tokens
    assert server.scheduler.only_group.pool.cached_len(make_req(1, prompt(100), 1)) == 99


def test_a_prompt_whose_snapshot_has_no_row_is_computed_all_the_same() -> None:
    server = server_of(state_rows=2)

    server.run([req := make_req(0, prompt(40), 5), other := make_req(1, prompt(40, 2000), 5)])

    assert [one.output_ids for one in (req, other)] == [truth(one.prompt_ids, one.seed, 5) for one in (req, other)]
    server.assert_idle()


def test_kept_states_leave_room_for_all_running_requests() -> None:
    """As many requests run at once as there are rows, also if each would keep the row that it writes next to."""
    server = server_of(state_rows=6)
    server.run([make_req(i, prompt(40, 1000 * i), 1) for i in range(20)])
    assert states_of(server).num_kept == 6

    server.run([make_req(100 + i, prompt(40, 50_000 + 1000 * i), 30) for i in range(6)])

    assert max(map(len, server.steps)) == 6
    assert server.scheduler.num_preemptions == 0
    assert states_of(server).num_evicted >= 6
    server.assert_idle()


def test_the_state_that_was_used_last_is_evicted_last() -> None:
    server = server_of(state_rows=4)
    first, second = prompt(40), prompt(40, 2000)
    server.run([make_req(0, first, 1)])
    server.run([make_req(1, second, 1)])
    server.run([make_req(2, first, 1)])

    server.run([make_req(3, prompt(40, 3000), 1)])  # its rows were those of the second

    pool = server.scheduler.only_group.pool
    assert pool.cached_len(make_req(4, first, 1)) == 39
    assert pool.cached_len(make_req(5, second, 1)) == 0


def test_the_next_turn_of_a_chat_continues_the_state_of_the_last_answer() -> None:
    server = server_of(state_rows=20)
    first = make_req(0, prompt(50), 20)
    first.eos_ids = ()
    server.run([first])

    server.run([second := make_req(1, [*first.token_ids[:-1], 5000, 5001], 5)])

    assert second.cached_len == 50 + 19  # the last output is never computed


def test_a_prefix_whose_states_were_evicted_keeps_its_kv_and_is_computed_again() -> None:
    server = server_of(state_rows=2)
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
    server.run([make_req(0, prompt(64), 1)])
    server.run([make_req(1, prompt(100), 1)])
    pool = server.scheduler.only_group.pool
    window, states = pool.groups
    tokens = pool._cache.find_slots(np.array(prompt(100), dtype=np.int32))
    states.remove_cached(tokens[99:])
    assert [group.usable_len(tokens) for group in pool.groups] == [100, 99]

    window.remove_cached(tokens[92:93])

    assert window.usable_len(tokens[:99]) == 92
    assert pool.cached_len(make_req(1, [*prompt(100), 1])) == 64
