"""The real default model says what transformers makes it say."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from lightserve.io_struct import FinishReason, SamplingParams
from lightserve.llm import LLM
from lightserve.tools.oracle import load_transformers
from test.models.session import Session
from test.real_model import smollm2

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
LONG = (ROOT / "LICENSE").read_text()
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "Q: What is 17 + 25?\nA:",
    "La Révolution française a commencé en",
    "1, 1, 2, 3, 5, 8,",
    "SELECT name, age FROM users WHERE",
    "Dear Sir or Madam,\n\nI am writing to",
    "日本の首都は",
    "😀 😃 😄",
    "<html>\n<head>\n<title>",
    "To be, or not to be:",
    "   leading spaces and\ttabs",
    "Water boils at",
    "import numpy as np\n\nx = np.zeros((3, 4))\n",
    "List three colours:\n-",
    "a",
    LONG[:600],
    LONG[600:1800],
    LONG[1800:3900],
]


@pytest.fixture(scope="module")
def hf() -> Any:
    return load_transformers(smollm2())


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(max_total_token_num=16384, device="cpu")


def test_greedy_text_of_varied_prompts_is_that_of_transformers(llm: LLM, hf: Any) -> None:
    lengths = [len(llm.tokenizer.encode(prompt)) for prompt in PROMPTS]
    assert len(PROMPTS) == 20
    assert max(lengths) > 400

    ours = llm.generate(PROMPTS, SamplingParams(max_new_tokens=24, min_new_tokens=24, temperature=0))

    for prompt, generation in zip(PROMPTS, ours, strict=True):
        ids = torch.tensor([generation.prompt_ids])
        theirs = hf.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, min_new_tokens=24, do_sample=False
        )
        assert generation.token_ids == theirs[0, ids.shape[1] :].tolist(), prompt


def test_perplexity_is_that_of_transformers(llm: LLM, hf: Any) -> None:
    text = "".join(path.read_text() for path in [ROOT / "LICENSE", *sorted((ROOT / "docs").glob("*.md"))])
    ids = llm.tokenizer.encode(text)[:5200]
    assert len(ids) >= 5000

    session = Session(llm.worker.model)
    logits = torch.cat([session.step({0: ids[i : i + 1300]}, all_logits=True) for i in range(0, len(ids), 1300)])
    session.finish(0)
    with torch.inference_mode():
        theirs = hf(torch.tensor([ids])).logits[0]

    assert _perplexity(logits, ids) == pytest.approx(_perplexity(theirs, ids), rel=1e-3)


def _perplexity(logits: torch.Tensor, ids: list[int]) -> float:
    return math.exp(torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:])))


def test_it_answers_in_english_and_stops_by_itself(llm: LLM) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]

    outs = list(llm.chat(question, SamplingParams(max_new_tokens=40, temperature=0)))

    assert "".join(out.text for out in outs) == "The capital of France is Paris."
    assert outs[-1].finish_reason is FinishReason.STOP
