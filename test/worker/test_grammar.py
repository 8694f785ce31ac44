"""Grammars in the worker: constrained and free requests, steps in flight, preemption, rules that leave no token."""

from __future__ import annotations

import json
import random
import re
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from llguidance import LLMatcher, LLParserLimits

from lightserve.common import ops
from lightserve.common.device import H200_GRAPHS
from lightserve.errors import InvalidRequestError
from lightserve.messages.params import FinishReason, GenerationParams, GrammarSpec, SamplingParams
from lightserve.messages.step import NewReq
from lightserve.messages.worker_calls import CompileGrammar
from lightserve.model_files.source import resolve
from lightserve.offline.llm import LLM
from lightserve.offline.results import Generation
from lightserve.text.grammar import compiler as compiler_module
from lightserve.text.grammar.compiler import GrammarCompiler
from lightserve.text.grammar.specs import choice_grammar, schema_grammar
from lightserve.utils.memory import allocated_bytes
from lightserve.worker.captured_shapes import graph_shape_for
from lightserve.worker.sampling.grammar import LANES, LARGE_MIB, MAX_GROWTH_BYTES, GrammarManager, ReqGrammar
from lightserve.worker.sampling.step_masks import GrammarMaskBuilder
from lightserve.worker.worker import ModelWorker
from test.small_text import small_tokenizer
from test.waiting import DEADLINE_S

TOKENIZER = small_tokenizer()
EOS = TOKENIZER.eos_id or 0
PROMPT = [3, 1, 4, 1, 5]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "yy"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
DIGITS = GrammarSpec("regex", "[0-9]{2,30}")


@pytest.fixture(scope="module")
def llm(small_folder: str) -> LLM:
    return LLM(small_folder, device="cpu", max_total_token_num=2000)


def params(seed: int = 0, **fields: Any) -> GenerationParams:
    return GenerationParams.of(**{"max_new_tokens": 60, "temperature": 1.5, "seed": seed, **fields})


def mixed(count: int = 24) -> list[GenerationParams]:
    """Every third request is free. The others have a grammar, and some have more options."""
    grammars = [
        None,
        schema_grammar(SCHEMA),
        DIGITS,
        None,
        choice_grammar(["abc", "ab", "x-y"]),
        schema_grammar(SCHEMA),
    ]
    options: list[dict[str, Any]] = [{}, {"top_k": 20}, {"frequency_penalty": 0.5}, {"logprobs": 2}, {"temperature": 0}]
    return [params(i, grammar=grammars[i % 6], **options[i % 5]) for i in range(count)]


def prompts(count: int) -> list[list[int]]:
    return [[*PROMPT, i % 40] for i in range(count)]


def check(generation: Generation, sampling: GenerationParams) -> None:
    """An output that ended by itself is a text of the grammar."""
    spec = sampling.sampling.grammar
    if spec is None:
        return
    assert generation.error is None
    if generation.finish_reason is not FinishReason.STOP:
        return
    if spec.kind == "json_schema":
        jsonschema_rs.validate(json.loads(spec.text), json.loads(generation.text))
    elif spec.kind == "regex":
        assert re.fullmatch(spec.text, generation.text)
    else:
        assert generation.text in json.loads(spec.text)


def test_outputs_follow_their_grammars_and_end_by_themselves(llm: LLM) -> None:
    wanted = mixed()

    generations = llm.generate(prompts(len(wanted)), wanted)

    for generation, sampling in zip(generations, wanted, strict=True):
        check(generation, sampling)
    ended = [
        one.finish_reason is FinishReason.STOP
        for one, sampling in zip(generations, wanted, strict=True)
        if sampling.sampling.grammar
    ]
    assert sum(ended) > len(ended) / 2


def test_a_request_gets_the_same_tokens_alone_and_with_others(llm: LLM) -> None:
    wanted = mixed(6)

    alone = [llm.generate([prompt], one)[0] for prompt, one in zip(prompts(6), wanted, strict=True)]
    together = llm.generate(prompts(6), wanted)

    assert [one.token_ids for one in together] == [one.token_ids for one in alone]


def test_two_steps_in_flight_give_the_same(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = mixed()
    expected = llm.generate(prompts(len(wanted)), wanted)
    monkeypatch.setattr(ModelWorker, "pipeline_depth", 2)

    ahead = llm.generate(prompts(len(wanted)), wanted)

    assert [one.token_ids for one in ahead] == [one.token_ids for one in expected]
    assert [one.text for one in ahead] == [one.text for one in expected]


@pytest.mark.parametrize("depth", [1, 2])
def test_masks_without_a_thread_of_their_own_are_the_same(
    llm: LLM, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = mixed()
    expected = llm.generate(prompts(len(wanted)), wanted)
    worker = llm.worker
    monkeypatch.setattr(ModelWorker, "pipeline_depth", depth)
    monkeypatch.setattr(
        worker, "_masks", GrammarMaskBuilder(worker._grammars, worker.model.device, launches_async=True)
    )

    generations = llm.generate(prompts(len(wanted)), wanted)

    assert [one.token_ids for one in generations] == [one.token_ids for one in expected]


def test_padded_steps_give_the_same(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = mixed(6)
    expected = llm.generate(prompts(6), wanted)
    monkeypatch.setattr(
        llm.worker._runner, "captured_shape", lambda shape: graph_shape_for(shape, H200_GRAPHS) or shape
    )
    ops.use_backend(ops.REFERENCE)  # the ops of the CPU backend are never padded

    outs = llm.generate(prompts(6), wanted)
    ops.use_backend("cpu")

    assert [one.token_ids for one in outs] == [one.token_ids for one in expected]


def test_preemption_changes_nothing(llm: LLM, small_folder: str) -> None:
    wanted = [params(i, grammar=GrammarSpec("regex", "[0-9]{40,50}")) for i in range(8)]
    expected = llm.generate(prompts(8), wanted)
    small = LLM(small_folder, device="cpu", max_total_token_num=200)
    small.generate(prompts(40), params(max_new_tokens=2))  # the scheduler now expects short outputs

    paused = small.generate(prompts(8), wanted)

    assert small._scheduler.num_preemptions > 0
    assert [one.text for one in paused] == [one.text for one in expected]


def test_a_complete_output_ends_whatever_the_other_rules_are(llm: LLM) -> None:
    spec = choice_grammar(["abc", "12"])
    wanted = [params(grammar=spec, **rules) for rules in ({}, {"min_new_tokens": 30}, {"ignore_eos": True})]

    for generation in llm.generate(prompts(3), wanted):
        assert generation.text in ("abc", "12")
        assert generation.finish_reason is FinishReason.STOP
        assert EOS not in generation.token_ids


def test_an_output_that_could_continue_continues_until_it_may_end(llm: LLM) -> None:
    spec = GrammarSpec("regex", "[ab]*")
    early, late, never = llm.generate(
        prompts(3),
        [
            params(grammar=spec, logit_bias={EOS: 100}),
            params(grammar=spec, logit_bias={EOS: 100}, min_new_tokens=7),
            params(grammar=spec, logit_bias={EOS: 100}, ignore_eos=True),
        ],
    )

    assert (early.text, early.finish_reason) == ("", FinishReason.STOP)
    assert len(late.token_ids) == 8
    assert late.finish_reason is FinishReason.STOP
    assert re.fullmatch("[ab]+", late.text)
    assert (len(never.token_ids), never.finish_reason) == (60, FinishReason.LENGTH)


def test_rules_that_leave_no_token_end_only_their_request(llm: LLM) -> None:
    letter = TOKENIZER.token_to_id("x") or 0
    stuck = [
        params(grammar=DIGITS, allowed_token_ids=(letter,)),
        params(grammar=choice_grammar(["xy"]), bad_words_ids=((letter,), (TOKENIZER.token_to_id("xy") or 0,))),
        params(grammar=GrammarSpec("regex", "a{5}"), allowed_token_ids=(0,), bad_words_ids=((0, 0),)),
    ]
    free, *failed = llm.generate(prompts(4), [params(grammar=DIGITS), *stuck])

    assert free.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
    for generation in failed:
        assert generation.finish_reason is FinishReason.ABORT
        assert "no token is left" in (generation.error or "")
    assert [one.text for one in failed] == ["", "", "a"]


def test_a_grammar_that_does_not_compile_ends_only_its_request(llm: LLM) -> None:
    failed, other = llm.generate(prompts(2), [params(grammar=GrammarSpec("regex", "(")), params()])

    assert "cannot be used" in (failed.error or "")
    assert other.error is None


def test_logprobs_are_the_models_own(llm: LLM) -> None:
    constrained = llm.generate([PROMPT], params(grammar=choice_grammar(["12"]), logprobs=5))[0]
    free = llm.generate([PROMPT], params(logprobs=5, max_new_tokens=1))[0]

    assert constrained.top_logprobs[0] == free.top_logprobs[0]
    assert all(logprob < 0 for logprob in constrained.logprobs)


def test_a_model_without_a_tokenizer_refuses_grammars(tmp_path: Path, small_folder: str) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((Path(small_folder) / name).read_bytes())
    llm = LLM(str(tmp_path), device="cpu", max_total_token_num=200, load_format="dummy")

    generation = llm.generate([PROMPT], params(grammar=DIGITS))[0]

    assert "no tokenizer" in (generation.error or "")


def test_a_request_that_enters_again_continues_where_it_was(small_folder: str) -> None:
    grammars = GrammarManager(resolve(small_folder), 131)
    output_ids = TOKENIZER.encode("12-")
    spec = GrammarSpec("regex", "[0-9]+-[ab]")
    new = NewReq(0, [*PROMPT, *output_ids], SamplingParams(grammar=spec), 0, (EOS,), output_len=len(output_ids))

    grammar = grammars.start(new)

    assert grammar is not None
    (mask,) = grammars.masks([grammar], [()])
    assert [i for i in range(131) if mask[i // 32] >> (i % 32) & 1] == [
        TOKENIZER.token_to_id("a"),
        TOKENIZER.token_to_id("b"),
    ]


def test_forbidden_ends_stay_allowed_if_nothing_else_may_come(small_folder: str) -> None:
    grammars = GrammarManager(resolve(small_folder), 131)
    both = [
        grammars.start(NewReq(i, PROMPT, SamplingParams(grammar=GrammarSpec("regex", text)), 0, (EOS,)))
        for i, text in enumerate(("a*", ""))
    ]

    masks = grammars.masks(both, [(EOS,), (EOS,)])

    assert [bool(mask[EOS // 32] >> (EOS % 32) & 1) for mask in masks] == [False, True]


@pytest.mark.parametrize("vocab_size", [131, 4000])  # of the model, which may have more tokens than the tokenizer
def test_a_step_has_the_same_masks_as_each_grammar_alone(small_folder: str, vocab_size: int) -> None:
    grammars = GrammarManager(resolve(small_folder), vocab_size)
    texts = ["[ab]*", "1", "[ab]*", "[0-9]+", "", "[ab]*", "1"] * 3
    started = [
        grammars.start(NewReq(i, PROMPT, SamplingParams(grammar=GrammarSpec("regex", text)), 0, (EOS,)))
        for i, text in enumerate(texts)
    ]
    step = [*started[:3], None, *started[3:]]
    forbidden = [(EOS, 5000) if i % 2 else () for i in range(len(step))]

    masks = grammars.masks(step, forbidden)

    assert masks.shape == (len(step), -(-vocab_size // 32))
    for grammar, ends, mask in zip(step, forbidden, masks, strict=True):
        (alone,) = grammars.masks([grammar], [ends])
        assert mask.tolist() == alone.tolist()
    assert (masks[3] == -1).all()


def test_eight_requests_of_a_grammar_share_a_lexer(small_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightserve.worker.sampling.grammar.available_cores", lambda: 16)
    grammars = GrammarManager(resolve(small_folder), 131)

    started = [grammars.start(NewReq(i, PROMPT, SamplingParams(grammar=DIGITS), 0, (EOS,))) for i in range(40)]

    lexers = [grammar.lexer_id for grammar in started if grammar is not None]
    assert len(set(lexers)) == 4
    assert lexers[:32] == [lexer for lexer in dict.fromkeys(lexers) for _ in range(8)]
    assert lexers[32:] == lexers[:8]
    masks = grammars.masks(started, [()] * 40)
    assert all(mask.tolist() == masks[0].tolist() for mask in masks)


def test_a_prepared_grammar_is_compiled_for_all_requests(small_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightserve.worker.sampling.grammar.available_cores", lambda: 16)
    grammars = GrammarManager(resolve(small_folder), 131)
    made: list[GrammarSpec] = []
    llguidance = compiler_module._llguidance

    def counted(spec: GrammarSpec, special_tokens: frozenset[str]) -> str:
        made.append(spec)
        return llguidance(spec, special_tokens)

    monkeypatch.setattr(compiler_module, "_llguidance", counted)
    grammars.compile_grammar(DIGITS, (EOS,))
    assert made == [DIGITS] * LANES

    grammars.compile_grammar(DIGITS, (EOS,))
    started = [grammars.start(NewReq(i, PROMPT, SamplingParams(grammar=DIGITS), 0, (EOS,))) for i in range(40)]
    assert all(grammar is not None and grammar.matcher is not None for grammar in started)

    assert made == [DIGITS] * LANES


def test_a_large_grammar_is_compiled_once(small_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightserve.worker.sampling.grammar.available_cores", lambda: 16)
    grammars = GrammarManager(resolve(small_folder), 131)
    large = GrammarSpec("regex", "[0-9]+", memory_mib=LARGE_MIB + 1)

    grammars.compile_grammar(large, (EOS,))
    started = [grammars.start(NewReq(i, PROMPT, SamplingParams(grammar=large), 0, (EOS,))) for i in range(40)]

    assert all(grammar is not None and grammar.matcher is not None for grammar in started)
    assert len({grammar.lexer_id for grammar in started if grammar is not None}) == 1
    assert [lane.find(large) is not None for lane in grammars._compilers_for((EOS,))] == [True, *[False] * (LANES - 1)]


def test_cached_grammars_are_dropped_when_the_heap_has_grown(
    small_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars = GrammarManager(resolve(small_folder), 131)
    heap = allocated_bytes()
    monkeypatch.setattr("lightserve.worker.sampling.grammar.allocated_bytes", lambda: heap)
    first, second, third = (GrammarSpec("regex", text) for text in ("1", "2", "3"))
    grammars.compile_grammar(first, (EOS,))

    heap += MAX_GROWTH_BYTES + 2**20
    grammars.compile_grammar(second, (EOS,))
    grammars.compile_grammar(third, (EOS,))

    lane = grammars._compilers_for((EOS,))[0]
    assert [lane.find(spec) is not None for spec in (first, second, third)] == [False, True, True]


def test_a_lexer_that_reached_its_limit_fails_no_other_request(
    small_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Matchers of one grammar share a lexer, and its errors."""
    limits = LLParserLimits(max_lexer_states=100, verbose_errors=False)
    monkeypatch.setattr(compiler_module, "LIMITS", limits)
    grammars = GrammarManager(resolve(small_folder), 131)
    spec = GrammarSpec("regex", "(a|b|c|x)*a(a|b|c|x){14}")

    def error_of(text: str) -> str | None:
        grammar = grammars.start(NewReq(0, PROMPT, SamplingParams(grammar=spec), 0, (EOS,)))
        assert grammar is not None
        for token_id in TOKENIZER.encode(text):
            grammars.masks([grammar], [()])
            grammar.advance(token_id)
        return grammar.error

    assert error_of("".join(random.Random(0).choices("abcx", k=300))) is not None
    assert error_of("".join(random.Random(1).choices("abcx", k=12))) is None


def test_the_first_request_with_a_grammar_has_it_compiled_for_all_lanes(
    small_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightserve.worker.sampling.grammar.available_cores", lambda: 16)
    grammars = GrammarManager(resolve(small_folder), 131)

    started = grammars.start(NewReq(0, PROMPT, SamplingParams(grammar=DIGITS), 0, (EOS,)))
    assert started is not None
    assert started.matcher is not None
    for compiled in grammars._compiling.get((DIGITS, (EOS,)), []):
        compiled.result(DEADLINE_S)

    assert [lane.find(DIGITS) is not None for lane in grammars._compilers_for((EOS,))] == [True] * LANES


def test_a_request_does_not_wait_for_the_compilation_of_other_grammars(
    small_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars = GrammarManager(resolve(small_folder), 131)
    grammars.compile_grammar(DIGITS, (EOS,))
    may_compile, is_compiling = threading.Event(), threading.Event()
    compile_now = GrammarCompiler.compile

    def compile_slowly(compiler: GrammarCompiler, spec: GrammarSpec) -> LLMatcher:
        is_compiling.set()
        assert may_compile.wait(DEADLINE_S)
        return compile_now(compiler, spec)

    monkeypatch.setattr(GrammarCompiler, "compile", compile_slowly)
    compiling = threading.Thread(target=grammars.compile_grammar, args=(GrammarSpec("regex", "[ab]*"), (EOS,)))
    compiling.start()
    assert is_compiling.wait(DEADLINE_S)

    started = grammars.start(NewReq(0, PROMPT, SamplingParams(grammar=DIGITS), 0, (EOS,)))
    assert started is not None
    assert started.matcher is not None  # would wait until the test gives up
    may_compile.set()
    compiling.join(DEADLINE_S)

    assert all(lane.find(GrammarSpec("regex", "[ab]*")) is not None for lane in grammars._compilers_for((EOS,)))


def test_a_grammar_that_does_not_compile_is_an_error_of_its_request_alone(llm: LLM) -> None:
    llm.worker.compile_grammar(CompileGrammar(GrammarSpec("regex", "("), (EOS,)))

    with pytest.raises(InvalidRequestError, match="cannot be used"):
        llm.worker._grammars.compile_grammar(GrammarSpec("regex", "("), (EOS,))


def test_an_output_is_free_after_its_prefix(llm: LLM) -> None:
    free = [params(i, grammar=GrammarSpec("prefix", text)) for i, text in enumerate(("abc", "12-", "{", "x y z"))]
    wanted = [
        *free,
        *(one.replace(hidden_chars=len(one.sampling.grammar.text)) for one in free if one.sampling.grammar),
    ]

    generations = llm.generate(prompts(4) * 2, wanted)
    shown, hidden = generations[:4], generations[4:]

    for one, other, sampling in zip(shown, hidden, free, strict=True):
        assert sampling.sampling.grammar is not None
        assert one.text == sampling.sampling.grammar.text + other.text
        assert one.token_ids == other.token_ids
        assert len(one.token_ids) > 20 or one.finish_reason is FinishReason.STOP
    sampled = {token for one in shown for token in one.token_ids}
    assert max(sampled) > EOS  # tokens without a text, which no grammar would allow


def test_a_prefix_is_kept_with_two_steps_in_flight_and_through_preemption(
    llm: LLM, small_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = [params(i, grammar=GrammarSpec("prefix", "ab12-" * 8), ignore_eos=True) for i in range(8)]
    expected = llm.generate(prompts(8), wanted)
    small = LLM(small_folder, device="cpu", max_total_token_num=200)
    small.generate(prompts(40), params(max_new_tokens=2))  # the scheduler now expects short outputs
    monkeypatch.setattr(ModelWorker, "pipeline_depth", 2)

    ahead, paused = llm.generate(prompts(8), wanted), small.generate(prompts(8), wanted)

    assert small._scheduler.num_preemptions > 0
    assert all(one.text.startswith("ab12-" * 8) for one in expected)
    assert [one.token_ids for one in ahead] == [one.token_ids for one in expected]
    assert [one.token_ids for one in paused] == [one.token_ids for one in expected]


def test_an_output_with_a_prefix_ends_no_sooner_than_it_may(llm: LLM) -> None:
    spec = GrammarSpec("prefix", "ab")
    early, late = llm.generate(
        prompts(2),
        [params(grammar=spec, logit_bias={EOS: 100}, min_new_tokens=least) for least in (0, 30)],
    )

    assert early.text == "ab"
    assert len(late.token_ids) == 31
    assert early.finish_reason is late.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("output", ["ab", "ab12", "abxyx"])
def test_a_request_that_enters_again_after_its_prefix_is_free(small_folder: str, output: str) -> None:
    grammars = GrammarManager(resolve(small_folder), 131)
    ids = [*TOKENIZER.encode(output), EOS, 130]
    new = NewReq(
        0, [*PROMPT, *ids], SamplingParams(grammar=GrammarSpec("prefix", "ab")), 0, (EOS,), output_len=len(ids)
    )

    grammar = grammars.start(new)

    assert grammar is not None
    (mask,) = grammars.masks([grammar], [()])
    assert (mask == -1).all()
    assert grammar.is_unconstrained
    assert grammar.error is None


def test_a_grammar_that_failed_stays_failed() -> None:
    future: Future[LLMatcher] = Future()
    future.set_exception(InvalidRequestError("broken"))
    grammar = ReqGrammar(future)

    grammar.advance(5)

    assert grammar.error == "broken"
    assert not grammar.is_complete
