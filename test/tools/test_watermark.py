"""A watermark is found in the text that has one, however its request was served, and in no other."""

from __future__ import annotations

import io
from typing import Any

import pytest

from lightserve.messages.params import GenerationParams
from lightserve.offline.llm import LLM
from lightserve.tools.watermark import look_for_watermark, main
from lightserve.worker.worker import ModelWorker
from test.small_text import small_tokenizer

PROMPTS = [[3, 1, 4, 1, 5, i] for i in range(6)]


@pytest.fixture(scope="module")
def llm(small_folder: str) -> LLM:
    return LLM(small_folder, device="cpu", max_total_token_num=2000)


def params(seed: int, **fields: Any) -> GenerationParams:
    return GenerationParams.of(**{"max_new_tokens": 120, "ignore_eos": True, "seed": seed, **fields})


def generate(llm: LLM, *wanted: GenerationParams) -> list[list[int]]:
    return [one.token_ids for one in llm.generate(PROMPTS[: len(wanted)], wanted)]


def test_it_is_found_in_the_texts_that_have_it_alone(llm: LLM) -> None:
    wishes: list[dict[str, Any]] = [{}, {"top_p": 0.9}, {"frequency_penalty": 0.2, "logprobs": 1}]
    marked = [params(i, watermark=True, **wish) for i, wish in enumerate(wishes)]
    plain = [params(i, **wish) for i, wish in enumerate(wishes)]

    scores = [look_for_watermark(ids).z_score for ids in generate(llm, *marked, *plain)]

    assert min(scores[:3]) > 4
    assert max(map(abs, scores[3:])) < 4


def test_steps_ahead_of_the_tokens_give_the_same(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [params(i, watermark=i % 2 == 0, max_new_tokens=40) for i in range(6)]
    expected = generate(llm, *wanted)
    monkeypatch.setattr(ModelWorker, "pipeline_depth", 2)

    assert generate(llm, *wanted) == expected


def test_a_pause_changes_nothing(llm: LLM, small_folder: str) -> None:
    wanted = [params(i, watermark=True, max_new_tokens=50) for i in range(6)]
    small = LLM(small_folder, device="cpu", max_total_token_num=180)
    small.generate([[1]] * 40, params(0, max_new_tokens=2))  # so that it takes answers to be short

    paused = generate(small, *wanted)

    assert small._scheduler.num_preemptions > 0
    assert paused == generate(llm, *wanted)


def test_the_command_tells_what_it_found(
    llm: LLM, small_folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = tuple(small_tokenizer().encode("dez3456789[.-"))  # no two of them are one token
    (ids,) = generate(llm, params(0, watermark=True, allowed_token_ids=alone))
    monkeypatch.setattr("sys.stdin", io.StringIO(small_tokenizer().decode(ids)))

    assert main(["--model_dir", small_folder]) == 0

    found = look_for_watermark(ids)
    assert found.z_score > 4
    assert capsys.readouterr().out == (
        f"{found.green} of {found.tokens} tokens are green, z-score {found.z_score:.1f}\n"
    )


def test_a_text_without_tokens_has_no_watermark() -> None:
    assert look_for_watermark([]).z_score == look_for_watermark([5]).z_score == 0
