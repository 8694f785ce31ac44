"""Steps that use every code path once, so that no request waits for a compilation or a first allocation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import msgspec

from lightserve.messages.int_arrays import int32s, int64s
from lightserve.messages.media import ImageRows
from lightserve.messages.params import SamplingParams
from lightserve.messages.step import NewReq, Step, StepRow

DRAFT_PROMPT = 7
IMAGE_TOKENS = 4
NUM_DECODES = 2
FIRST_POOL_TOKENS = 512  # the KV pool before its size is known: all warm-up requests fit
FIRST_STATE_ROWS = 4  # the same of recurrent states
SAMPLING = (
    SamplingParams(temperature=0.0),
    SamplingParams(
        top_k=10,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.1,
        watermark=True,
        logprobs=1,
        prompt_logprobs=1,
    ),
)


def warm_up_steps(prompts: Sequence[int], max_reqs: int, max_len: int, pool_len: int) -> Iterator[Step]:
    """``prompts``: lengths. For a worker without requests: all slots of its KV pool are free, before and after."""
    longest = min(max_len, pool_len // len(prompts)) - NUM_DECODES
    reqs = [
        NewReq(-1 - i, [0] * length, SAMPLING[i % 2], seed=0) for i, length in enumerate(prompts) if length <= longest
    ]
    reqs = reqs[:max_reqs]
    for req in reqs[:2]:
        yield from _generate([req])
    if reqs:
        yield from _generate(reqs)
        yield from _generate([_with_cached_prompt(reqs[0])])


def draft_steps(num_drafts: int, max_len: int, pool_len: int) -> Iterator[Step]:
    """Decodes with drafts, of a request whose text repeats itself. For a worker without requests."""
    prompt, count = [0] * DRAFT_PROMPT, 1 + num_drafts
    if not num_drafts or len(prompt) + 2 * count > min(max_len, pool_len):
        return
    req = NewReq(-1, int32s(prompt), SAMPLING[0], seed=0)
    yield Step([StepRow(req.req_id, int32s(range(len(prompt))))], [req], next_drafts=num_drafts)
    for begin in (len(prompt), len(prompt) + count):
        slots = int32s(range(begin, begin + count))
        yield Step(
            [],
            decode_ids=int64s([req.req_id]),
            decode_slots=slots,
            slot_counts=int32s([count]),
            draft_counts=int32s([num_drafts]),
            next_drafts=num_drafts,
            ready_lens=int32s([begin]),
        )
    yield Step([], free=[req.req_id])


def with_adapter(step: Step) -> Step:
    """A step whose requests use the adapter of slot 0, which is empty."""
    return msgspec.structs.replace(step, new=[msgspec.structs.replace(req, lora_slot=0) for req in step.new])


def with_image(step: Step) -> Step:
    """A step whose prompts begin with an image, of which the embeddings mean nothing."""
    counts = [min(len(req.token_ids), IMAGE_TOKENS) for req in step.new]
    new = [
        msgspec.structs.replace(req, images=[ImageRows(((0, count),), 0, 0, int32s(range(count)))])
        for req, count in zip(step.new, counts, strict=True)
    ]
    return msgspec.structs.replace(step, new=new)


def in_all_pools(step: Step, num_groups: int, has_states: bool) -> Step:
    """A step of a worker with so many KV groups that have pools of tokens, where its tokens have the same slots.

    If the worker ``has_states``, each request has a row of its own.
    """
    new = [
        msgspec.structs.replace(req, group_slots=(req.cached_slots,) * num_groups + _first_rows(req, has_states))
        for req in step.new
    ]
    slots = [slot for row in step.rows for slot in row.slots]
    rows = ([_state_row(row.req_id) for row in step.rows],) * has_states
    return msgspec.structs.replace(step, new=new, group_slots=(slots,) * num_groups + rows)


def _first_rows(req: NewReq, has_states: bool) -> tuple[list[int], ...]:
    return ([_state_row(req.req_id)] if len(req.cached_slots) else [],) * has_states


def _state_row(req_id: int) -> int:
    return -1 - req_id


def _generate(reqs: list[NewReq]) -> Iterator[Step]:
    """Prefill in one step, decode, and free the requests."""
    ids = [req.req_id for req in reqs]
    lengths = [len(req.token_ids) - len(req.cached_slots) for req in reqs]
    ends = list(accumulate(lengths, initial=max(len(req.cached_slots) for req in reqs)))[1:]
    yield Step([StepRow(i, list(range(end - n, end))) for i, n, end in zip(ids, lengths, ends, strict=True)], reqs)
    for number in range(NUM_DECODES):
        first = ends[-1] + number * len(ids)
        yield Step([StepRow(req_id, [first + i]) for i, req_id in enumerate(ids)])
    yield Step([], free=ids)


def _with_cached_prompt(req: NewReq) -> NewReq:
    """As if the prefix cache had all of its prompt but the last token."""
    return msgspec.structs.replace(req, cached_slots=list(range(len(req.token_ids) - 1)))
