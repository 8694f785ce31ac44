from __future__ import annotations

from pathlib import Path

import pytest

from lightserve.common.tp import TpGroup
from lightserve.config import WorkerConfig
from lightserve.io_struct import NewReq, SamplingParams, Step, StepRow
from lightserve.model_files.source import resolve
from lightserve.router.model_infer.worker import ModelWorker
from test.models.tiny import build_hf

PROMPT = [5, 17, 3, 99, 42]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("tiny-llama")
    build_hf("llama-gqa").save_pretrained(path)
    return str(path)


@pytest.mark.parametrize("is_later_first", [False, True])
def test_tokens_reach_a_request_in_the_order_of_the_steps_whoever_is_collected_first(
    folder: str, is_later_first: bool
) -> None:
    """A thread waits for each step, and that of the later one may be the first to look."""
    config = WorkerConfig(model_dir=folder, device="cpu", data_type="float32", max_total_token_num=100)
    worker = ModelWorker(config, resolve(folder), TpGroup())
    sampling = SamplingParams(max_new_tokens=20, temperature=0.0, ignore_eos=True)
    prompt = Step([StepRow(1, list(range(5)))], [NewReq(1, PROMPT, sampling, seed=0)])
    collects = [worker.launch(prompt), worker.launch(Step([StepRow(1, [5])]))]

    outs = {}
    for number in (1, 0) if is_later_first else (0, 1):
        outs[number] = collects[number]()
    said = [*outs[0], *outs[1]]
    (req,) = worker._batch._reqs.values()

    assert req.token_ids == [*PROMPT, *(out.token_id for out in said)]
    assert said[0].token_id != said[1].token_id  # else the order would not show
