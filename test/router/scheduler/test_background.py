"""Background requests, such as lines of batches, run below every request of a client."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from typing import Any

import pytest

from lightserve.messages.params import BACKGROUND_PRIORITY
from lightserve.messages.step import Step
from lightserve.router.policy import POLICIES, make_policy
from lightserve.router.req import Req
from lightserve.router.req_queue import ReqQueue
from lightserve.router.scheduler import Scheduler, background_pause_s
from lightserve.router.scheduler.background import (
    CLIENT_S,
    FIRST_TOKENS,
    MIN_SHARE_OF_TIME,
    SHARE_OF_TTFT,
    BackgroundLimit,
)
from test.router.scheduler.test_scheduler import Server, counts_of, make, make_req

STEP_S, TOKEN_S = 0.010, 0.001  # what a step of the virtual clock takes, and each of its tokens
CHAT_TOKENS = 200


def background(req_id: int, prompt: Sequence[int] = (1, 2, 3), max_new_tokens: int = 500) -> Req:
    req = make_req(req_id, [*prompt], max_new_tokens, priority=BACKGROUND_PRIORITY)
    req.eos_ids = ()
    return req


class RecordingServer(Server):
    counts: dict[int, int] = {}  # noqa: RUF012  of the last step: tokens by request

    def launch(self, step: Step) -> None:
        self.counts = counts_of(step)
        super().launch(step)

    def next_counts(self) -> dict[int, int]:
        self.step()
        return self.counts


def beside_background(count: int, num_slots: int = 5000, **limits: Any) -> tuple[Scheduler, RecordingServer]:
    """A scheduler with so many background requests that decode."""
    scheduler = make(num_slots, batch_max_tokens=200, chunk_size=64, **limits)
    server = RecordingServer(scheduler)
    for number in range(count):
        scheduler.add(background(number, [number + 50, number]))
    for _ in range(3):
        server.step()
    assert scheduler.num_running == count
    return scheduler, server


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_of_a_client_is_before_background_requests(policy: str) -> None:
    queue = ReqQueue(make_policy(policy))
    begun, preempted = background(0), make_req(1, [1])
    for req in (background(2), make_req(3, [1])):
        queue.add(req)
    queue.add_preempted(begun)
    queue.add_preempted(preempted)

    num_of_clients, order = queue.num_of_clients, []
    for req in queue.candidates(lambda req: 100 if req.is_background else 0):
        queue.admit(req)
        order.append(req.req_id)

    assert order == [1, 3, 0, 2]
    assert num_of_clients == 2


def test_steps_leave_background_requests_out_while_a_clients_prompt_is_computed() -> None:
    scheduler, server = beside_background(8)
    scheduler.add(make_req(100, list(range(300))))

    steps = [server.next_counts() for _ in range(3)]

    assert steps[:2] == [{100: 200}, {100: 100}]
    assert 100 in steps[2]
    assert len(steps[2]) > 1  # its prompt is computed: the others go on beside it


def test_a_clients_prompt_does_not_wait_for_prompts_of_background_requests() -> None:
    scheduler, server = beside_background(2)
    for number in range(10, 18):
        scheduler.add(background(number, list(range(1000 * number, 1000 * number + 300))))
    server.step()
    scheduler.add(make_req(100, [5] * 30))

    step = server.next_counts()

    assert step == {100: 30}


def test_a_client_takes_the_seat_of_a_background_request() -> None:
    scheduler, server = beside_background(4, max_running=4)
    scheduler.add(make_req(100, [5] * 30, max_new_tokens=2))

    step = server.next_counts()

    assert step == {100: 30}
    assert scheduler.num_preemptions == 1
    while 100 in server.next_counts():
        pass
    server.step()
    assert sorted(req.req_id for req in scheduler.only_group.batch) == [0, 1, 2, 3]


def test_a_client_takes_the_memory_of_background_requests() -> None:
    scheduler, server = beside_background(3, num_slots=1560)
    scheduler.add(make_req(100, [5] * 800, max_new_tokens=200))

    step = server.next_counts()

    assert list(step) == [100]
    assert scheduler.num_preemptions > 0


def test_a_background_request_is_preempted_before_a_client_of_any_age_under_fifo() -> None:
    scheduler, server = beside_background(1)
    client = make_req(1, [5] * 30, max_new_tokens=100)
    client.eos_ids = ()
    scheduler.add(client)
    server.step()

    scheduler.only_group.preemption.preempt_newest()

    assert [req.req_id for req in scheduler.only_group.batch] == [1]


def test_background_requests_do_not_take_the_memory_of_a_preempted_client_in_flight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler = make(100, batch_max_tokens=200, chunk_size=64)
    client = make_req(1, [5] * 40, max_new_tokens=40)
    client.eos_ids = ()
    scheduler.add(client)
    assert scheduler.next_step() is not None
    preemption = scheduler.only_group.preemption
    preemption.preempt_newest()  # before the tokens of the step are seen
    monkeypatch.setattr(preemption, "preempt_background", lambda: pytest.fail("a line was admitted in its place"))
    for number in range(10, 14):
        scheduler.add(background(number, [number] * 10, max_new_tokens=40))

    scheduler.next_step()

    assert not scheduler.num_running


def test_background_requests_end_beside_clients() -> None:
    scheduler, server = beside_background(4)
    for number in range(10):
        scheduler.add(make_req(100 + number, [number] * 50, max_new_tokens=5))
        server.step()

    while server.step():
        pass

    assert not scheduler.num_running


def test_steps_have_any_number_of_background_tokens_a_minute_after_the_last_client() -> None:
    limit = BackgroundLimit(max_tokens=512)
    assert limit.tokens(now_s=0.0) is None

    limit.on_client(now_s=5.0)

    assert limit.tokens(now_s=6.0) == FIRST_TOKENS
    assert limit.tokens(now_s=5.1 + CLIENT_S) is None


def test_the_limit_follows_the_time_to_the_first_token() -> None:
    limit = BackgroundLimit(max_tokens=512)
    limit.on_client(0.0)
    limit.on_first_token(1.0)

    for _ in range(200):
        tokens = limit.tokens(1.0) or 0
        limit.on_step(tokens, STEP_S + tokens * TOKEN_S)

    assert STEP_S + (limit.tokens(1.0) or 0) * TOKEN_S == pytest.approx(SHARE_OF_TTFT, rel=0.15)


def test_two_results_that_are_seen_at_once_do_not_limit_later_steps() -> None:
    limit = BackgroundLimit(max_tokens=512)
    limit.on_client(0.0)
    limit.on_first_token(0.02)

    for number in range(2000):
        tokens = limit.tokens(1.0) or 0
        limit.on_step(tokens, 1e-4 if number == 100 else STEP_S)

    assert limit.tokens(1.0) == 512


def test_steps_that_cost_nothing_more_are_not_limited() -> None:
    """As on a GPU, where a step reads all weights whatever it computes."""
    limit = BackgroundLimit(max_tokens=512)
    limit.on_client(0.0)
    limit.on_first_token(0.02)

    for _ in range(200):
        tokens = limit.tokens(1.0) or 0
        limit.on_step(tokens, STEP_S + tokens * 1e-6)

    assert limit.tokens(1.0) == 512


def test_background_steps_that_are_too_long_run_for_a_part_of_the_time() -> None:
    limit = BackgroundLimit(max_tokens=512)
    limit.on_first_token(0.1)

    limit.on_step(4, 0.01)
    assert limit.pause_s == 0
    limit.on_step(4, 0.04)
    assert limit.pause_s == pytest.approx(0.12)
    limit.on_step(4, 0.4)
    assert 0.4 / (0.4 + limit.pause_s) == pytest.approx(MIN_SHARE_OF_TIME)
    limit.on_step(0, 0.4)
    assert limit.pause_s == 0


def test_there_are_pauses_only_while_clients_may_come() -> None:
    scheduler, server = beside_background(2)
    assert background_pause_s(scheduler.groups, server.now_s) is None
    scheduler.add(make_req(100, [5] * 30, max_new_tokens=2))
    assert background_pause_s(scheduler.groups, server.now_s) is None
    while 100 in server.next_counts() or scheduler.groups[0].has_client:
        pass

    assert background_pause_s(scheduler.groups, server.now_s) == 0
    assert background_pause_s(scheduler.groups, server.now_s + CLIENT_S + 1) is None
    blocked = make_req(101, [5] * 30, max_new_tokens=2)
    scheduler.defer(blocked)
    assert background_pause_s(scheduler.groups, server.now_s) is None


class TimedServer(RecordingServer):
    """On a virtual clock. Lines of a batch follow each other."""

    def __init__(
        self, costs: tuple[float, float] = (STEP_S, TOKEN_S), prompt_s: float = 0.0, lead_s: float = 0.0
    ) -> None:
        """``costs``: seconds of a step, and of each of its tokens. Besides ``prompt_s`` of a step with prompts, and
        ``lead_s`` of one that is sent when no other is in flight: with background requests."""
        super().__init__(make(60_000, batch_max_tokens=512, chunk_size=128, max_running=64))
        self.num_background = 0  # tokens
        self.num_requests = 60  # chats and lines of the batch
        self._costs, self._prompt_s, self._lead_s = costs, prompt_s, lead_s
        self._ids = iter(range(1_000_000))
        self._background_ids = set[int]()
        self._last_end_s = 0.0

    def advance(self) -> None:
        """A step. Without one, time passes too."""
        while self.scheduler.num_running + self.scheduler.num_waiting < self.num_requests:
            number = next(self._ids)
            self._background_ids.add(number)
            self.scheduler.add(background(number, [number * 200 + i for i in range(100)], 50))
        pause_s = background_pause_s(self.scheduler.groups, self.now_s)
        if pause_s is not None and self.now_s < self._last_end_s + pause_s:
            self.now_s += 0.0005
            return
        self.step()
        self.num_background += sum(self.counts.values())
        self.now_s += self.step_s
        self._last_end_s = self.now_s

    @property
    def step_s(self) -> float:
        step_s, token_s = self._costs
        has_prompts = any(count > 1 for count in self.counts.values())
        has_background = not self._background_ids.isdisjoint(self.counts)
        steps_s = step_s + token_s * sum(self.counts.values())
        return steps_s + self._prompt_s * has_prompts + self._lead_s * has_background

    def ttft_s(self, after_s: float) -> float:
        """Of a chat that comes so much later."""
        arrives_s = self.now_s + after_s
        while self.now_s < arrives_s:
            self.advance()
        number = next(self._ids)
        req = make_req(number, [number * 200 + i for i in range(CHAT_TOKENS)], 5)
        self.scheduler.add(req)
        while not req.output_len:
            self.advance()
        self.scheduler.only_group.observe_first_token(req, self.now_s - req.admitted_s)
        return self.now_s - arrives_s


# costs where a chat's prompt takes as long as six steps with few tokens, and as one and a half
CPU, GPU = (0.040, 0.001), (0.008, 2e-5)


@pytest.mark.parametrize("costs", [(STEP_S, TOKEN_S), CPU, GPU])
def test_chats_beside_a_batch_get_their_first_token_a_tenth_later_at_most(costs: tuple[float, float]) -> None:
    rng = random.Random(7)
    pauses_s = [rng.uniform(0.2, 0.6) for _ in range(80)]
    server = TimedServer(costs)

    ttfts_s = [server.ttft_s(pause_s) for pause_s in pauses_s]

    alone_s = costs[0] + CHAT_TOKENS * costs[1]
    assert statistics.median(ttfts_s) < 1.1 * alone_s
    assert statistics.mean(ttfts_s[20:]) < 1.1 * alone_s  # how long steps are is learned first
    assert server.num_background > 50 * len(pauses_s)  # the batch goes on


def test_a_batch_has_steps_with_many_tokens_where_those_of_prompts_take_a_third_longer() -> None:
    """An H200 with Llama-3-8B: 4.3 ms, 1.5 ms more with prompts. Without chats it would compute 10,000 tokens/s."""
    rng = random.Random(7)
    server = TimedServer((0.0043, 1.2e-5), prompt_s=0.0015, lead_s=0.002)
    server.num_requests = 0
    for _ in range(3):
        server.ttft_s(rng.uniform(0.2, 0.6))  # steps of chats alone: the next one is sent before they end
    server.num_requests, begin_s, tokens = 60, server.now_s, server.num_background

    for _ in range(30):
        server.ttft_s(rng.uniform(0.2, 0.6))

    assert (server.num_background - tokens) / (server.now_s - begin_s) > 2000
