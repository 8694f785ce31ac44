"""A request whose rules leave no token ends with an error that says so, and disturbs no other request."""

from __future__ import annotations

from typing import Any

import pytest

from lightserve.common.parallel import Parallel
from lightserve.config import WorkerConfig
from lightserve.messages.params import FinishReason, GenerationParams, GrammarSpec, SamplingParams
from lightserve.messages.step import NewReq, Step, StepRow
from lightserve.model_files.source import resolve
from lightserve.offline.llm import LLM
from lightserve.text.grammar.specs import choice_grammar
from lightserve.worker.worker import ModelWorker
from test.small_text import small_tokenizer

TOKENIZER = small_tokenizer()
PROMPT = [3, 1, 4, 1, 5]
X = TOKENIZER.token_to_id("x") or 0
AT_ONCE: list[dict[str, Any]] = [
    {"allowed_token_ids": (4,), "bad_words_ids": ((4,),)},
    {"allowed_token_ids": (4, 5), "first_allowed_token_ids": (6,)},
    {"allowed_token_ids": (4,), "stop_token_ids": (4,), "min_new_tokens": 5},
    {"grammar": GrammarSpec("regex", "[0-9]{2,30}"), "allowed_token_ids": (X,)},
    {"grammar": choice_grammar(["x"]), "bad_words_ids": ((X,),)},
]
IN_STEP = GrammarSpec("regex", "[yz]aside")  # the vocabulary has no token for the text after "a"


@pytest.fixture(scope="module")
def llm(small_folder: str) -> LLM:
    return LLM(small_folder, device="cpu", max_total_token_num=2000)


def params(**fields: Any) -> GenerationParams:
    return GenerationParams.of(**{"max_new_tokens": 8, "ignore_eos": "min_new_tokens" not in fields, **fields})


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"seed": 1}, {"seed": 1, "top_k": 3, "typical_p": 0.8}])
@pytest.mark.parametrize("rules", AT_ONCE, ids=lambda rules: "-".join(rules))
def test_rules_that_leave_no_token_end_the_request_with_an_error(
    llm: LLM, rules: dict[str, Any], sampling: dict[str, Any], depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelWorker, "pipeline_depth", depth)
    (alone,) = llm.generate([PROMPT], params(**sampling))

    first, stuck, last = llm.generate([PROMPT] * 3, [params(**one) for one in (sampling, sampling | rules, sampling)])

    assert stuck.error is not None
    assert stuck.error.startswith("no token is left that the request's rules allow")
    assert stuck.finish_reason is FinishReason.ABORT
    assert stuck.token_ids == []
    assert first.token_ids == last.token_ids == alone.token_ids
    assert len(alone.token_ids) == 8


@pytest.mark.parametrize("depth", [1, 2])
def test_a_rule_that_leaves_no_token_later_keeps_the_tokens_before(
    llm: LLM, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelWorker, "pipeline_depth", depth)

    (stuck,) = llm.generate([PROMPT], params(allowed_token_ids=(4,), bad_words_ids=((4, 4),)))

    assert stuck.token_ids == [4]
    assert "no token is left" in (stuck.error or "")


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_mask_that_leaves_no_token_ends_a_request_that_the_step_itself_samples(
    llm: LLM, depth: int, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelWorker, "pipeline_depth", depth)

    free, stuck = llm.generate(
        [PROMPT] * 2, [params(temperature=temperature), params(temperature=temperature, grammar=IN_STEP)]
    )

    assert stuck.text[1:] == "a"
    assert "no token is left" in (stuck.error or "")
    assert free.error is None


def test_the_error_is_of_the_client(small_folder: str) -> None:
    """HTTP status 400: the request is wrong, not the server."""
    config = WorkerConfig(model_dir=small_folder, device="cpu", max_total_token_num=100)
    worker = ModelWorker(config, resolve(small_folder), Parallel())
    sampling = SamplingParams(allowed_token_ids=(4,), bad_words_ids=((4,),))

    result = worker.run(Step([StepRow(1, list(range(5)))], [NewReq(1, PROMPT, sampling, seed=0)]))

    assert [(failure.req_id, failure.status) for failure in result.failed] == [(1, 400)]
    assert result.tokens == []
