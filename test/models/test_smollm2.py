"""The default model generates the same text as in transformers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from lightserve.common.basemodel import LogitRows
from lightserve.messages.params import FinishReason, GenerationParams
from lightserve.offline.llm import LLM
from test.models.session import Session
from test.real_model import GOLDEN_TOKENS, PROMPTS, ROOT, golden_ids, transformers_smollm2

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def hf() -> Any:
    return transformers_smollm2()


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(max_total_token_num=16384, device="cpu", quantization="none")


def test_greedy_text_of_varied_prompts_is_that_of_transformers(llm: LLM) -> None:
    assert max(len(llm.tokenizer.encode(prompt)) for prompt in PROMPTS) > 400
    params = GenerationParams.of(max_new_tokens=GOLDEN_TOKENS, min_new_tokens=GOLDEN_TOKENS, temperature=0)

    ours = llm.generate(PROMPTS, params)

    assert [generation.token_ids for generation in ours] == golden_ids()


@pytest.mark.gpu
def test_on_a_gpu_in_float32_the_greedy_text_is_that_of_transformers_too() -> None:
    llm = LLM(max_total_token_num=16384, device="cuda", data_type="float32", batch_max_tokens=300)
    params = GenerationParams.of(max_new_tokens=GOLDEN_TOKENS, min_new_tokens=GOLDEN_TOKENS, temperature=0)

    alone = [llm.generate([prompt], params)[0].token_ids for prompt in PROMPTS[:4]]
    together = [generation.token_ids for generation in llm.generate(PROMPTS, params)]

    assert together == golden_ids()
    assert alone == together[:4]


def test_perplexity_is_that_of_transformers(llm: LLM, hf: Any) -> None:
    text = "".join(path.read_text() for path in [ROOT / "LICENSE", *sorted((ROOT / "docs").glob("*.md"))])
    ids = llm.tokenizer.encode(text)[:400]
    assert len(ids) == 400

    session = Session(llm.worker.model)
    logits = torch.cat([session.step({0: ids[i : i + 200]}, logit_rows=LogitRows.ALL) for i in range(0, len(ids), 200)])
    session.finish(0)
    with torch.inference_mode():
        theirs = hf(torch.tensor([ids])).logits[0]

    assert _perplexity(logits, ids) == pytest.approx(_perplexity(theirs, ids), rel=1e-3)


def _perplexity(logits: torch.Tensor, ids: list[int]) -> float:
    return math.exp(torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:])))


def test_it_answers_in_english_and_stops_at_its_end_token(llm: LLM) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]

    outs = list(llm.chat(question, GenerationParams.of(max_new_tokens=40, temperature=0)))

    assert "".join(out.text for out in outs) == "The capital of France is Paris."
    assert outs[-1].finish_reason is FinishReason.STOP
