"""Thinking ends in time: by itself, or by a forced tag, in any batch and after any preemption."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightserve.messages.int_arrays import GrowingArray
from lightserve.messages.params import FinishReason, GenerationParams, GrammarSpec, ThinkingLimit
from lightserve.offline.llm import LLM
from lightserve.offline.results import Generation
from lightserve.worker.batch.infer_req import InferReq
from lightserve.worker.sampling.sampler import make_plan
from lightserve.worker.sampling.thinking import ThinkingBudget
from lightserve.worker.worker import ModelWorker
from test.small_text import small_tokenizer

TOKENIZER = small_tokenizer()
BEGIN, END = "[[", "-.-"
END_IDS = tuple(TOKENIZER.encode(END))
LIMIT = 12
PROMPT = [3, 1, 4, 1, 5]


def limit_of(max_tokens: int = LIMIT, is_begun: bool = True, end: str = END) -> ThinkingLimit:
    return ThinkingLimit(max_tokens, BEGIN, end, tuple(TOKENIZER.encode(end)), is_begun)


def forced(text: str, **limit: Any) -> list[str | None]:
    """What must follow each beginning of a text, of one character per token, as a text."""
    budget = ThinkingBudget(limit_of(**limit), TOKENIZER.decoder.token_bytes)
    ids = [TOKENIZER.encode(char)[0] for char in text]
    found = [budget.forced_after(ids[:count]) if budget.may_force(count) else None for count in range(len(ids) + 1)]
    return [None if token is None else TOKENIZER.decode([token]) for token in found]


def test_the_tag_is_forced_when_the_tokens_are_used_up() -> None:
    assert forced("abc", max_tokens=3) == [None, None, None, "-"]
    assert forced("abc-.-xyz", max_tokens=3) == [None] * 3 + ["-", ".", "-"] + [None] * 4
    assert forced("", max_tokens=0) == ["-"]


def test_thinking_that_ended_by_itself_stays_as_it_is() -> None:
    assert forced("a-.-xyz", max_tokens=4) == [None] * 8
    assert forced("a-.-xyz", max_tokens=3) == [None] * 3 + ["-", ".", "-"] + [None] * 2


def test_only_what_is_between_the_tags_counts() -> None:
    assert forced("[[abc", max_tokens=3, is_begun=False) == [None] * 5 + ["-"]
    assert forced("  [[abc", max_tokens=3, is_begun=False) == [None] * 7 + ["-"]
    assert forced("[[", max_tokens=0, is_begun=False) == [None, None, "-"]


def test_an_output_without_thinking_is_left_alone() -> None:
    assert forced("[abc-", max_tokens=2, is_begun=False) == [None] * 6
    assert forced("abc[[", max_tokens=0, is_begun=False) == [None] * 6


def test_a_tag_counts_in_whatever_tokens_it_is_spelled() -> None:
    budget = ThinkingBudget(limit_of(3, end="123"), TOKENIZER.decoder.token_bytes)
    one, two, three = (TOKENIZER.encode(char)[0] for char in "123")

    assert TOKENIZER.encode("123") not in ([one, two, three], [])
    assert budget.forced_after([one, two, three]) is None
    assert not budget.may_force(4)


@pytest.fixture(scope="module")
def llm(small_folder: str) -> LLM:
    return LLM(small_folder, device="cpu", max_total_token_num=2000)


def params(seed: int = 0, **fields: Any) -> GenerationParams:
    return GenerationParams.of(
        **{"max_new_tokens": 40, "temperature": 1.5, "seed": seed, "ignore_eos": True, "thinking": limit_of(), **fields}
    )


def mixed() -> list[GenerationParams]:
    """Some requests have a limit, and some of these have more options."""
    options: list[dict[str, Any]] = [
        {},
        {"thinking": None},
        {"temperature": 0},
        {"top_k": 20, "logprobs": 2},
        {"thinking": limit_of(end="x")},
        {"frequency_penalty": 0.5, "no_repeat_ngram_size": 2},
        {"bad_words_ids": ((END_IDS[0],),)},
        {"allowed_token_ids": tuple(range(20))},
    ]
    return [params(i, **options[i % len(options)]) for i in range(16)]


def generate(llm: LLM, wanted: list[GenerationParams]) -> list[Generation]:
    return llm.generate([[*PROMPT, i] for i in range(len(wanted))], wanted)


def test_every_request_ends_its_thinking_in_time_and_continues(llm: LLM) -> None:
    wanted = mixed()
    free = generate(llm, [params(i, thinking=None) for i in range(len(wanted))])

    generations = generate(llm, wanted)

    n_forced = 0
    for generation, own, unlimited in zip(generations, wanted, free, strict=True):
        assert len(generation.token_ids) == 40
        sampling = own.sampling
        if sampling.thinking is None:
            assert generation.token_ids == unlimited.token_ids
            continue
        thought = TOKENIZER.decode(generation.token_ids[:LIMIT])
        if sampling.thinking.end not in thought:
            n_forced += 1
            end_ids = sampling.thinking.end_ids
            assert tuple(generation.token_ids[LIMIT : LIMIT + len(end_ids)]) == end_ids
    assert n_forced > 8
    assert generations[0].token_ids[:LIMIT] == free[0].token_ids[:LIMIT]


def test_two_steps_in_flight_and_preemption_change_nothing(
    llm: LLM, small_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = mixed()
    expected = [one.token_ids for one in generate(llm, wanted)]
    small = LLM(small_folder, device="cpu", max_total_token_num=200)
    small.generate([PROMPT] * 40, params(max_new_tokens=2, thinking=None))  # the scheduler now expects short outputs
    monkeypatch.setattr(ModelWorker, "pipeline_depth", 2)

    ahead, paused = generate(llm, wanted), generate(small, wanted)

    assert small._scheduler.num_preemptions > 0
    assert [one.token_ids for one in ahead] == expected
    assert [one.token_ids for one in paused] == expected


def test_a_grammar_that_lets_thinking_end_is_followed(llm: LLM) -> None:
    spec = GrammarSpec("lark", f'start: thought "abc"\nthought[suffix="{END}"]: /(?s:.*)/\n')

    for generation in generate(llm, [params(i, grammar=spec) for i in range(4)]):
        assert generation.error is None
        assert generation.text.endswith(f"{END}abc")
        assert generation.finish_reason is FinishReason.STOP
        assert len(TOKENIZER.encode(generation.text)) <= LIMIT + 6 or len(generation.token_ids) <= LIMIT + 6


def test_no_step_waits_for_tokens_before_the_limit_or_after_the_end() -> None:
    def waits(known: list[int], in_flight: int) -> bool:
        sampling = params().sampling
        req = InferReq(0, 0, GrowingArray([*PROMPT, *known]), len(PROMPT), sampling, 0, ())
        req.thinking = ThinkingBudget(limit_of(), TOKENIZER.decoder.token_bytes)
        req.forced_next()
        req.total_len = req.cache_len = len(req.token_ids) + in_flight
        return make_plan([req], 131, torch.device("cpu")).needs_tokens_in_flight

    assert not waits([1] * (LIMIT - 2), 1)
    assert waits([1] * (LIMIT - 1), 1)
    assert waits([1] * LIMIT, 1)
    assert not waits([*END_IDS, *[1] * LIMIT], 1)
    assert not waits([*[1] * LIMIT, *END_IDS], 1)
