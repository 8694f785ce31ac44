"""Beam search: the search alone against an exhaustive one, and on the engine against transformers."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models

from lightserve.errors import InvalidRequestError
from lightserve.messages.params import FinishReason
from lightserve.messages.step import Step
from lightserve.offline.llm import LLM
from lightserve.text.beam_search import BeamParams, BeamResult, BeamSearch, Candidates
from lightserve.worker.rpc import GetResult
from test.models.tiny import build_hf
from test.real_model import PROMPTS, transformers_smollm2

END = 0
IDS = [[5, 17, 3, 99, 42], [77, 2, 130], [64], list(range(1, 40))]


def table(vocab: int, length: int, seed: int) -> dict[tuple[int, ...], list[float]]:
    """A toy model: the logprobs of the next token after every sequence shorter than ``length``."""
    draw = random.Random(seed)
    places = itertools.chain.from_iterable(itertools.product(range(vocab), repeat=n) for n in range(length))
    return {place: _log_softmax([draw.gauss(0, 1.5) for _ in range(vocab)]) for place in places}


def _log_softmax(logits: list[float]) -> list[float]:
    total = math.log(sum(map(math.exp, logits)))
    return [logit - total for logit in logits]


def searched(
    params: BeamParams, next_logprobs: Callable[[tuple[int, ...]], list[float]], ends: Sequence[int] = (END,)
) -> BeamSearch:
    search = BeamSearch(params, ends)
    while not search.is_done:
        search.advance([_top_tokens(next_logprobs(beam), search.num_candidates) for beam in search.beams])
    return search


def _top_tokens(logprobs: list[float], count: int) -> Candidates:
    return sorted(enumerate(logprobs), key=lambda pair: -pair[1])[:count]


def all_sequences(model: dict[tuple[int, ...], list[float]], vocab: int, length: int) -> list[tuple[float, list[int]]]:
    """Every sequence that ends, or is as long as may be, with its logprob."""
    found = []
    for ids in itertools.chain.from_iterable(itertools.product(range(vocab), repeat=n + 1) for n in range(length)):
        if END not in ids[:-1] and (ids[-1] == END or len(ids) == length):
            found.append((sum(model[ids[:i]][token] for i, token in enumerate(ids)), list(ids)))
    return found


@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("seed", range(5))
def test_with_a_beam_for_every_prefix_the_search_is_exhaustive(seed: int, length_penalty: float) -> None:
    model = table(vocab=4, length=3, seed=seed)
    # 3 prefixes of one token that have not ended and 9 of two: 12 beams drop none of 12 continuations and 36 candidates
    params = BeamParams(num_beams=12, n=1, max_new_tokens=3, length_penalty=length_penalty, early_stopping="never")

    [best] = searched(params, lambda ids: model[ids]).best()

    by_score = max(all_sequences(model, 4, 3), key=lambda one: one[0] / len(one[1]) ** length_penalty)
    assert best.token_ids == by_score[1]
    assert best.score == pytest.approx(by_score[0] / len(by_score[1]) ** length_penalty)
    assert best.finish_reason is (FinishReason.STOP if best.token_ids[-1] == END else FinishReason.LENGTH)


def test_one_beam_is_the_greedy_search() -> None:
    model = table(vocab=4, length=6, seed=1)
    greedy: tuple[int, ...] = ()
    while END not in greedy and len(greedy) < 6:
        greedy += (max(range(4), key=model[greedy].__getitem__),)

    [best] = searched(BeamParams(num_beams=1, max_new_tokens=6), lambda ids: model[ids]).best()

    assert best.token_ids == list(greedy)


def test_a_beam_search_finds_a_better_sequence_than_greedy_search() -> None:
    logprobs = {(): [0.0, 0.6, 0.4], (1,): [0.4, 0.3, 0.3], (2,): [0.9, 0.05, 0.05]}
    logs = {ids: [math.log(p or 1e-9) for p in row] for ids, row in logprobs.items()}

    [best] = searched(BeamParams(num_beams=2, max_new_tokens=2), lambda ids: logs[ids]).best()

    assert best.token_ids == [2, END]
    assert best.score == pytest.approx(math.log(0.4 * 0.9) / 2)


def test_many_end_tokens_leave_enough_beams_to_continue() -> None:
    """The most likely tokens of every beam end it: the search continues with lower ranks."""
    logprobs = [-1.0, -1.1, -1.2, -3.0, -3.1]

    search = BeamSearch(BeamParams(num_beams=2, max_new_tokens=9), eos_ids=(0, 1, 2))
    search.advance([_top_tokens(logprobs, search.num_candidates)])

    assert search.num_candidates == 5
    assert search.beams == [(3,), (4,)]


def test_end_tokens_can_be_ignored_and_stop_tokens_added() -> None:
    model = table(vocab=4, length=4, seed=3)
    params = BeamParams(num_beams=3, n=3, max_new_tokens=4, ignore_eos=True, stop_token_ids=(2,))

    results = searched(params, lambda ids: model[ids]).best()

    assert all(2 not in result.token_ids[:-1] for result in results)
    assert {result.token_ids[-1] == 2 for result in results if result.finish_reason is FinishReason.STOP} <= {True}
    assert any(END in result.token_ids for result in results)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_beams": 0},
        {"num_beams": 21},
        {"num_beams": 2.0},
        {"num_beams": True},
        {"n": 5},
        {"n": 0},
        {"max_new_tokens": 0},
        {"length_penalty": float("nan")},
        {"length_penalty": 11.0},
        {"early_stopping": "always"},
        {"early_stopping": None},
    ],
)
def test_parameters_out_of_range_are_refused_by_name(wrong: dict[str, Any]) -> None:
    name = next(iter(wrong))

    with pytest.raises(InvalidRequestError, match=name) as refused:
        BeamParams(**wrong)

    assert refused.value.param == name


def test_more_beams_and_end_tokens_than_the_engine_has_top_logprobs_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="at most 17 with 3 end tokens"):
        BeamSearch(BeamParams(num_beams=18), eos_ids=(0, 1, 2))


class Tiny:
    """A random model of 131 tokens, in transformers and in the engine."""

    def __init__(self, name: str, folder: Path) -> None:
        self.hf = build_hf(name)
        self.hf.generation_config.eos_token_id = None  # each test sets its end tokens
        self.hf.save_pretrained(folder)
        words = models.WordLevel({f"w{i}": i for i in range(131)}, unk_token="w0")
        Tokenizer(words).save(str(folder / "tokenizer.json"))
        self.llm = LLM(str(folder), data_type="float32", max_total_token_num=512, running_max_req_size=5, device="cpu")

    def likely(self, ids: list[int], count: int) -> tuple[int, ...]:
        """Tokens that the greedy text has: as ends, they do occur."""
        whole = self.hf.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, pad_token_id=0)
        new = whole[0, len(ids) :].tolist()
        return tuple(dict.fromkeys(new[2:]))[:count]


@pytest.fixture(scope="module", params=["llama-gqa", "qwen3", "bloom-8-heads"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny(request.param, tmp_path_factory.mktemp(request.param))


def transformers_beams(hf: Any, prompt: list[int], params: BeamParams, ends: Sequence[int]) -> list[BeamResult]:
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = hf.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=params.num_beams,
            num_return_sequences=params.n,
            max_new_tokens=params.max_new_tokens,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            eos_token_id=list(ends) or None,
            pad_token_id=0,
            do_sample=False,
            output_scores=True,
            return_dict_in_generate=True,
        )
    rows = zip(out.sequences[:, len(prompt) :].tolist(), out.beam_indices.tolist(), strict=True)
    kept = [row[: sum(index >= 0 for index in indices)] for row, indices in rows]  # the rest pads
    reasons = [FinishReason.STOP if row[-1] in ends else FinishReason.LENGTH for row in kept]
    return [BeamResult(*one) for one in zip(kept, out.sequences_scores.tolist(), reasons, strict=True)]


def assert_same(ours: list[BeamResult], theirs: list[BeamResult]) -> None:
    assert [one.token_ids for one in ours] == [one.token_ids for one in theirs]
    assert [one.score for one in ours] == pytest.approx([one.score for one in theirs], abs=1e-4)
    assert [one.finish_reason for one in ours] == [one.finish_reason for one in theirs]


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [-1.0, 1.0, 2.0])
def test_beams_are_the_sequences_of_transformers(tiny: Tiny, length_penalty: float, early_stopping: Any) -> None:
    reasons = set()
    for num_ends, prompt in itertools.product((1, 3), IDS):
        ends = tiny.likely(prompt, num_ends)
        params = BeamParams(
            num_beams=4,
            n=4,
            max_new_tokens=12,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            ignore_eos=True,
            stop_token_ids=ends,
        )

        [ours] = tiny.llm.beam_search([prompt], params)

        assert_same(ours, transformers_beams(tiny.hf, prompt, params, ends))
        reasons |= {one.finish_reason for one in ours}
    assert FinishReason.STOP in reasons or length_penalty > 1  # which favours those that never end


@pytest.mark.parametrize("num_beams", [1, 2, 9])
def test_any_number_of_beams_gives_the_sequences_of_transformers(tiny: Tiny, num_beams: int) -> None:
    """More beams than the engine runs at once too."""
    ends = tiny.likely(IDS[0], num_beams % 4)
    params = BeamParams(num_beams=num_beams, n=num_beams, max_new_tokens=8, ignore_eos=True, stop_token_ids=ends)

    [ours] = tiny.llm.beam_search([IDS[0]], params)

    if num_beams > 1:
        assert_same(ours, transformers_beams(tiny.hf, IDS[0], params, ends))
    else:
        greedy = tiny.hf.generate(
            torch.tensor([IDS[0]]), max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=list(ends)
        )
        assert ours[0].token_ids == greedy[0, len(IDS[0]) :].tolist()


def test_prompts_searched_together_give_the_same_beams_as_alone(tiny: Tiny) -> None:
    params = BeamParams(num_beams=3, n=3, max_new_tokens=10, stop_token_ids=tiny.likely(IDS[1], 2))

    together = tiny.llm.beam_search(IDS, params)

    alone = [tiny.llm.beam_search([prompt], params)[0] for prompt in IDS]
    assert [[one.token_ids for one in beams] for beams in together] == [[one.token_ids for one in b] for b in alone]


def test_a_full_context_ends_a_beam_search(tiny: Tiny) -> None:
    room = 3
    prompt = [1 + i % 100 for i in range(tiny.llm.worker.longest_request - room)]

    [[best]] = tiny.llm.beam_search([prompt], BeamParams(max_new_tokens=50, ignore_eos=True))

    assert len(best.token_ids) == room
    assert best.finish_reason is FinishReason.LENGTH


def test_beams_share_the_kv_of_their_prefixes(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step computes one token a beam, whatever came before it; nothing is held in the end."""
    llm, prompt = tiny.llm, [3 + i for i in range(60)]
    steps: list[Step] = []
    launch = llm.worker.launch

    def counting(step: Step) -> GetResult:
        steps.append(step)
        return launch(step)

    monkeypatch.setattr(llm.worker, "launch", counting)
    llm.beam_search([prompt], BeamParams(num_beams=4, max_new_tokens=16, ignore_eos=True))

    computed = sum(len(row.slots) for step in steps for row in step.rows)
    assert computed == len(prompt) + 15 * 4  # the first step continues the prompts
    assert llm._scheduler.only_group.pool.used == 0


@pytest.mark.slow
@pytest.mark.long
def test_beams_on_the_default_model_are_the_sequences_of_transformers() -> None:
    llm = LLM(max_total_token_num=2000, data_type="float32", device="cpu", quantization="none")
    hf = transformers_smollm2()
    texts = [
        PROMPTS[0],
        PROMPTS[1],
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    ]
    params = BeamParams(num_beams=4, n=4, max_new_tokens=16)

    ours = llm.beam_search(texts, params)

    for text, beams in zip(texts, ours, strict=True):
        assert_same(beams, transformers_beams(hf, llm.tokenizer.encode(text), params, llm.eos_token_ids))
    assert any(one.finish_reason is FinishReason.STOP for beams in ours for one in beams)
    assert llm._scheduler.only_group.pool.used == 0
