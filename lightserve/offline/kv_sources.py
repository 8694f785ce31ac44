"""Where the KV of an LLM's prompts comes from besides its steps: the tiers of host memory, disk and Redis."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

from lightserve.messages.step import Step
from lightserve.offline.kv_calls import KvCalls, Mailbox
from lightserve.offline.ranks import Ranks
from lightserve.router.kv.source import KvSource
from lightserve.router.scheduler import Scheduler, next_deadline_s
from lightserve.worker.rpc import GetResult


class LaunchedStep(NamedTuple):
    launched_s: float
    prompt_tokens: int  # in chunks of prompts
    result: GetResult


class KvSources:
    """Those of all attention groups. Without KV tiers there are none."""

    def __init__(self, scheduler: Scheduler, ranks: Ranks) -> None:
        self._mailbox = Mailbox()
        self._groups = scheduler.groups
        has_stores = ranks.engine.cpu_kv is not None and bool(ranks.engine.cpu_kv.storage_tiers)
        self._calls = [
            KvCalls(ranks.send_to_group(number), self._mailbox, has_stores) for number in range(len(self._groups))
        ]
        self._last_end_s = 0.0  # of a step
        self.connect()

    def __bool__(self) -> bool:
        return any(group.sources for group in self._groups)

    @property
    def _sources(self) -> Iterable[KvSource]:
        return (source for group in self._groups for source in group.sources)

    def connect(self) -> None:
        for group, calls in zip(self._groups, self._calls, strict=True):
            for source in group.sources:
                source.connect(calls, lambda: None)  # a step is planned after every reply

    def on_launched(self, step: Step) -> None:
        for group, calls, of_group in zip(self._groups, self._calls, step.groups or [step], strict=True):
            for source in group.sources:
                source.on_sent(of_group, calls)

    def on_completed(self, step: LaunchedStep) -> None:
        now = time.monotonic()
        seconds = now - max(step.launched_s, self._last_end_s)
        self._last_end_s = now
        for source in self._sources:
            source.observe_step(step.prompt_tokens, seconds)

    def deliver(self) -> None:
        """Let what has come be used."""
        self._mailbox.deliver()

    def wait(self) -> bool:
        """For KV that requests wait for, as long as they do, or for what is being written. False: for nothing."""
        deadline_s = next_deadline_s(self._groups)
        if deadline_s is None and not self._mailbox.num_open:
            return False
        self._mailbox.deliver(None if deadline_s is None else max(deadline_s - time.monotonic(), 0.0))
        return True

    def settle(self, in_flight: Iterable[LaunchedStep]) -> None:
        """Wait until nobody writes KV or host memory any more, these steps included."""
        for step in in_flight:
            with suppress(Exception):  # a step that failed has ended too
                step.result()
        while self._mailbox.num_open:
            self._mailbox.deliver(None)
