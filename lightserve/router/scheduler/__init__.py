"""Plans steps: which requests run next, how many tokens of each, and in which KV slots. No torch, no processes.

    admission.py      which waiting requests start: seats, prompt tokens of the step, KV memory
    waits.py          which ones wait for an event first: a slot for an adapter, a prefix
    chunking.py       how many prompt tokens a step computes beside decodes, and how they are divided among prompts
    background.py     how many tokens of background requests a step has, and when it is sent
    planner.py        which tokens the next step computes, in which KV slots
    preemption.py     which requests make room when KV memory runs out
    lora_slots.py     which adapters are on the device
    decodes.py        how many drafts a step computes beside decodes
    batch.py          the requests that run
    group.py          composes them into the steps of an attention group
    placement.py      which group gets a request, if data-parallel attention has several
    scheduler.py      plans all groups, and gives their requests what steps return

Every step computes one token of every decoding request, and prompt chunks up to a budget. A request is admitted while
the peak of what all requests will hold fits the pool. If that estimate was too low, the newest request is preempted
(paused): its KV stays in the prefix cache while there is room, and it continues later with the same text. Several steps
may be planned before the tokens of the first are back: workers run steps in order, so a step may use memory that an
earlier step in flight still reads.
"""

from lightserve.router.scheduler.group import GroupScheduler, background_pause_s, next_deadline_s
from lightserve.router.scheduler.limits import SchedulerLimits, make_limits
from lightserve.router.scheduler.lora_slots import LoraSlots
from lightserve.router.scheduler.scheduler import ReqTokens, Scheduler

__all__ = [
    "GroupScheduler",
    "LoraSlots",
    "ReqTokens",
    "Scheduler",
    "SchedulerLimits",
    "background_pause_s",
    "make_limits",
    "next_deadline_s",
]
