"""Draft heads in captured steps of a GPU: a capture refuses work that a CPU, or a launch, does in silence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lightserve.offline.llm import LLM
from lightserve.worker.worker import ModelWorker
from test.worker.dflash import save_drafter
from test.worker.heads import save_head
from test.worker.test_mtp import save_model
from test.worker.test_ngram import GREEDY, assert_same, params_of, prompts_of, without_costs

VOCAB, HIDDEN, DRAFTED_IDS, NUM_DRAFTS = 131, 64, [5, 9, 12, 40], 3  # of the small model
LIKELY = {"allowed_token_ids": (5, 9, 12), "ignore_eos": True}  # the more drafts are right by chance
SaveHead = Callable[[Path, str], tuple[str, dict[str, str]]]  # a folder and the small model: the model, and its head


def eagle3(folder: Path, small_folder: str) -> tuple[str, dict[str, str]]:
    return small_folder, {"method": "eagle3", "model": save_head(folder, VOCAB, HIDDEN, DRAFTED_IDS)}


def dflash(folder: Path, small_folder: str) -> tuple[str, dict[str, str]]:
    return small_folder, {"method": "dflash", "model": save_drafter(folder, VOCAB, HIDDEN, DRAFTED_IDS)}


def mtp(folder: Path, small_folder: str) -> tuple[str, dict[str, str]]:
    save_model(folder, "glm4_moe")
    return str(folder), {"method": "mtp"}


@pytest.mark.gpu
@pytest.mark.parametrize("save", [eagle3, dflash, mtp])
def test_the_text_is_that_without_drafts(save: SaveHead, tmp_path: Path, small_folder: str) -> None:
    model, head = save(tmp_path, small_folder)
    config = json.dumps(head | {"num_speculative_tokens": NUM_DRAFTS})
    params = params_of(GREEDY, LIKELY)

    texts = []
    for speculative_config in (None, config):
        llm = LLM(
            model,
            device="cuda",
            data_type="float32",
            max_total_token_num=4000,
            deterministic=True,
            speculative_config=speculative_config,
        )
        without_costs(llm)
        texts.append(llm.generate(prompts_of(12), params))
        worker = llm.worker

    assert_same(*texts)
    assert all(one.drafts is not None and one.drafts.accepted + one.drafts.rejected > 0 for one in texts[1])
    assert isinstance(worker, ModelWorker)
    assert any(worker._runner.captured_shape(shape) == shape for shape in worker._runner._to_capture())
