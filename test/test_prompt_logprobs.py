"""Logprobs of prompts compared with transformers, on a tiny model: in chunks, with other requests, after preemption."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models

from lightserve.messages.params import GenerationParams
from lightserve.messages.step import Step
from lightserve.offline.llm import LLM
from lightserve.text.logprobs import PromptToken, unpack_prompt_logprobs
from lightserve.worker.sampling import logprobs as worker_logprobs
from test.models.tiny import build_hf

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TOLERANCE = 1e-4
K = 5
VOCAB = 131
PLAIN = GenerationParams.of(max_new_tokens=4, temperature=0.0, ignore_eos=True)
WITH_PROMPT = PLAIN.replace(prompt_logprobs=K)


@pytest.fixture(scope="module")
def hf() -> Any:
    return build_hf("llama-gqa")


@pytest.fixture(scope="module")
def folder(hf: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("tiny-llama")
    hf.save_pretrained(path)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    tokenizer.save(str(path / "tokenizer.json"))
    return str(path)


def make(folder: str, device: str = "cpu", num_tokens: int = 1000) -> LLM:
    return LLM(
        folder,
        device=device,
        data_type="float32",
        max_total_token_num=num_tokens,
        max_req_total_len=100,
        running_max_req_size=8,
        batch_max_tokens=32,
    )


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def assert_true(found: list[PromptToken] | None, ids: list[int], hf: Any, k: int = K) -> None:
    """They are the logprobs of transformers."""
    assert found is not None
    assert [token.token_id for token in found] == ids
    assert found[0] == PromptToken(ids[0], None, 0, [])
    with torch.inference_mode():
        logprobs = hf(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    for token, row in zip(found[1:], logprobs, strict=True):
        values = [value for _, value in token.top]
        assert token.logprob == pytest.approx(row[token.token_id].item(), abs=TOLERANCE)
        assert token.rank == (row > row[token.token_id]).sum() + 1
        assert values == pytest.approx(row.topk(k).values.tolist(), abs=TOLERANCE)
        assert values == pytest.approx([row[token_id].item() for token_id, _ in token.top], abs=TOLERANCE)


@pytest.mark.parametrize("device", DEVICES)
def test_prompts_of_any_length_next_to_requests_without_prompt_logprobs(folder: str, hf: Any, device: str) -> None:
    llm = make(folder, device)
    prompts = [prompt(i, length) for i, length in enumerate((1, 2, 7, 33, 90, 5, 40))]
    expected = [one.token_ids for one in llm.generate(prompts, PLAIN)]

    found = make(folder, device).generate(prompts, [PLAIN if i > 4 else WITH_PROMPT for i in range(len(prompts))])

    for one in found[:5]:
        assert_true(one.prompt_logprobs, one.prompt_ids, hf)
    assert [one.prompt_logprobs for one in found[5:]] == [None, None]
    assert [one.token_ids for one in found] == expected


def test_a_prompt_that_is_cached_is_computed_again(folder: str, hf: Any) -> None:
    llm = make(folder)
    ids = prompt(0, 50)
    expected = llm.generate(ids, PLAIN)[0].token_ids

    found = llm.generate([ids, ids[:40]], WITH_PROMPT)

    for one in found:
        assert_true(one.prompt_logprobs, one.prompt_ids, hf)
    assert found[0].token_ids == expected


def test_requests_that_were_preempted_while_they_decoded(folder: str, hf: Any) -> None:
    llm = make(folder, num_tokens=110)
    llm.generate([[i] for i in range(40)], PLAIN)  # the scheduler now expects short outputs
    prompts = [prompt(i, 10 + i) for i in range(6)]

    found = llm.generate(prompts, WITH_PROMPT.replace(max_new_tokens=40))

    assert llm._scheduler.num_preemptions > 0
    for one in found:
        assert_true(one.prompt_logprobs, one.prompt_ids, hf)


@pytest.mark.parametrize("paused_after", [1, 2, 3])
def test_a_request_that_was_preempted_in_its_prompt(
    folder: str, hf: Any, paused_after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make(folder)
    scheduler, steps = llm._scheduler, []
    next_step = scheduler.next_step

    def pausing(*now: float) -> Step | None:
        steps.append(next_step(*now))
        if len(steps) == paused_after:
            scheduler.only_group.preemption.preempt_newest()
        return steps[-1]

    monkeypatch.setattr(scheduler, "next_step", pausing)
    found = llm.generate(prompt(0, 90), WITH_PROMPT)[0]

    assert scheduler.num_preemptions == 1
    assert_true(found.prompt_logprobs, found.prompt_ids, hf)
    assert found.token_ids == make(folder).generate(prompt(0, 90), PLAIN)[0].token_ids


def test_every_request_of_a_step_gets_as_many_top_logprobs_as_it_wants(folder: str, hf: Any) -> None:
    prompts = [prompt(i, 6) for i in range(3)]
    counts = (0, 20, 2)

    found = make(folder).generate(prompts, [WITH_PROMPT.replace(prompt_logprobs=k) for k in counts])

    for one, k in zip(found, counts, strict=True):
        assert_true(one.prompt_logprobs, one.prompt_ids, hf, k)


def test_no_more_logits_are_there_at_once_than_a_piece_has(
    folder: str, hf: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_logprobs, "PIECE", 7 * VOCAB)
    shapes: list[tuple[int, ...]] = []
    ranked_logprobs = worker_logprobs.ranked_logprobs

    def watched(logits: torch.Tensor, *args: Any) -> worker_logprobs.RankedLogprobs:
        shapes.append(logits.shape)
        return ranked_logprobs(logits, *args)

    monkeypatch.setattr(worker_logprobs, "ranked_logprobs", watched)
    found = make(folder).generate([prompt(0, 90), prompt(1, 3)], WITH_PROMPT)

    for one in found:
        assert_true(one.prompt_logprobs, one.prompt_ids, hf)
    assert {rows for rows, _ in shapes} <= set(range(1, 8))
    assert sum(rows for rows, _ in shapes) == 89 + 2


def test_without_a_model_every_prompt_token_has_a_logprob_of_minus_infinity() -> None:
    first, second = unpack_prompt_logprobs([3, 4], None)

    assert first == PromptToken(3, None, 0, [])
    assert second == PromptToken(4, float("-inf"), 0, [])
