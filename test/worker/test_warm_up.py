from __future__ import annotations

import pytest

from lightserve.common.device.cpu import CpuDevice
from lightserve.common.parallel import Parallel
from lightserve.config import WorkerConfig
from lightserve.messages.step import NewReq, Step
from lightserve.model_files.source import resolve
from lightserve.worker.rpc import GetResult
from lightserve.worker.worker import ModelWorker


@pytest.mark.parametrize("max_len", [100, 12, 2])
def test_warm_up_runs_every_kind_of_request_and_leaves_none(
    folder: str, monkeypatch: pytest.MonkeyPatch, max_len: int
) -> None:
    """What happens for the first time takes long on some devices: the first client should not wait for it."""
    config = WorkerConfig(model_dir=folder, device="cpu", max_total_token_num=500, max_req_total_len=max_len)
    worker = ModelWorker(config, resolve(folder), Parallel())
    run: list[NewReq] = []
    launch = worker.launch

    def watched(step: Step) -> GetResult:
        run.extend(step.new)
        return launch(step)

    monkeypatch.setattr(worker, "launch", watched)
    worker.warm_up()

    assert not worker._batch._reqs
    if max_len == 100:
        assert {len(req.token_ids) for req in run} >= set(CpuDevice.warm_up_prompts)
        assert any(len(req.cached_slots) for req in run)
        assert any(req.sampling.top_k > 0 for req in run)
        assert any(req.sampling.temperature == 0 for req in run)
