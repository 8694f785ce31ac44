"""Tokens that a grammar forces: a step may bring several of a request, and the text stays the same."""

from __future__ import annotations

from typing import Any

import pytest

from lightserve.messages.params import FinishReason, GenerationParams, GrammarSpec
from lightserve.messages.step import Step
from lightserve.offline.llm import LLM
from lightserve.offline.results import Generation
from lightserve.text.grammar.specs import choice_grammar, schema_grammar
from lightserve.worker.rpc import GetResult
from lightserve.worker.sampling.grammar import ReqGrammar
from lightserve.worker.worker import ModelWorker
from test.small_text import small_tokenizer

TOKENIZER = small_tokenizer()
PROMPT = [3, 1, 4, 1, 5]
LONG = {
    "type": "object",
    "properties": {
        "created-at-a-debt-rate": {"enum": ["a red car", "a dead bee"]},
        "rare-extra-beret": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["created-at-a-debt-rate", "rare-extra-beret"],
    "additionalProperties": False,
}
GRAMMARS = [
    schema_grammar(LONG),
    GrammarSpec("regex", "(true, a red bear|a rare dead text)[.,] at [0-9]{2} a year"),
    choice_grammar(["a dead extra text", "a dead extra beat", "beta"]),
]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0},
    {"frequency_penalty": 1.0, "repetition_penalty": 1.3},
    {"top_k": 3},
    {"min_new_tokens": 50},
    {"max_new_tokens": 13},
    {"stop": ("-deb", "d b", "xtra")},
    {"stop": ("-deb", "d b", "xtra"), "include_stop": True},
    {"stop_token_ids": (TOKENIZER.token_to_id("x") or 0,)},
    {"ignore_eos": True, "bad_words_ids": ((7, 9),)},
    {"watermark": True},
]


def mixed() -> list[GenerationParams]:
    """All options with all grammars, and free requests between."""
    wanted: list[GenerationParams] = []
    for more in OPTIONS:
        for grammar in (*GRAMMARS, None):
            options = {"max_new_tokens": 100, "temperature": 1.5, "seed": len(wanted), **more}
            wanted.append(GenerationParams.of(grammar=grammar, **options))
    return wanted


@pytest.fixture(scope="module")
def llm(small_folder: str) -> LLM:
    return LLM(small_folder, device="cpu", max_total_token_num=8000)


@pytest.fixture
def steps(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    """The steps that have run."""
    run: list[Step] = []

    def counted(worker: ModelWorker, step: Step) -> GetResult:
        run.append(step)
        return launch(worker, step)

    launch = ModelWorker.launch
    monkeypatch.setattr(ModelWorker, "launch", counted)
    return run


def outputs(generations: list[Generation]) -> list[tuple[list[int], str, FinishReason | None]]:
    return [(one.token_ids, one.text, one.finish_reason) for one in generations]


def without_forcing(llm: LLM, wanted: list[GenerationParams]) -> list[Generation]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReqGrammar, "forced", lambda _: [])
        return llm.generate([PROMPT] * len(wanted), wanted)


@pytest.mark.parametrize("depth", [1, 2])
def test_the_text_is_the_same_as_with_one_step_per_token(llm: LLM, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = mixed()
    expected = without_forcing(llm, wanted)
    monkeypatch.setattr(ModelWorker, "pipeline_depth", depth)

    generations = llm.generate([PROMPT] * len(wanted), wanted)

    assert outputs(generations) == outputs(expected)
    assert {one.finish_reason for one in generations} == {FinishReason.STOP, FinishReason.LENGTH}
    assert any(one.text.endswith("-deb") for one in generations)


@pytest.mark.parametrize("depth", [1, 2])
def test_preemption_between_forced_tokens_changes_nothing(small_folder: str, llm: LLM, depth: int) -> None:
    wanted = [GenerationParams.of(max_new_tokens=100, seed=i, grammar=GRAMMARS[0]) for i in range(8)]
    expected = without_forcing(llm, wanted)
    small = LLM(small_folder, device="cpu", max_total_token_num=250)
    small.generate([PROMPT] * 40, GenerationParams.of(max_new_tokens=2))  # the scheduler now expects short outputs
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelWorker, "pipeline_depth", depth)
        paused = small.generate([PROMPT] * len(wanted), wanted)

    assert small._scheduler.num_preemptions > 0
    assert outputs(paused) == outputs(expected)


def test_forced_tokens_take_no_steps(llm: LLM, steps: list[Step]) -> None:
    sampling = GenerationParams.of(max_new_tokens=100, seed=1, grammar=GRAMMARS[0])
    (expected,) = without_forcing(llm, [sampling])
    one_by_one = len(steps)
    steps.clear()

    (generation,) = llm.generate([PROMPT], sampling)

    assert one_by_one >= len(expected.token_ids) > 40
    assert len(steps) < one_by_one / 2
    assert outputs([generation]) == outputs([expected])


def test_another_request_gets_one_token_per_step(llm: LLM, steps: list[Step]) -> None:
    free = GenerationParams.of(max_new_tokens=100, ignore_eos=True, seed=0)
    alone = llm.generate([PROMPT], free)
    steps.clear()

    other, _ = llm.generate([PROMPT] * 2, [free, GenerationParams.of(max_new_tokens=100, grammar=GRAMMARS[1], seed=0)])

    assert outputs([other]) == outputs(alone)
    assert sum(bool(step.rows) for step in steps) == 100


def test_a_request_with_logprobs_gets_them_for_every_token(llm: LLM) -> None:
    sampling = GenerationParams.of(max_new_tokens=100, seed=1, grammar=GRAMMARS[1], logprobs=1)

    (generation,) = llm.generate([PROMPT], sampling)
    (plain,) = llm.generate([PROMPT], GenerationParams.of(max_new_tokens=100, seed=1, grammar=GRAMMARS[1]))

    assert outputs([generation]) == outputs([plain])
    assert len(generation.logprobs) == len(generation.token_ids)


def test_a_forced_token_that_another_rule_forbids_ends_the_request(llm: LLM) -> None:
    grammar = GrammarSpec("regex", "[yz]a-d-e")
    letter = TOKENIZER.token_to_id("d") or 0
    allowed, stuck = llm.generate(
        [PROMPT] * 2,
        [GenerationParams.of(grammar=grammar), GenerationParams.of(grammar=grammar, bad_words_ids=((letter,),))],
    )

    assert allowed.text[1:] == "a-d-e"
    assert stuck.text[1:] == "a-"
    assert "no token is left" in (stuck.error or "")


def test_a_text_that_the_vocabulary_cannot_spell_is_not_forced(llm: LLM) -> None:
    (generation,) = llm.generate([PROMPT], GenerationParams.of(grammar=GrammarSpec("regex", "[yz]aside")))

    assert generation.text[1:] == "a"
    assert "no token is left" in (generation.error or "")
