"""Steps that compute drafts: the planned length of a request is a range until the accepted drafts are known."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest

from lightserve.messages.control import SlidingWindowKv
from lightserve.messages.int_arrays import BLOCK, int32s
from lightserve.messages.params import FinishReason, GenerationParams, GrammarSpec, ThinkingLimit
from lightserve.messages.step import NO_DRAFTS, DraftColumns, Step, Token, TokenColumns, TokenOut
from lightserve.router.req import Req
from lightserve.router.scheduler import Scheduler
from lightserve.router.scheduler.decodes import FEW_DECODES
from test.router.processing import StepOuts, drafts_result, process_tokens
from test.router.scheduler.test_scheduler import EOS, Server, drafts_of, endless, make, make_req, truth

NUM_DRAFTS = 3
OTHER = 50


def drafting(num_slots: int = 1000, **limits: Any) -> Scheduler:
    return make(num_slots, num_drafts=NUM_DRAFTS, **limits)


def next_step(scheduler: Scheduler) -> Step:
    step = scheduler.next_step()
    assert step is not None
    return step


def complete(scheduler: Scheduler, *counts: int) -> None:
    """Requests 0, 1 ... get so many tokens: all but one of each are drafts."""
    process_tokens(scheduler, outs_of([OTHER] * count for count in counts))


def outs_of(token_ids: Iterable[list[int]], forced: int = 0) -> StepOuts:
    """Tokens of requests 0, 1 ... The last ``forced`` of each are forced, and the one before is sampled."""
    by_req = dict(enumerate(token_ids))
    outs = StepOuts([TokenOut(req_id, Token(token_id)) for req_id, ids in by_req.items() for token_id in ids])
    outs.drafts = drafts_result({req_id: len(ids) - 1 - forced for req_id, ids in by_req.items()})
    return outs


def begin(scheduler: Scheduler, *max_new_tokens: int) -> None:
    """Requests 0, 1 ... of three tokens have one output token."""
    for req_id, most in enumerate(max_new_tokens):
        scheduler.add(make_req(req_id, [1, 2, 30 + req_id], most))
    next_step(scheduler)
    complete(scheduler, *[1] * len(max_new_tokens))


@pytest.mark.parametrize("accepted", range(NUM_DRAFTS + 1))
def test_the_slots_of_rejected_drafts_are_those_of_the_next_tokens(accepted: int) -> None:
    scheduler = drafting()
    begin(scheduler, 500)
    (req,) = scheduler.only_group.batch

    steps = [next_step(scheduler), next_step(scheduler)]
    in_flight = req.planned_len, req.planned_drafts, len(req.slots)
    complete(scheduler, 1 + accepted)
    steps.append(next_step(scheduler))

    assert [drafts_of(step) for step in steps] == [{0: NUM_DRAFTS}] * 3
    assert in_flight == (5, 2 * NUM_DRAFTS, 3 + 2 * (1 + NUM_DRAFTS))
    assert [step.slot_counts.tolist() for step in steps] == [[4], [4], [1 + accepted]]
    assert (req.planned_len, req.planned_drafts) == (6 + accepted, 2 * NUM_DRAFTS)
    assert req.in_flight == 2


@pytest.mark.parametrize("limits", [{}, {"has_draft_head": True}, {"num_stages": 2}], ids=str)
def test_the_step_before_drafts_says_that_they_follow(limits: dict[str, Any]) -> None:
    scheduler = drafting(weight_read_tokens=20.0, **limits)
    req_ids = [0] if "num_stages" in limits else [0, 1]  # several would be in different steps
    begin(scheduler, *[500] * len(req_ids))

    steps = []
    for _ in range(60):
        steps.append(next_step(scheduler))
        process_tokens(scheduler, [TokenOut(req_id, Token(OTHER)) for req_id in req_ids])
        drafts = [(req_id, count, 0) for req_id, count in drafts_of(steps[-1]).items() if count]
        scheduler.process_drafts(
            DraftColumns(*map(int32s, zip(*drafts, strict=True))) if drafts else NO_DRAFTS,
            TokenColumns.of([(req_id, [OTHER] * steps[-1].next_drafts) for req_id in req_ids if steps[-1].next_drafts]),
        )

    has_drafts = [any(drafts_of(step).values()) for step in steps]
    assert 2 < sum(has_drafts) < 20  # none is accepted
    assert all(step.next_drafts for step, follow in zip(steps, has_drafts[1:], strict=False) if follow)
    assert sum(step.next_drafts > 0 for step in steps) < 30


def test_a_request_gets_no_slots_beyond_its_longest_output() -> None:
    scheduler = drafting()
    begin(scheduler, 7)
    (req,) = scheduler.only_group.batch

    first, second = next_step(scheduler), next_step(scheduler)
    has_third = scheduler.next_step() is not None
    complete(scheduler, 1)

    assert (drafts_of(first), drafts_of(second)) == ({0: NUM_DRAFTS}, {0: 1})
    assert not has_third  # the drafts in flight may be the rest of the output
    assert len(req.slots) == 3 + 7 - 1
    assert drafts_of(next_step(scheduler)) == {0: NUM_DRAFTS - 1}
    assert len(req.slots) == 3 + 7 - 1


def test_an_accepted_end_token_ends_the_request_and_drops_the_tokens_after_it() -> None:
    scheduler = drafting()
    begin(scheduler, 50)
    (req,) = scheduler.only_group.batch
    next_step(scheduler)

    process_tokens(scheduler, outs_of([[OTHER, EOS, OTHER, OTHER]]))

    assert (req.output_ids, req.finish_reason) == ([OTHER, OTHER, EOS], FinishReason.STOP)
    assert scheduler.only_group.pool.used == 0
    assert scheduler.only_group.pool.cached_tokens == 3 + 3 - 1


def test_a_preempted_request_waits_for_all_its_steps_in_flight() -> None:
    scheduler = drafting()
    begin(scheduler, 500)
    (req,) = scheduler.only_group.batch
    next_step(scheduler)
    next_step(scheduler)

    scheduler.only_group.preemption.preempt_newest()
    complete(scheduler, 3)
    after_first = req.in_flight, req.output_len, scheduler.num_running
    next_step(scheduler)  # the workers free it
    is_back = scheduler.num_running
    complete(scheduler, 4)

    assert after_first == (1, 4, 0)
    assert not is_back
    assert (req.in_flight, req.output_len) == (0, 8)
    assert [len(new.token_ids) for new in next_step(scheduler).new] == [3 + 8]


def test_accepted_drafts_are_not_counted_as_forced_tokens() -> None:
    scheduler = drafting()
    begin(scheduler, 500)
    next_step(scheduler)
    scheduler.complete_step()
    scheduler.process_drafts(drafts_result({0: 2}))

    assert scheduler.process_plain(TokenColumns.of([(0, [OTHER] * 3)])).all()
    next_step(scheduler)
    complete(scheduler, 4)

    assert scheduler.only_group.num_forced == 0


@pytest.mark.parametrize(
    ("fields", "may_draft"),
    [
        ({}, True),
        ({"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "typical_p": 0.9}, True),
        ({"logit_bias": {3: 1.0}, "allowed_token_ids": (3, 4), "bad_words_ids": ((5,),)}, True),
        ({"ignore_eos": True, "stop_token_ids": (5,)}, True),
        ({"grammar": GrammarSpec("regex", "a")}, True),
        ({"speculative": False}, False),
        ({"thinking": ThinkingLimit(3, "<", ">", (5,), True)}, True),
        ({"presence_penalty": 1.0}, True),
        ({"bad_words_ids": ((5, 6),)}, True),
        ({"no_repeat_ngram_size": 2}, True),
        ({"first_allowed_token_ids": (5,)}, True),
        ({"exponential_decay_length_penalty": (3, 1.1)}, True),
        ({"watermark": True}, True),
        ({"min_new_tokens": 3}, True),
        ({"logprobs": 0}, True),
        ({"prompt_logprobs": 0}, True),
    ],
)
def test_a_request_has_drafts_unless_it_wants_none(fields: dict[str, Any], may_draft: bool) -> None:
    scheduler = drafting()
    params = GenerationParams.of(max_new_tokens=50, **fields)
    scheduler.add(Req(0, int32s([1, 2, 3]), params, 50, (EOS,)))
    next_step(scheduler)
    complete(scheduler, 1)

    assert drafts_of(next_step(scheduler)) == {0: NUM_DRAFTS if may_draft else 0}


@pytest.mark.parametrize(("others", "has_drafts"), [(FEW_DECODES - 1, True), (FEW_DECODES, False)])
def test_a_step_waits_for_the_tokens_before_it_only_beside_few_requests(others: int, has_drafts: bool) -> None:
    scheduler = drafting(weight_read_tokens=256.0)
    params = GenerationParams.of(max_new_tokens=50, presence_penalty=1.0)
    scheduler.add(Req(0, int32s([1, 2, 3]), params, 50, (EOS,)))
    for req_id in range(1, others + 1):
        scheduler.add(make_req(req_id, [1, 2, 30 + req_id], 50))
    next_step(scheduler)
    complete(scheduler, *[1] * (others + 1))

    drafts = drafts_of(next_step(scheduler))

    assert (drafts.pop(0) > 0) is has_drafts
    assert all(drafts.values())


def test_the_steps_of_a_pipeline_bring_the_drafts_that_its_last_stage_has_proposed() -> None:
    scheduler = drafting(num_stages=2)
    begin(scheduler, 50, 50)
    steps = []

    for proposals, counts in (([(0, [7, 8, 9])], (2, 1)), ([(1, [4])], (1, 2)), ([], (1, 1))):
        scheduler.process_drafts(NO_DRAFTS, TokenColumns.of([*proposals, (77, [3])]))  # 77 has left
        steps.append([next_step(scheduler), next_step(scheduler)])
        for step, count in zip(steps[-1], counts, strict=True):
            (req_id,) = step.decode_ids.tolist()
            outs = StepOuts([TokenOut(req_id, Token(OTHER))] * count)
            outs.drafts = drafts_result({req_id: count - 1} if step.num_drafts else {})
            process_tokens(scheduler, outs)

    assert [[step.token_ids.tolist() for step in both] for both in steps] == [
        [[OTHER, 7, 8, 9], [OTHER]],
        [[OTHER], [OTHER, 4]],
        [[OTHER], [OTHER]],
    ]
    assert [[step.ready_lens.tolist() for step in both] for both in steps] == [[[3], [3]], [[5], [4]], [[6], [6]]]
    assert all(step.next_drafts == NUM_DRAFTS for both in steps for step in both)


def test_a_pipeline_drafts_nothing_for_a_grammar() -> None:
    """Only its last stage knows what the grammar allows."""
    scheduler = drafting(num_stages=2)
    params = GenerationParams.of(max_new_tokens=50, grammar=GrammarSpec("regex", "[ab]*"))
    scheduler.add(Req(0, int32s([1, 2, 3]), params, 50, (EOS,)))
    next_step(scheduler)
    complete(scheduler, 1)
    scheduler.process_drafts(NO_DRAFTS, TokenColumns.of([(0, [7, 8, 9])]))

    assert not next_step(scheduler).num_drafts


def test_drafts_take_no_memory_from_a_request_that_fills_the_pool() -> None:
    """No draft is planned for which there is no room, and the slots of rejected ones are used up."""
    server = Server(drafting(40), depth=2)
    reqs = [make_req(0, list(range(100, 110)), 31), make_req(1, list(range(200, 210)), 9)]
    for req in reqs:
        req.eos_ids = ()

    server.run(reqs)

    assert [len(req.outputs) for req in reqs] == [31, 9]
    server.assert_idle()


def test_a_step_of_many_decodes_has_fewer_drafts_than_its_limit_of_tokens() -> None:
    scheduler = drafting(batch_max_tokens=15)
    begin(scheduler, 50, 50, 50, 50)

    step = next_step(scheduler)

    assert step.num_tokens == 12
    assert drafts_of(step) == dict.fromkeys(range(4), 2)


def test_slots_behind_a_window_are_let_go_as_fast_as_drafts_are_accepted() -> None:
    windowed = SlidingWindowKv(size=100, window=8, kept_tokens=10)
    scheduler = drafting(windowed=windowed)
    scheduler.add(endless(0))
    next_step(scheduler)
    complete(scheduler, 1)

    for _ in range(BLOCK):
        next_step(scheduler)
        complete(scheduler, 1 + NUM_DRAFTS)
    next_step(scheduler)

    assert scheduler.only_group.pool.groups[0].used <= windowed.kept_tokens + 2 * (1 + NUM_DRAFTS)


@pytest.mark.parametrize("seed", range(12))
def test_failed_steps_with_drafts_leave_no_wrong_kv_in_the_cache(seed: int) -> None:
    """Requests leave while steps that wrote to reused slots are in flight, and then these steps fail."""
    rng = random.Random(seed)
    windowed = SlidingWindowKv(size=rng.choice([150, 300]), window=20, kept_tokens=24) if seed % 2 else None
    state_rows = rng.choice([4, 12]) if seed % 3 == 0 else 0
    server = Server(drafting(300, windowed=windowed, state_rows=state_rows, max_running=4), depth=2)
    scheduler = server.scheduler
    for number in range(60):
        shared = list(range(100, 100 + rng.choice([5, 30])))
        req = make_req(number, shared, rng.randrange(1, 40), seed=0)  # the same text again and again
        scheduler.add(req)
        for _ in range(rng.randrange(12)):
            server.step()
        if rng.random() < 0.5 and scheduler.num_running:
            scheduler.only_group.preemption.preempt_newest()
        if rng.random() < 0.3:
            scheduler.abort(number)
        if rng.random() < 0.4:
            server.fail_steps()
        elif req.finish_reason is not None:
            assert req.output_ids == truth(shared, 0, req.max_new_tokens)
    while server.step():
        pass

    server.assert_idle()


def test_requests_that_have_slots_of_rejected_drafts_are_not_preempted_for_their_next_token() -> None:
    scheduler = drafting()
    begin(scheduler, 50, 50, 50)
    next_step(scheduler)
    complete(scheduler, 1, 1, 1)
    pool = scheduler.only_group.pool
    pool.alloc(pool.available)  # as other requests do

    step = next_step(scheduler)

    assert scheduler.num_preemptions == 0
    assert len(step.decode_ids) == 3
    assert not len(step.decode_slots)


@pytest.mark.parametrize(("first_accepts", "is_admitted"), [(0, False), (NUM_DRAFTS, True)])
def test_a_request_is_admitted_beside_one_that_ends_soon_because_its_drafts_are_accepted(
    first_accepts: int, is_admitted: bool
) -> None:
    """Both together exceed the pool if they grow equally fast. If the first does so faster, it ends before."""
    scheduler = drafting(110)
    begin(scheduler, 60)
    (first,) = scheduler.only_group.batch
    first.columns.acceptance[first.row] = 0.999 if first_accepts else 0.0
    second = make_req(1, [1, 2, 50], 60)
    second.columns.acceptance[0] = 0.0
    scheduler.add(second)

    next_step(scheduler)

    assert (scheduler.num_running == 2) is is_admitted


def test_drafts_are_no_tokens_of_prompts() -> None:
    scheduler = drafting()
    begin(scheduler, 50, 50)
    scheduler.add(make_req(2, [1, 2, 32, 33], 50))

    step = next_step(scheduler)

    assert (step.num_decodes, step.num_drafts, step.num_tokens) == (2, 2 * NUM_DRAFTS, 2 * (1 + NUM_DRAFTS) + 2)
    assert step.num_prompt_tokens == 2  # two are cached


def test_forced_tokens_behind_drafts_are_computed_when_no_drafts_are_in_flight() -> None:
    """The request gives back the slots of rejected drafts: the chunk has new ones for all its tokens."""
    scheduler = drafting()
    begin(scheduler, 500)
    (req,) = scheduler.only_group.batch
    next_step(scheduler)
    next_step(scheduler)

    process_tokens(scheduler, outs_of([[OTHER] * 5], forced=3))  # one draft of three was accepted
    waiting = scheduler.next_step(), req.planned_len, req.unplanned, req.planned_drafts
    scheduler.complete_step()  # the second step has computed the sampled token, and nothing else that counts
    step = next_step(scheduler)

    assert waiting == (None, 4 + 1 + 1, 3, NUM_DRAFTS)
    assert scheduler.only_group.num_forced == 3
    assert not len(step.decode_ids)
    assert [(row.req_id, len(row.slots)) for row in step.chunks] == [(0, 3)]
    assert (req.planned_len, req.spare_slots, len(req.slots)) == (9, 0, 9)
    complete(scheduler, 1)
    assert drafts_of(next_step(scheduler)) == {0: NUM_DRAFTS}


def test_no_schedule_accepts_drafts_of_a_request_with_a_grammar() -> None:
    scheduler = drafting(has_synthetic_drafts=True)
    for req_id, grammar in enumerate((GrammarSpec("regex", "a"), None)):
        params = GenerationParams.of(max_new_tokens=50, grammar=grammar)
        scheduler.add(Req(req_id, int32s([1, 2, 30 + req_id]), params, 50, (EOS,)))
    next_step(scheduler)
    complete(scheduler, 1, 1)

    assert drafts_of(next_step(scheduler)) == {0: 0, 1: NUM_DRAFTS}
