"""Tensor-parallel ranks sample the tokens of one rank, and do not exchange their logits for that."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightserve.common.parallel import Parallel, ParallelSizes, connect_ranks
from lightserve.config import WorkerConfig
from lightserve.messages.params import SamplingParams
from lightserve.messages.step import NewReq, Step, StepRow
from lightserve.model_files.source import resolve
from lightserve.worker.worker import ModelWorker
from test.ranks import run_ranks

SAMPLING = {
    "greedy": SamplingParams(temperature=0.0),
    "random": SamplingParams(temperature=0.9),
    "hot": SamplingParams(temperature=5.0),
    "top_p": SamplingParams(temperature=1.0, top_p=0.8),
    "penalty": SamplingParams(temperature=0.0, frequency_penalty=1.5),
    "logprobs": SamplingParams(temperature=0.7, logprobs=3),
}
STEPS = 6


def run(folder: str, parallel: Parallel) -> dict[str, object]:
    """The tokens of requests that are sampled in every way, and what a plain decode step sends."""
    config = WorkerConfig(
        model_dir=folder,
        device="cpu",
        data_type="float32",
        tp=parallel.tp.size,
        max_total_token_num=400,
        max_req_total_len=60,
        running_max_req_size=8,
    )
    worker = ModelWorker(config, resolve(folder), parallel)
    slots = iter(range(400))
    reqs = [NewReq(i, [3 + i, 17, 40 + i], sampling, seed=i) for i, sampling in enumerate(SAMPLING.values())]
    tokens: dict[str, list[int]] = {name: [] for name in SAMPLING}
    logprobs: list[float] = []
    for number in range(STEPS):
        rows = [StepRow(req.req_id, [next(slots) for _ in range(1 if number else 3)]) for req in reqs]
        for out in worker.run(Step(rows, [] if number else reqs)).tokens:
            tokens[list(SAMPLING)[out.req_id]].append(out.token.id)
            if out.token.logprob is not None:
                logprobs.append(out.token.logprob)
    others = [req.req_id for req in reqs[2:]]
    before = parallel.tp.traffic.bytes
    worker.run(Step([StepRow(req.req_id, [next(slots)]) for req in reqs[:2]], free=others))
    return {"tokens": tokens, "logprobs": logprobs, "sent": parallel.tp.traffic.bytes - before}


def _run_rank(rank: int, size: int, store: str, model: str, to: str) -> None:
    torch.set_num_threads(1)
    parallel = connect_ranks(rank, ParallelSizes(tp=size), f"file://{store}", "gloo")
    Path(to, f"{rank}.json").write_text(json.dumps(run(model, parallel)))
    dist.destroy_process_group()


@pytest.mark.tp
def test_ranks_sample_what_one_rank_samples_without_sending_logits(folder: str, tmp_path: Path) -> None:
    alone = run(folder, Parallel())
    config = json.loads(Path(folder, "config.json").read_text())
    hidden, layers, batch = config["hidden_size"], config["num_hidden_layers"], 2

    run_ranks(_run_rank, 2, 2, str(tmp_path / "store"), folder, str(tmp_path))
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]

    for rank in ranks:
        assert rank["tokens"] == alone["tokens"]
        assert rank["logprobs"] == pytest.approx(alone["logprobs"], abs=1e-4)
        sums = (1 + 2 * layers) * batch * hidden * 4  # the embedding, and two of every layer, in float32
        assert rank["sent"] == sums + batch * 8  # a score and a token of each request
