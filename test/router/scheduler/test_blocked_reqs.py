"""Random histories of an engine: whoever could run is admitted in order, and nobody is lost.

The oracle looks at every waiting request after every admission, and knows from the events of the history why each may
wait.
"""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from lightserve.messages.block_hash import BLOCK_TOKENS
from lightserve.router import req_queue
from lightserve.router.kv.radix_cache import common_len
from lightserve.router.kv.remote_prefill import MIN_COMING_TOKENS, PendingTransfer
from lightserve.router.kv.tiers.load_or_recompute import PROBE_S
from lightserve.router.req import Req
from lightserve.router.req_queue import Place
from lightserve.router.scheduler import waits
from lightserve.router.scheduler.waits import MIN_PENDING_PREFIX_TOKENS
from test.router.scheduler.test_histories import History, few_seeds


class NoBudget:
    """Any number of requests may start in a step. Their prompts are still computed in chunks."""

    def budget(self, *args: object) -> int:
        return 10**9

    def reserved(self, budget: int) -> int:
        return 0


class CheckedHistory(History):
    """Checks after every admission that no request could run that was left waiting."""

    def __init__(self, kind: str, seed: int) -> None:
        super().__init__(kind, seed)
        self.queue = self.scheduler.only_group.queue
        self.batch = self.scheduler.only_group.batch
        self.admission = self.scheduler.only_group.admission
        self.admit = self.admission.admit
        self.admission.admit = self.checked_admit  # type: ignore[method-assign]
        self.admission._chunking = NoBudget()  # type: ignore[assignment]
        self.is_cache_aware = self.queue._policy.name == "cache_aware"  # it orders by what is cached at the moment

    def checked_admit(self, now_s: float) -> list[Req]:
        self.admission.wake(now_s)
        was_ready = {req.req_id for req in self.queue if self.queue.is_ready(req)}
        was_starving, isolates = self.starving(), self.scheduler.is_isolating_crash
        admitted = self.admit(now_s)
        could_run = [] if isolates else [req for req in sorted(self.queue, key=self.place) if self.could_run(req)]
        if not could_run or was_starving != self.starving():
            return admitted
        first = could_run[0]
        if self.scheduler.num_running < self.scheduler.limits.max_running:
            assert not all(map(self.fits, could_run if self.is_cache_aware else [first])), f"{first.req_id} could run"
        if not self.is_cache_aware and first.req_id in was_ready and first.lora_id is None:
            passing = [req.req_id for req in admitted if self.place(req) > self.place(first)]
            assert not passing, f"requests {passing} passed request {first.req_id}, which could run"
        return admitted

    def could_run(self, req: Req) -> bool:
        """A request that need not wait, or that may and does not: then it only lacks room, and is the next."""
        is_behind_client = any(not req.is_background and req.is_prefilling for req in self.batch)
        if req.is_background and (is_behind_client or self.queue.num_of_clients):  # perhaps with a step in flight
            return False
        return not self.may_wait(req) or (self.queue.is_ready(req) and not req.in_flight)

    def fits(self, req: Req) -> bool:
        if not self.admission._fits(req):
            self.admission._head = None
            return False
        self.scheduler.only_group.pool.release(req)
        return True

    def place(self, req: Req) -> tuple[float, ...]:
        if req.num_admissions > (req in self.batch):  # it was preempted
            return req.is_background, 0, req.arrived_s
        return req.is_background, 1, self.queue._policy.rank(req), req.req_id

    def may_wait(self, req: Req) -> bool:
        if req in self.held or req.in_flight:
            return True
        cached = self.scheduler.only_group.pool.cached_len(req)
        transfers = [] if self.remote_kv is None else self.remote_kv._open.values()
        return (
            self.waits_for_adapter(req)
            or any(waits_for_prefix(req, cached, other) for other in self.scheduler.only_group.batch)
            or any(self.waits_for_transfer(req, cached, transfer) for transfer in transfers)
            or self.waits_for_tier(req)
        )

    def waits_for_adapter(self, req: Req) -> bool:
        """No slot is left for its adapter, or a request before it needs the next one and was passed over too often."""
        if req.lora_id is None:
            return False
        running = {other.lora_id for other in self.scheduler.only_group.batch} - {None}
        has_slot = req.lora_id in running or len(running) < self.scheduler.only_group.loras.count
        return not has_slot or any(place < self.queue.place_of(req) for place in self.starving())

    def starving(self) -> set[Place]:
        """The places of requests that wait for adapters, and that others with adapters must not pass any more."""
        running = {other.lora_id for other in self.scheduler.only_group.batch}
        first = [wait.blocked[0] for wait in self.admission._adapters._waits.values() if wait.blocked]
        return {
            entry.queue_place
            for entry in first
            if entry.req.lora_id not in running
            and (entry.req.num_admissions or self.queue.num_passed_over(entry) >= waits.MAX_PASSED_OVER)
        }

    def waits_for_transfer(self, req: Req, cached: int, transfer: PendingTransfer) -> bool:
        if self.now_s >= transfer.wait.deadline_s or transfer.prefix.req.salt != req.salt:
            return False
        common = common_len(req.prompt_ids[:-1], transfer.prefix.ids)
        if not self.queue.is_ready(req):
            return common >= MIN_COMING_TOKENS  # less may have been cached when it was blocked
        return (
            common >= cached + MIN_COMING_TOKENS
            and len(transfer.prefix.cached) == cached // BLOCK_TOKENS * BLOCK_TOKENS
        )

    def waits_for_tier(self, req: Req) -> bool:
        wait, tiers = self.queue._entries[req.req_id].wait, self.tiers
        if wait is None or tiers is None or not (self.client.replies or self.worker.loads or tiers._started):
            return False
        return self.now_s < wait.deadline_s <= self.now_s + PROBE_S


def waits_for_prefix(req: Req, cached: int, other: Req) -> bool:
    """Whether another request computes a prefix of this one."""
    common = common_len(req.prompt_ids, other.prompt_ids) if req.salt == other.salt else 0
    return other.is_prefilling and min(cached, other.planned_len) <= common - MIN_PENDING_PREFIX_TOKENS


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that short histories reach them."""
    monkeypatch.setattr(req_queue, "LOOK_AHEAD", 3)
    monkeypatch.setattr(waits, "MAX_PASSED_OVER", 4)


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize("kind", ["one pool", "windows", "tiers", "disk", "roles"])
@few_seeds
@given(seed=st.integers(0, 2**62))
def test_whoever_could_run_is_admitted_in_order_and_nobody_is_lost(kind: str, seed: int) -> None:
    CheckedHistory(kind, seed).run()
