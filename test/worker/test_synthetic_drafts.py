"""A schedule accepts drafts, to measure speed: so many tokens a step, with any sampling and any text."""

from __future__ import annotations

import json

import pytest

from lightserve.messages.params import GenerationParams
from lightserve.worker.worker import ModelWorker
from test.worker.test_ngram import make

LENGTH, NUM_DRAFTS = 2.79, 3
CONFIG = {
    "method": "ngram",
    "num_speculative_tokens": NUM_DRAFTS,
    "rejection_sample_method": "synthetic",
    "synthetic_acceptance_length": LENGTH,
}


@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_has_so_many_tokens_on_average(small_folder: str, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelWorker, "pipeline_depth", depth)
    llm = make(small_folder, json.dumps(CONFIG))
    params = [
        GenerationParams.of(max_new_tokens=110, ignore_eos=True, seed=seed, temperature=seed % 2) for seed in range(16)
    ]

    generations = llm.generate([[3, 14, 15 + seed] for seed in range(16)], params)

    assert [len(one.token_ids) for one in generations] == [110] * 16
    drafts = [one.drafts for one in generations if one.drafts is not None]
    accepted, rejected = sum(one.accepted for one in drafts), sum(one.rejected for one in drafts)
    steps = (accepted + rejected) / NUM_DRAFTS
    assert abs(1 + accepted / steps - LENGTH) < 0.1
    assert llm._scheduler.only_group.pool.used == 0
