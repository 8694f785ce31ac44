"""An update of the layer for drafts alone does not make old or half new weights of the model valid."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from lightserve.ipc.worker_calls import WorkerCall
from lightserve.messages.rl import ReceiveWeights
from lightserve.messages.weights import CheckTensors, FinishLoad, ReceiveTensors, WeightTensor, WorkerWeightsReply
from test.router.rl.test_kv_on_its_way import Workers, ask, prompt
from test.router.test_manager import Router, check

DRAFT = WeightTensor("mtp.fc.weight", "float32", (4, 8))


class DraftWorkers(Workers):
    """Their layer for drafts has one tensor."""

    def call(self, call: WorkerCall[Any, Any], request: Any, timeout_s: float | None = None) -> asyncio.Future[Any]:
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        of: dict[Any, WorkerWeightsReply] = {
            CheckTensors: WorkerWeightsReply(used=1),
            ReceiveTensors: WorkerWeightsReply(missing=0),
            FinishLoad: WorkerWeightsReply(has_drafts=True),
        }
        self.calls.append(type(request).__name__)
        reply.set_result(of[type(request)])
        return reply


@pytest.mark.parametrize("problem", ["", "weights_lost: send them again"])
def test_the_weights_of_the_model_are_those_of_before(tmp_path: Path, problem: str) -> None:
    async def scenario(router: Router) -> None:
        router.manager.use_workers(workers := DraftWorkers())
        router.manager.weights.enable(router.manager.rl, str(tmp_path), 0)
        router.send(prompt(0, 40))
        await router.until(lambda: router.has_finished(0))  # the router runs
        served = router.manager.weights.served
        served.model_problem, salt = problem, served.salt

        reply = await ask(router, ReceiveWeights(1, "trainer", [DRAFT], version="2"))

        assert (reply.status, workers.calls) == (200, ["CheckTensors", "ReceiveTensors", "FinishLoad"])
        assert (served.problem, served.generation, served.salt, served.version) == (problem, 0, salt, "2")
        assert not router.manager.steps._holds

    check(scenario, tmp_path)
