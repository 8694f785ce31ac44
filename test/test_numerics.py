"""A model with a NaN in its weights: only requests that read it fail, with an error, and no other changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lightserve.messages.params import FinishReason, GenerationParams
from lightserve.offline.llm import LLM
from test.small_text import save_small_model

BAD_TOKEN = 120  # beyond the tokenizer's vocabulary; this model never samples it in these tests
GOOD = [3, 1, 4, 1, 5]
BAD = [3, 1, BAD_TOKEN, 1, 5]


def save_spoilt_model(folder: Path) -> str:
    """A small model in which the embedding of BAD_TOKEN is NaN."""
    save_small_model(folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"][BAD_TOKEN] = float("nan")
    tensors["lm_head.weight"][BAD_TOKEN] = 0.0
    save_file(tensors, path, metadata={"format": "pt"})
    return str(folder)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(save_spoilt_model(tmp_path_factory.mktemp("spoilt")), device="cpu", max_total_token_num=2000)


def params(**fields: Any) -> GenerationParams:
    return GenerationParams.of(**{"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True, **fields})


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.8, "seed": 1},
        {"temperature": 0.8, "seed": 1, "top_p": 0.9, "top_k": 20},
        {"temperature": 0.8, "seed": 1, "typical_p": 0.5},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.5},
        {"logprobs": 5, "prompt_logprobs": 5},
        {"allowed_token_ids": (1, 2, 3)},
        {"logit_bias": {4: 5.0}, "bad_words_ids": ((1, 2), (3,))},
    ],
    ids=lambda fields: "-".join(fields) or "greedy",
)
def test_a_prompt_that_meets_the_nan_fails_and_those_beside_it_do_not(llm: LLM, fields: dict[str, Any]) -> None:
    (alone,) = llm.generate([GOOD], params(**fields))

    first, bad, last = llm.generate([GOOD, BAD, GOOD], params(**fields))

    assert bad.error is not None
    assert bad.error.startswith("numerical error")
    assert bad.finish_reason is FinishReason.ABORT
    assert bad.token_ids == []
    assert first.token_ids == last.token_ids == alone.token_ids
    assert len(alone.token_ids) == 8
    assert first.error is last.error is None


def test_a_token_that_spoils_the_next_ends_the_request_where_it_is(llm: LLM) -> None:
    forced = params(logit_bias={BAD_TOKEN: 100.0}, max_new_tokens=8)

    (spoilt,) = llm.generate([GOOD], forced)

    assert spoilt.token_ids == [BAD_TOKEN]
    assert spoilt.error is not None


def test_what_a_failed_request_computed_is_not_kept_for_others(llm: LLM) -> None:
    prompt = [7] * 40

    llm.generate([[*prompt, BAD_TOKEN, 2]], params())
    (healed,) = llm.generate([prompt], params())
    cached = llm._scheduler.only_group.pool.cached_tokens
    llm.generate([[*prompt, BAD_TOKEN, 2]], params())

    assert healed.error is None
    assert llm._scheduler.only_group.pool.cached_tokens <= cached


def test_a_row_that_was_spoilt_in_one_step_is_used_again(llm: LLM) -> None:
    """The rows, slots and last tokens that a failed request held go to others at once."""
    (alone,) = llm.generate([GOOD], params(repetition_penalty=1.2))

    for _ in range(3):
        llm.generate([BAD] * 4, params(repetition_penalty=1.2))
        assert torch.isnan(llm.worker.model.mem_manager.buffers[0]).any(), "or this shows nothing"
        healthy = llm.generate([GOOD] * 4, params(repetition_penalty=1.2))
        assert [one.token_ids for one in healthy] == [alone.token_ids] * 4
