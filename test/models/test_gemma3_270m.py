"""Gemma 3 with real weights generates the same text as in transformers.

LIGHTSERVE_TEST_GEMMA names the GGUF file of Gemma-3-270M.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from lightserve.common.basemodel import LogitRows
from lightserve.messages.params import GenerationParams
from lightserve.model_files import resolve
from lightserve.offline.llm import LLM
from lightserve.tools.oracle import load_transformers
from test.models.session import Session
from test.real_model import LONG, PROMPTS

MODEL_DIR = os.environ.get("LIGHTSERVE_TEST_GEMMA")
WINDOW = 512
NEW_TOKENS = 24

pytestmark = [pytest.mark.long, pytest.mark.skipif(MODEL_DIR is None, reason="LIGHTSERVE_TEST_GEMMA is not set")]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(
        model_dir=MODEL_DIR, max_total_token_num=16384, max_req_total_len=4096, device="cpu", quantization="none"
    )


@pytest.fixture(scope="module")
def hf() -> Any:
    return load_transformers(resolve(MODEL_DIR))


def test_greedy_text_is_that_of_transformers(llm: LLM, hf: Any) -> None:
    prompts = [*PROMPTS, LONG[:6000]]
    assert len(llm.tokenizer.encode(prompts[-1])) > 2 * WINDOW
    params = GenerationParams.of(max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, temperature=0)

    ours = [generation.token_ids for generation in llm.generate(prompts, params)]

    assert ours == [_greedy(hf, llm.tokenizer.encode(prompt)) for prompt in prompts]


def test_logits_past_the_window_are_those_of_transformers(llm: LLM, hf: Any) -> None:
    ids = llm.tokenizer.encode(LONG)[: 2 * WINDOW + 100]

    session = Session(llm.worker.model)
    chunks = [session.step({0: ids[i : i + 450]}, logit_rows=LogitRows.ALL)[-30:] for i in range(0, len(ids), 450)]
    session.finish(0)
    with torch.inference_mode():
        theirs = hf(torch.tensor([ids])).logits[0]

    ends = [min(i + 450, len(ids)) for i in range(0, len(ids), 450)]
    for ours, end in zip(chunks, ends, strict=True):
        torch.testing.assert_close(ours, theirs[end - 30 : end], rtol=1e-3, atol=1e-3)


def _greedy(hf: Any, ids: list[int]) -> list[int]:
    prompt = torch.tensor([ids])
    whole = hf.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
    )
    new_ids: list[int] = whole[0, len(ids) :].tolist()
    return new_ids
