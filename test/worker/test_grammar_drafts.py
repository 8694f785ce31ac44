"""Drafts of requests with a grammar: what it allows and forces is drafted, and every row has its own mask."""

from __future__ import annotations

import pytest

from lightserve.messages.int_arrays import GrowingArray, int32s, int64s
from lightserve.messages.params import FinishReason, GenerationParams, GrammarSpec
from lightserve.messages.step import NewReq
from lightserve.model_files.source import resolve
from lightserve.offline.llm import LLM
from lightserve.worker.batch.infer_req import InferReq
from lightserve.worker.sampling.grammar import GrammarManager
from lightserve.worker.sampling.verification import NO_DRAFT
from lightserve.worker.speculation.grammar_drafts import GrammarDrafts
from lightserve.worker.worker import ModelWorker
from test.small_text import small_tokenizer
from test.worker.test_draft_graphs import RerunGraphs, graphs  # noqa: F401
from test.worker.test_ngram import (
    CONFIG,
    GRAMMARS,
    GREEDY,
    SEEDED,
    VOCAB,
    assert_same,
    make,
    num_accepted,
    params_of,
    predicted,
    prompts_of,
)

TOKENIZER = small_tokenizer()
REGEX = "[0-9]{2,9} (true|false)x"


@pytest.fixture(scope="module")
def grammars(small_folder: str) -> GrammarManager:
    return GrammarManager(resolve(small_folder), VOCAB)


@pytest.fixture(scope="module")
def plain(small_folder: str) -> LLM:
    return make(small_folder, None)


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text)


def req_after(grammars: GrammarManager, text: str, spec: GrammarSpec) -> InferReq:
    """A request with this output."""
    output = ids(text)
    sampling = GenerationParams.of(grammar=spec).sampling
    new = NewReq(3, int32s([1, *output]), sampling, 0, (0,), output_len=len(output))
    return InferReq(3, 0, GrowingArray(new.token_ids), 1, new.sampling, 0, (0,), grammar=grammars.start(new))


def allowed(drafts: GrammarDrafts, req: InferReq, draft_ids: list[int], missing: int = 1) -> list[int]:
    """``missing``: known tokens that are not computed."""
    counts, computed = int64s([len(draft_ids)]), int64s([req.known_len - missing])
    ids_left: list[int] = drafts.allowed([req], counts, computed, int64s(draft_ids)).tolist()
    return ids_left


def test_drafts_end_before_the_first_that_the_grammar_forbids(grammars: GrammarManager) -> None:
    req, drafts = req_after(grammars, "12", GrammarSpec("regex", REGEX)), GrammarDrafts()
    digits, wrong = ids("3") + ids("4"), ids("x")

    assert allowed(drafts, req, [*digits, *wrong, *digits]) == digits + [NO_DRAFT] * len(wrong + digits)
    assert drafts.after(req, len(digits)) is not None
    assert drafts.after(req, len(digits) + 1) is None


def test_what_the_grammar_forces_is_drafted_whatever_was_proposed(grammars: GrammarManager) -> None:
    req, drafts = req_after(grammars, "12 t", GrammarSpec("regex", REGEX)), GrammarDrafts()
    forced = req.grammar.forced() if req.grammar is not None else []

    assert forced
    assert allowed(drafts, req, [NO_DRAFT] * len(forced)) == forced


def test_there_are_no_drafts_before_tokens_that_are_forced_already(grammars: GrammarManager) -> None:
    req = req_after(grammars, "12", GrammarSpec("regex", REGEX))

    assert allowed(GrammarDrafts(), req, ids("3"), missing=2) == [NO_DRAFT] * len(ids("3"))


def test_the_state_of_the_request_does_not_change(grammars: GrammarManager) -> None:
    req, drafts = req_after(grammars, "12", GrammarSpec("regex", REGEX)), GrammarDrafts()
    mask = grammars.masks([req.grammar], [()])

    draft_ids = allowed(drafts, req, ids("3 t"))

    after = grammars.masks([req.grammar, drafts.after(req, len(draft_ids))], [(), ()])
    assert (after[0] == mask[0]).all()
    assert (after[1] != mask[0]).any()


def test_free_text_behind_a_prefix_is_drafted_freely(grammars: GrammarManager) -> None:
    req, drafts = req_after(grammars, "a dead bee", GrammarSpec("prefix", "a dead bee")), GrammarDrafts()
    assert req.grammar is not None
    assert req.grammar.matcher is None

    assert allowed(drafts, req, [5, 9, 7]) == [5, 9, 7]


def test_captured_steps_of_an_asynchronous_device_give_the_same_text(
    small_folder: str,
    plain: LLM,
    graphs: list[RerunGraphs],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There, the thread that launches a step makes its masks, and a step has all drafts, proposed or not."""
    params = [params_of(GREEDY if n % 2 else SEEDED, grammar) for n, grammar in enumerate(GRAMMARS.values())]
    prompts = prompts_of(len(params), seed=2)
    expected = plain.generate(prompts, params)
    monkeypatch.setattr(ModelWorker, "pipeline_depth", 2)
    llm = make(small_folder, CONFIG)
    assert isinstance(llm.worker, ModelWorker)
    llm.worker.capture()

    drafted = llm.generate(prompts, [predicted(*pair) for pair in zip(params, expected, strict=True)])

    assert_same(drafted, expected)
    assert num_accepted(drafted) > 20
    assert any(shape.num_drafts for shape, count in graphs[-1].replays.items() if count)


def test_an_accepted_draft_that_completes_the_grammar_ends_the_request(small_folder: str, plain: LLM) -> None:
    """Though no token may follow it. In some of these lengths it is not the last draft of its step."""
    specs = [GrammarSpec("regex", f"[0-9]{{{length}}}(1|2)") for length in range(20, 28)]
    digits = {"allowed_token_ids": tuple(token for digit in "0123456789" for token in ids(digit))}  # no end token
    params = [params_of(GREEDY, {"grammar": spec}, digits, more) for spec in specs for more in ({}, {"logprobs": 2})]
    prompts = prompts_of(len(params))
    expected = plain.generate(prompts, params)
    assert {(generation.finish_reason, generation.error) for generation in expected} == {(FinishReason.STOP, None)}

    exactly = [of.replace(prediction_ids=tuple(one.token_ids)) for of, one in zip(params, expected, strict=True)]
    drafted = make(small_folder, CONFIG).generate(prompts, exactly)

    assert_same(drafted, expected)
    assert num_accepted(drafted) > 0
