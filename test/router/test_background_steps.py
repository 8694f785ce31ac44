"""When steps of background requests are sent while clients use the server: one at a time, and with pauses."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from lightserve.messages.params import BACKGROUND_PRIORITY, SchedulingParams
from lightserve.messages.request import GenerateReq
from lightserve.router.scheduler import background_pause_s
from lightserve.router.scheduler.background import BackgroundLimit
from test.router.test_manager import HeldPacer, Router, check, request
from test.waiting import until

PAUSE_S = 3600.0


class LongPauses(BackgroundLimit):
    def _pause_after(self, step_s: float) -> float:
        return PAUSE_S


def background_request(req_id: int) -> GenerateReq:
    scheduling = SchedulingParams(priority=BACKGROUND_PRIORITY)
    return msgspec.structs.replace(request(req_id, max_new_tokens=60), scheduling=scheduling)


def test_a_client_does_not_wait_for_two_steps_of_background_requests(tmp_path: Path) -> None:
    async def scenario(router: Router) -> None:
        pacer = router.manager.steps.pacer = HeldPacer(lead_s=0.0)
        pacer.wait_s = -1.0  # another step would be sent at once
        router.send(background_request(1))
        router.send(request(2))
        await router.until(lambda: router.has_finished(2))
        num_steps = router.model.stuck_at = len(router.model.steps) + 1
        await until(lambda: len(router.model.steps) == num_steps)

        router.send(request(3))
        await until(lambda: len(router.model.steps) > num_steps)

        assert [row.req_id for row in router.model.steps[num_steps].rows] == [3]

    check(scenario, tmp_path, depth=2)


def test_a_client_ends_a_pause_of_background_requests(tmp_path: Path) -> None:
    async def scenario(router: Router) -> None:
        router.scheduler.only_group.planner.background = LongPauses(max_tokens=64)
        router.send(background_request(1))
        router.send(request(2))
        await router.until(lambda: router.has_finished(2))
        await until(lambda: background_pause_s(router.scheduler.groups, time.monotonic()) == PAUSE_S)
        await until(lambda: router.manager.steps.step_age_s() == 0)

        router.send(request(3))
        await router.until(lambda: router.has_finished(3))

        assert not router.has_finished(1)

    check(scenario, tmp_path, depth=2)
