"""Speculation with n-grams never changes a text: every option of a request, greedily and with a seed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from lightserve.messages.params import GenerationParams, GrammarSpec, ThinkingLimit
from lightserve.offline.llm import LLM
from lightserve.offline.results import Generation
from lightserve.text.beam_search import BeamParams
from lightserve.text.grammar.specs import choice_grammar, schema_grammar, structural_tag_grammar
from lightserve.worker.worker import ModelWorker
from test.lora_files import LLAMA_TARGETS, linear_sizes, write_adapter
from test.small_text import small_tokenizer
from test.worker.kv.test_windowed_pool import make as make_windowed, save_model

TOKENIZER = small_tokenizer()
VOCAB = TOKENIZER.num_ids
CONFIG = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}'
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yy"]}},
    "required": ["a"],
    "additionalProperties": False,
}
DRAFTED: dict[str, dict[str, Any]] = {
    "plain": {},
    "filters": {"top_k": 9, "top_p": 0.9, "min_p": 0.01},
    "typical_p": {"typical_p": 0.8},
    "bias": {"logit_bias": {5: 2.0, 7: -100.0}},
    "bad words": {"bad_words_ids": ((9,), (11,))},
    "allowed": {"allowed_token_ids": tuple(range(3, 12))},
    "stop string": {"stop": ("ab", "1")},
    "stop string in the text": {"stop": ("a",), "include_stop": True},
    "end token in a run": {"stop_token_ids": (4, 9, 13), "ignore_eos": True},
    "one token": {"max_new_tokens": 1},
    "two tokens": {"max_new_tokens": 2},
    "five tokens": {"max_new_tokens": 5},
    "logprobs": {"logprobs": 3},
    "logprobs of the prompt": {"prompt_logprobs": 2},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.3, "frequency_penalty": 0.2},
    "bad words of several tokens": {"bad_words_ids": ((5, 9), (7, 8))},
    "no repeated n-grams": {"no_repeat_ngram_size": 4},
    "length penalty": {"exponential_decay_length_penalty": (5, 1.1)},
    "first tokens": {"first_allowed_token_ids": (3, 4)},
    "min tokens": {"min_new_tokens": 9},
    "watermark": {"watermark": True},
    "thinking": {"thinking": ThinkingLimit(5, "a", "b", (5, 6, 7), is_begun=True)},
}
TAG = {"structures": [{"begin": "b", "schema": SCHEMA, "end": "a"}], "triggers": ["b"]}
GRAMMARS: dict[str, dict[str, Any]] = {
    "regex": {"grammar": GrammarSpec("regex", "(ab|[0-9]){2,30}")},
    "json schema": {"grammar": schema_grammar(SCHEMA)},
    "choice": {"grammar": choice_grammar(["a dead extra text", "a dead extra beat", "beta"])},
    "forced text": {"grammar": GrammarSpec("regex", "((true, a red bear|a rare dead text)[.,] at [0-9]{2} a year){9}")},
    "structural tag": {"grammar": structural_tag_grammar(TAG)},
    "prefix": {"grammar": GrammarSpec("prefix", "a dead bee")},
    "grammar with logprobs": {"grammar": schema_grammar(SCHEMA), "logprobs": 2},
    "grammar with rules": {
        "grammar": GrammarSpec("regex", "[a-e0-9 ]{2,60}"),
        "frequency_penalty": 0.5,
        "no_repeat_ngram_size": 3,
        "min_new_tokens": 12,
    },
}
DRAFTED |= GRAMMARS
FORCED = ("choice", "forced text")  # the grammar forces nearly all tokens, so few are left to draft
TOKEN_BY_TOKEN: dict[str, dict[str, Any]] = {"switched off": {"speculative": False}}
SELDOM = ("choice", "forced text", "structural tag", "prefix", "grammar with rules")  # alone only with --long
ALWAYS = [name for name in DRAFTED | TOKEN_BY_TOKEN if name not in SELDOM]
GREEDY = {"temperature": 0.0}
SEEDED = {"temperature": 0.4, "seed": 7}


def make(folder: str | Path, speculative_config: str | None = CONFIG, **options: Any) -> LLM:
    options = {"max_total_token_num": 3000, "running_max_req_size": 16} | options
    llm = LLM(str(folder), device="cpu", data_type="float32", speculative_config=speculative_config, **options)
    if speculative_config is not None:
        without_costs(llm)
    return llm


def without_costs(llm: LLM) -> None:
    """A CPU would stop to draft soon: have it draft all the time."""
    limits = llm._scheduler.only_group.limits
    object.__setattr__(limits, "weight_read_tokens", 0.0)


@pytest.fixture(scope="module")
def plain(small_folder: str) -> LLM:
    return make(small_folder, None, max_loras=1)


@pytest.fixture(scope="module")
def drafting(small_folder: str) -> LLM:
    return make(small_folder, max_loras=1)


@pytest.fixture(params=[1, 2], ids=["one step in flight", "two steps in flight"])
def depth(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    steps: int = request.param
    monkeypatch.setattr(ModelWorker, "pipeline_depth", steps)
    return steps


def repeating(rng: random.Random) -> list[int]:
    """A prompt that repeats itself, with small changes."""
    part = [rng.randrange(1, VOCAB) for _ in range(rng.randint(2, 20))]
    return part * rng.randint(1, 3) + part[: rng.randint(1, len(part))]


def prompts_of(count: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [repeating(rng) for _ in range(count)]


def params_of(*fields: dict[str, Any]) -> GenerationParams:
    merged: dict[str, Any] = {"max_new_tokens": 40}
    for more in fields:
        merged |= more
    if "min_new_tokens" in merged:  # of two options that were drawn together
        merged["min_new_tokens"] = min(merged["min_new_tokens"], merged["max_new_tokens"])
    return GenerationParams.of(**merged)


def predicted(params: GenerationParams, expected: Generation) -> GenerationParams:
    """With a prediction that is wrong in every ninth token."""
    ids = [(token + 1) % VOCAB if place % 9 == 8 else token for place, token in enumerate(expected.token_ids)]
    return params.replace(prediction_ids=tuple(ids))


def assert_same(drafted: list[Generation], expected: list[Generation]) -> None:
    for one, other in zip(drafted, expected, strict=True):
        assert (one.text, one.token_ids) == (other.text, other.token_ids)
        assert (one.finish_reason, one.error) == (other.finish_reason, other.error)
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        assert [[token for token, _ in top] for top in one.top_logprobs] == [
            [token for token, _ in top] for top in other.top_logprobs
        ]
        assert (one.prompt_logprobs is None) == (other.prompt_logprobs is None)


def num_accepted(generations: list[Generation]) -> int:
    return sum(one.drafts.accepted for one in generations if one.drafts is not None)


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("options", [*ALWAYS, *(pytest.param(name, marks=pytest.mark.long) for name in SELDOM)])
def test_a_text_is_the_same_with_every_option(
    plain: LLM, drafting: LLM, options: str, sampling: dict[str, Any], depth: int
) -> None:
    params = params_of(sampling, (DRAFTED | TOKEN_BY_TOKEN)[options])
    prompts = prompts_of(4)
    expected = plain.generate(prompts, params)

    drafted = drafting.generate(prompts, [predicted(params, one) for one in expected])

    assert_same(drafted, expected)
    if options in TOKEN_BY_TOKEN:
        assert all(one.drafts is None for one in drafted)
    else:
        assert num_accepted(drafted) or params.stopping.max_new_tokens < 3 or options in FORCED


def test_requests_of_all_kinds_share_steps(plain: LLM, drafting: LLM, depth: int) -> None:
    params = [
        params_of(sampling, more) for more in (DRAFTED | TOKEN_BY_TOKEN).values() for sampling in (GREEDY, SEEDED)
    ]
    prompts = prompts_of(len(params), seed=1)
    expected = plain.generate(prompts, params)

    drafted = drafting.generate(prompts, [predicted(*pair) for pair in zip(params, expected, strict=True)])

    assert_same(drafted, expected)
    assert num_accepted(drafted) > 200
    assert drafting._scheduler.only_group.pool.used == 0


def test_random_options_never_change_a_text(plain: LLM, drafting: LLM) -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    options = list((DRAFTED | TOKEN_BY_TOKEN).values())
    params = [
        params_of(rng.choice([GREEDY, SEEDED]), {"seed": rng.randrange(99)}, *chosen)
        for chosen in (rng.choices(options, k=2) for _ in range(30))
        if not {"min_new_tokens", "max_new_tokens"} <= {name for fields in chosen for name in fields}
    ]
    prompts = prompts_of(len(params), seed)
    expected = plain.generate(prompts, params)

    drafted = drafting.generate(prompts, [predicted(*pair) for pair in zip(params, expected, strict=True)])

    try:
        assert_same(drafted, expected)
    except AssertionError as error:
        raise AssertionError(f"seed {seed}") from error


def test_beams_have_no_drafts(plain: LLM, drafting: LLM) -> None:
    prompts, params = prompts_of(2), BeamParams(num_beams=3, max_new_tokens=12)

    assert drafting.beam_search(prompts, params) == plain.beam_search(prompts, params)


def test_a_request_with_an_adapter_has_drafts_too(plain: LLM, drafting: LLM, small_folder: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(small_folder)
    folder = write_adapter(tmp_path / "adapter", linear_sizes(model, LLAMA_TARGETS))
    prompts = prompts_of(6)
    loras = [None, str(folder)] * 3

    drafted = drafting.generate(prompts, params_of(GREEDY), lora=loras)

    expected = plain.generate(prompts, params_of(GREEDY), lora=loras)
    assert_same(drafted, expected)
    assert num_accepted(drafted[1::2])


def test_the_deterministic_backend_gives_the_same_logprobs(small_folder: str) -> None:
    prompts, params = prompts_of(4), params_of(GREEDY)

    drafted = make(small_folder, deterministic=True).generate(prompts, params)

    assert_same(drafted, make(small_folder, None, deterministic=True).generate(prompts, params))
    assert num_accepted(drafted)


def test_a_model_with_two_pools_gives_the_text_of_one(tmp_path: Path, depth: int) -> None:
    folder, prompts, params = save_model("gemma3_text", tmp_path), prompts_of(4), params_of(GREEDY)
    expected = make_windowed(folder, windowed=0).generate(prompts, params)
    windowed = make_windowed(folder, windowed=2000, speculative_config=CONFIG)
    without_costs(windowed)

    drafted = windowed.generate(prompts, params)

    assert_same(drafted, expected)
    assert num_accepted(drafted)


def test_a_preempted_request_goes_on_with_drafts(small_folder: str, plain: LLM, depth: int) -> None:
    small = make(small_folder, max_total_token_num=200)
    prompts, params = prompts_of(8, seed=3), params_of(GREEDY, {"ignore_eos": True, "max_new_tokens": 60})
    small.generate([[1, 2]] * 40, GenerationParams.of(max_new_tokens=2))  # the scheduler now expects short outputs

    drafted = small.generate(prompts, params)

    assert small._scheduler.num_preemptions > 0
    assert_same(drafted, plain.generate(prompts, params))
    assert num_accepted(drafted)


def test_a_prediction_is_drafted_from(plain: LLM, drafting: LLM, depth: int) -> None:
    prompts = [[3, 14, 15], [9, 2, 6]]
    expected = plain.generate(prompts, params_of(SEEDED))
    params = [params_of(SEEDED, {"prediction_ids": tuple(one.token_ids)}) for one in expected]

    drafted = drafting.generate(prompts, params)

    assert_same(drafted, expected)
    assert num_accepted(drafted) > 0.6 * sum(len(one.token_ids) for one in expected)


def test_a_wrong_prediction_changes_nothing(plain: LLM, drafting: LLM) -> None:
    prompts, rng = prompts_of(4), random.Random(5)
    wrong = tuple(rng.randrange(VOCAB) for _ in range(300))

    drafted = drafting.generate(prompts, params_of(SEEDED, {"prediction_ids": wrong}))

    assert_same(drafted, plain.generate(prompts, params_of(SEEDED)))


def test_outputs_of_ended_requests_are_drafted_from(small_folder: str, plain: LLM, depth: int) -> None:
    llm = make(small_folder, CONFIG.replace("ngram", "suffix", 1))
    prompts, params = [[3, 14, 15], [9, 2, 6]], params_of(SEEDED)
    first = llm.generate(prompts, params)

    again = llm.generate(prompts, params)

    assert_same(again, plain.generate(prompts, params))
    assert num_accepted(again) > max(num_accepted(first), 0.5 * sum(len(one.token_ids) for one in again))
