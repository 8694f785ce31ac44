"""The sampler compared with transformers' processors for single requests, and with itself in other batches."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
import transformers
from torch import Tensor

import lightserve.common.triton_kernel  # noqa: F401  registers the backend
from lightserve.common import ops
from lightserve.messages.int_arrays import GrowingArray, int32s
from lightserve.messages.params import GenerationParams, SamplingParams
from lightserve.worker.batch.infer_req import InferReq
from lightserve.worker.sampling.req_rules import NgramBans
from lightserve.worker.sampling.sampler import NONE_ALLOWED, Sampler, SamplingPlan, make_plan
from lightserve.worker.sampling.token_history import SeenTokens

INF = float("inf")
VOCAB = 97
PROMPT = [5, 6, 7, 5, 90]
OUTPUT = [8, 8, 6, 9]
EOS = 11


def req_of(
    row: int = 0, *, seed: int = 0, prompt: list[int] | None = None, output: Any = OUTPUT, **params: Any
) -> InferReq:
    prompt = PROMPT if prompt is None else prompt
    known = GrowingArray([*prompt, *output])
    params.setdefault("max_new_tokens", 100)
    wanted = GenerationParams.of(**params)
    return InferReq(row, row, known, len(prompt), wanted.sampling, seed, (EOS,), wanted.stopping)


def append(req: InferReq, token: int) -> None:
    req.add_known([token])
    req.total_len += 1


def one_rank(local: Tensor) -> Tensor:
    """It has the logits of all tokens."""
    return local


def logits_of(batch: int, device: str = "cpu", seed: int = 0) -> Tensor:
    return (torch.randn(batch, VOCAB, generator=torch.Generator().manual_seed(seed)) * 1.2).to(device)


def oracle_scores(logits: Tensor, req: InferReq) -> Tensor:
    """The logits ``[1, vocab]`` of one row after transformers' processors, and plain Python for what it lacks."""
    ids = torch.tensor([req.token_ids.tolist()], device=logits.device)
    scores = decayed(penalised(biased(logits, req, ids), req, ids), req, ids)
    for warper in warpers_of(req.sampling):
        scores = warper(ids, scores)
    return scores


def biased(logits: Tensor, req: InferReq, ids: Tensor) -> Tensor:
    params, scores = req.sampling, logits.clone()
    if params.allowed_token_ids is not None:
        scores[:, others(params.allowed_token_ids)] = -INF
    if params.first_allowed_token_ids is not None and len(req.token_ids) == req.prompt_len:
        scores[:, others(params.first_allowed_token_ids)] = -INF
    if params.no_repeat_ngram_size:
        scores = transformers.NoRepeatNGramLogitsProcessor(params.no_repeat_ngram_size)(ids, scores)
    if params.bad_words_ids:
        words = [list(word) for word in params.bad_words_ids]
        scores = transformers.NoBadWordsLogitsProcessor(words)(ids, scores)
    if len(req.token_ids) - req.prompt_len < req.stopping.min_new_tokens:
        scores[:, [EOS, *req.stopping.stop_token_ids]] = -INF
    if params.logit_bias:
        bias = {(token,): float(value) for token, value in params.logit_bias.items()}
        scores = transformers.SequenceBiasLogitsProcessor(bias)(ids, scores)
    if params.watermark:
        scores[:, [token for token in range(VOCAB) if is_green(int(req.token_ids[-1]), token)]] += 2.0
    return scores


def is_green(last: int, token: int) -> bool:
    seed = last * 15485863
    return hash32(hash32(hash32(seed % 2**32) ^ seed >> 32) ^ token) < 2**31


def hash32(x: int) -> int:
    """lowbias32."""
    x = (x ^ x >> 16) * 0x7FEB352D % 2**32
    x = (x ^ x >> 15) * 0x846CA68B % 2**32
    return x ^ x >> 16


def others(token_ids: tuple[int, ...]) -> list[int]:
    return sorted(set(range(VOCAB)) - set(token_ids))


def penalised(logits: Tensor, req: InferReq, ids: Tensor) -> Tensor:
    scores: Tensor = transformers.RepetitionPenaltyLogitsProcessor(req.sampling.repetition_penalty)(ids, logits)
    output = req.token_ids[req.prompt_len :].tolist()
    for token in set(output):
        scores[:, token] -= req.sampling.presence_penalty + req.sampling.frequency_penalty * output.count(token)
    return scores


def decayed(logits: Tensor, req: InferReq, ids: Tensor) -> Tensor:
    decay = req.sampling.exponential_decay_length_penalty
    if decay is None:
        return logits
    scores: Tensor = transformers.ExponentialDecayLengthPenalty(decay, EOS, req.prompt_len)(ids, logits)
    return scores.where(logits.isfinite(), logits)  # not every version leaves an end alone that is forbidden


def warpers_of(params: SamplingParams) -> Iterator[Any]:
    if params.is_greedy:
        return
    yield transformers.TemperatureLogitsWarper(float(params.temperature))
    if params.top_k > 0:
        yield transformers.TopKLogitsWarper(params.top_k)
    if params.top_p < 1:
        yield transformers.TopPLogitsWarper(params.top_p)
    if params.min_p > 0:
        yield transformers.MinPLogitsWarper(params.min_p)
    if params.typical_p < 1:
        yield transformers.TypicalLogitsWarper(params.typical_p)


def oracle_token(logits: Tensor, req: InferReq) -> int:
    scores = oracle_scores(logits, req)
    if req.sampling.is_greedy:
        return int(scores.argmax())
    seed = torch.tensor([req.seed], device=logits.device)
    position = torch.tensor([len(req.token_ids)], dtype=torch.int32, device=logits.device)
    return int(ops.sample.impls[ops.REFERENCE](scores, torch.ones(1, device=logits.device), seed, position))


def sampler_of(logits: Tensor) -> Sampler:
    return Sampler(VOCAB, logits.device, torch.zeros(20_000, dtype=torch.int64, device=logits.device), one_rank)


def sample(logits: Tensor, reqs: list[InferReq], sampler: Sampler | None = None) -> list[int]:
    sampler = sampler or sampler_of(logits)
    return sampler.sample(sampler.prepare(reqs), logits, sampled_by_the_step(logits, reqs)).tolist()


def sampled_by_the_step(logits: Tensor, reqs: list[InferReq]) -> Tensor:
    """Of every row, by temperature alone. Tokens that the sampler must sample are replaced by a value that is none."""
    device = logits.device
    temperatures = torch.tensor([req.temperature for req in reqs], device=device)
    seeds = torch.tensor([req.seed for req in reqs], device=device)
    positions = torch.tensor([req.total_len for req in reqs], dtype=torch.int32, device=device)
    tokens = ops.sample(logits, temperatures, seeds, positions)
    return tokens.masked_fill(torch.tensor([req.rules.needs_sampler for req in reqs], device=device), -2)


@pytest.fixture(params=[ops.REFERENCE, "triton"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    name: str = request.param
    ops.use_backend(name)
    yield name
    ops.use_backend(ops.REFERENCE)


def device_of(backend: str) -> str:
    return "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"


TOP = logits_of(1)[0].topk(20).indices.tolist()  # the most likely tokens if nothing is forbidden

FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "top_k 1": {"top_k": 1},
    "plain": {},
    "cold": {"temperature": 0.3},
    "hot": {"temperature": 2.5},
    "top_k": {"top_k": 5},
    "top_k 0 is all": {"top_k": 0},
    "top_k 0 and top_p": {"top_k": 0, "top_p": 0.6},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.15},
    "typical_p": {"typical_p": 0.3},
    "typical_p and cut": {"typical_p": 0.6, "top_k": 12, "top_p": 0.9},
    "all cuts": {"temperature": 1.4, "top_k": 30, "top_p": 0.9, "min_p": 0.03},
    "repetition": {"temperature": 0, "repetition_penalty": 3.0},
    "repetition at random": {"repetition_penalty": 3.0, "logit_bias": {5: 5.0, 90: 4.5, 8: 4.6}},
    "presence": {"temperature": 0, "presence_penalty": 2.0, "logit_bias": {8: 5.0, 9: 5.5, 6: 4.5, 5: 4.0}},
    "frequency": {"frequency_penalty": 1.5, "logit_bias": {8: 5.0, 9: 5.5, 6: 4.5, 5: 4.0}},
    "penalties that favour": {"presence_penalty": -2.0, "frequency_penalty": -2.0, "repetition_penalty": 0.5},
    "logit_bias": {"logit_bias": {TOP[0]: -100, 40: 4.5, 41: 4.0}},
    "bad words": {
        "temperature": 0,
        "bad_words_ids": ((TOP[0],), (6, 9, TOP[1]), (9, TOP[2]), (5, 9, TOP[3]), (7, TOP[3])),
    },
    "bad words at random": {"bad_words_ids": ((TOP[0],), (9, TOP[1]), (8, 8, 6, 9, TOP[2]), (5,) * 20)},
    "allowed": {"allowed_token_ids": (3, 60, 61, TOP[5])},
    "allowed greedy": {"temperature": 0, "allowed_token_ids": (3, 60, 61, TOP[5])},
    "early end": {"min_new_tokens": 5, "stop_token_ids": (TOP[0], TOP[1])},
    "end in time": {"min_new_tokens": 4, "stop_token_ids": (TOP[0], TOP[1])},
    "no repeated token": {"no_repeat_ngram_size": 1, "logit_bias": {8: 9.0, 5: 8.0}},
    "no repeated pair": {"no_repeat_ngram_size": 2, "logit_bias": {8: 9.0, 6: 8.5, 9: 8.6}},
    "no repeated three": {"temperature": 0, "no_repeat_ngram_size": 3, "logit_bias": {8: 9.0, 6: 8.5}},
    "end likelier": {"exponential_decay_length_penalty": (2, 1.4), "logit_bias": {EOS: 2.0}},
    "length decay": {"temperature": 0, "exponential_decay_length_penalty": (7, 3.0)},
    "end likelier, yet forbidden": {"exponential_decay_length_penalty": (2, 1.4), "min_new_tokens": 9},
    "end as likely": {"exponential_decay_length_penalty": (0, 1.0)},
    "first allowed": {"first_allowed_token_ids": (3, 60, TOP[5])},
    "watermark": {"watermark": True},
    "watermark, greedy and penalised": {"watermark": True, "temperature": 0, "repetition_penalty": 1.5},
    "everything": {
        "temperature": 0.8,
        "top_k": 40,
        "top_p": 0.95,
        "min_p": 0.01,
        "typical_p": 0.9,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "logit_bias": {TOP[0]: -1.5, 9: 3.0, 70: 2.0},
        "bad_words_ids": ((TOP[1],), (9, TOP[2])),
        "allowed_token_ids": (*range(30), *TOP),
        "first_allowed_token_ids": (*range(20), *TOP),
        "watermark": True,
        "no_repeat_ngram_size": 2,
        "exponential_decay_length_penalty": (6, 1.3),
        "min_new_tokens": 9,
    },
}


@pytest.mark.parametrize("params", FEATURES.values(), ids=FEATURES)
def test_a_request_gets_the_tokens_that_the_logits_of_transformers_give(params: dict[str, Any]) -> None:
    samples = 500
    logits = logits_of(1)
    reqs = [req_of(seed, seed=seed, **params) for seed in range(samples)]

    tokens = sample(logits.expand(samples, -1), reqs)

    assert tokens == [oracle_token(logits, req) for req in reqs]


@pytest.mark.parametrize("params", [FEATURES[name] for name in ("hot", "top_p", "typical_p", "everything")])
def test_tokens_are_as_frequent_as_their_probabilities(params: dict[str, Any]) -> None:
    samples = 20_000
    logits = logits_of(1)
    probs = oracle_scores(logits, req_of(**params)).softmax(-1)[0]

    reqs = [req_of(seed, seed=seed, **params) for seed in range(samples)]
    tokens = torch.tensor(sample(logits.expand(samples, -1), reqs))

    error = tokens.bincount(minlength=VOCAB) / samples - probs
    assert (error.abs() <= 4 * (probs * (1 - probs) / samples).sqrt()).all()


def mixed_reqs() -> list[InferReq]:
    return [req_of(row, seed=1000 + row, **params) for row, params in enumerate(FEATURES.values())]


@pytest.mark.parametrize("order", [0, 1, 2])
def test_every_request_gets_the_same_token_alone_and_in_any_mixed_batch(backend: str, order: int) -> None:
    reqs = mixed_reqs()
    logits = logits_of(len(reqs), device_of(backend), seed=3)
    alone = [oracle_token(logits[i : i + 1], req) for i, req in enumerate(reqs)]
    places = random.Random(order).sample(range(len(reqs)), len(reqs) - order)

    tokens = sample(logits[places], [reqs[i] for i in places])

    assert tokens == [alone[i] for i in places]


def test_a_seed_gives_the_same_token_at_any_place_of_a_batch_and_another_one_another() -> None:
    logits = torch.zeros(40, VOCAB)

    same = sample(logits, [req_of(row, seed=7) for row in range(40)])
    other = sample(logits, [req_of(row, seed=row) for row in range(40)])

    assert len(set(same)) == 1
    assert len(set(other)) > 20


def test_a_seed_gives_other_tokens_at_other_positions() -> None:
    logits = torch.zeros(40, VOCAB)

    tokens = sample(logits, [req_of(row, seed=7, output=[1] * row) for row in range(40)])

    assert len(set(tokens)) > 20


def test_step_after_step_every_request_gets_what_the_oracle_gives() -> None:
    """Counts grow, bad words come up, ends become possible; requests leave, and others take their rows."""
    sampler = sampler_of(logits_of(1))
    reqs = mixed_reqs()
    for step in range(9):
        logits = logits_of(len(reqs), seed=step)
        expected = [oracle_token(logits[i : i + 1], req) for i, req in enumerate(reqs)]

        tokens = sample(logits, reqs, sampler)

        assert tokens == expected, step
        for req, token in zip(reqs, tokens, strict=True):
            append(req, token)
        if step % 3 == 2:
            reqs = [
                reqs[-1],
                *reqs[3:-1],
                *(req_of(old.row, seed=step, **FEATURES["everything"]) for old in reqs[:3]),
            ]


@pytest.mark.parametrize("feature", ["penalties that favour", "watermark"])
def test_a_token_that_only_the_device_knows_is_counted_once(feature: str) -> None:
    params = FEATURES[feature]
    early, late = req_of(3, **params), req_of(3, **params)
    last_ids = torch.zeros(64, dtype=torch.int64)
    sampler = Sampler(VOCAB, last_ids.device, last_ids, one_rank)
    for step, token in enumerate((20, 21, 20, 40, 41, 42, 43)):
        sample(logits_of(1, seed=step), [early], sampler)
        last_ids[3] = token
        early.total_len += 1  # sampled, and in flight to the host
        append(late, token)
        expected = oracle_token(logits_of(1, seed=step + 9), late)

        assert sample(logits_of(1, seed=step + 9), [early], sampler) == [expected]
        early.add_known([token])  # it is known now


def test_a_request_that_skipped_some_steps_has_all_its_tokens_counted() -> None:
    params = FEATURES["penalties that favour"]
    paused, other = req_of(0, **params), req_of(1, **params)
    sampler = sampler_of(logits_of(1))
    sample(logits_of(2), [paused, other], sampler)
    sample(logits_of(1), [other], sampler)
    for token in (20, 21, 20):
        append(paused, token)

    tokens = sample(logits_of(2, seed=5), [other, paused], sampler)

    assert tokens == [oracle_token(logits_of(2, seed=5)[i : i + 1], req) for i, req in enumerate([other, paused])]


def test_a_request_inherits_no_counts_with_its_row() -> None:
    sampler = sampler_of(logits_of(1))
    sample(logits_of(1), [req_of(0, prompt=[TOP[0]], output=[TOP[0]] * 9, **FEATURES["repetition"])], sampler)

    fresh = req_of(0, prompt=[1], output=[], **FEATURES["repetition"])

    assert sample(logits_of(1), [fresh], sampler) == [TOP[0]]


def test_counts_stay_when_a_request_of_a_higher_row_comes() -> None:
    sampler = sampler_of(logits_of(1))
    first = req_of(0, prompt=[1], output=[TOP[0]], **FEATURES["repetition"])
    sample(logits_of(1), [first], sampler)

    late = [req_of(row, prompt=[1], output=[TOP[0]], **FEATURES["repetition"]) for row in (5, 3, 40)]
    tokens = sample(logits_of(1).expand(4, -1), [first, *late], sampler)

    assert tokens == [TOP[1]] * 4


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_an_ngram_is_completed_once_like_in_transformers(size: int) -> None:
    rng = random.Random(size)
    for length in (1, size - 1, size, 40, 300):
        token_ids = [rng.randrange(4) for _ in range(max(length, 1))]
        bans, processor = NgramBans(size), transformers.NoRepeatNGramLogitsProcessor(size)
        for _ in range(5):
            scores = processor(torch.tensor([token_ids]), torch.zeros(1, VOCAB))

            assert bans.banned_after(int32s(token_ids)) == scores[0].isneginf().nonzero()[:, 0].tolist()

            token_ids = [*token_ids, *(rng.randrange(4) for _ in range(3))]


@pytest.mark.parametrize("temperature", [0, 1])
def test_only_the_first_token_is_limited_by_what_may_be_first(temperature: float) -> None:
    reqs = [
        req_of(row, seed=row, output=[], temperature=temperature, first_allowed_token_ids=(3, 60)) for row in range(30)
    ]
    sampler, logits = sampler_of(logits_of(1)), logits_of(30)

    first = sample(logits, reqs, sampler)
    for req, token in zip(reqs, first, strict=True):
        append(req, token)
    second = sample(logits, reqs, sampler)

    assert set(first) <= {3, 60}
    assert not set(second) <= {3, 60}


def test_an_end_that_is_very_late_still_has_a_finite_logit() -> None:
    params: dict[str, Any] = {"exponential_decay_length_penalty": (0, 100.0), "temperature": 1e-5, "top_p": 0.9}
    reqs = [req_of(row, seed=row, output=[1] * 5000, **params) for row in range(20)]

    assert sample(logits_of(20), reqs) == [EOS] * 20


def test_an_end_that_is_ignored_does_not_become_likelier() -> None:
    req = req_of(temperature=0, exponential_decay_length_penalty=(0, 50.0), ignore_eos=True)

    assert sample(logits_of(1), [req]) == [TOP[0]]


BEYOND: list[dict[str, Any]] = [
    {"first_allowed_token_ids": (VOCAB, *range(VOCAB)), "output": []},
    {"logit_bias": {VOCAB: 100.0, VOCAB + 5: -100.0, 2**31 - 1: 3.0}},
    {"bad_words_ids": ((VOCAB,), (9, VOCAB + 3), (VOCAB, 9), (6, 9, 2**31 - 1))},
    {"stop_token_ids": (VOCAB, VOCAB + 7), "min_new_tokens": 50},
]


@pytest.mark.parametrize("params", BEYOND)
@pytest.mark.parametrize("temperature", [0, 1])
def test_an_id_beyond_the_vocabulary_is_ignored(params: dict[str, Any], temperature: float) -> None:
    plain = {key: value for key, value in params.items() if key in ("min_new_tokens", "output")}
    reqs = [req_of(row, seed=row, temperature=temperature, **params) for row in range(50)]

    tokens = sample(logits_of(50), reqs)

    assert tokens == sample(logits_of(50), [req_of(r, seed=r, temperature=temperature, **plain) for r in range(50)])


def test_an_allowed_id_beyond_the_vocabulary_is_never_sampled() -> None:
    reqs = [req_of(row, seed=row, allowed_token_ids=(4, VOCAB, 2**31 - 1)) for row in range(20)]

    assert sample(logits_of(20), reqs) == [4] * 20


def test_a_prompt_with_ids_beyond_the_vocabulary_can_be_penalised() -> None:
    req = req_of(prompt=[TOP[0], VOCAB + 1], output=[], **FEATURES["repetition"])

    assert sample(logits_of(1), [req]) == [TOP[1]]


IMPOSSIBLE = [
    {"allowed_token_ids": (VOCAB,)},
    {"allowed_token_ids": (4,), "bad_words_ids": ((4,),)},
    {"allowed_token_ids": (4,), "stop_token_ids": (4,), "min_new_tokens": 50},
]


@pytest.mark.parametrize("params", IMPOSSIBLE)
@pytest.mark.parametrize("cuts", [{"temperature": 0}, {}, {"top_p": 0.5, "min_p": 0.1, "typical_p": 0.5}])
def test_a_request_that_forbids_every_token_gets_none_and_disturbs_no_other(
    backend: str, params: dict[str, Any], cuts: dict[str, Any]
) -> None:
    logits = logits_of(3, device_of(backend))
    neighbours = [req_of(0, **FEATURES["everything"]), req_of(2, **FEATURES["top_p"])]
    alone = [oracle_token(logits[i : i + 1], req) for i, req in zip((0, 2), neighbours, strict=True)]

    first, impossible, last = sample(logits, [neighbours[0], req_of(1, **params, **cuts), neighbours[1]])

    assert [first, last] == alone
    assert impossible == NONE_ALLOWED


def test_the_logits_stay_as_they_are() -> None:
    reqs = mixed_reqs()
    logits = logits_of(len(reqs))
    before = logits.clone()

    sample(logits, reqs)

    assert torch.equal(logits, before)


def test_logits_that_nobody_changes_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("greedy", "plain", "all cuts", "end in time")
    monkeypatch.setattr(Tensor, "clone", lambda *_: pytest.fail("copied"))

    sample(logits_of(4), [req_of(row, **FEATURES[name]) for row, name in enumerate(names)])


def test_only_rows_with_a_filter_are_filtered(monkeypatch: pytest.MonkeyPatch) -> None:
    cut_rows: dict[str, int] = {}
    for name in ("top_k_top_p_min_p", "typical_p"):
        monkeypatch.setattr(ops, name, lambda rows, *columns, name=name: cut_rows.update({name: len(rows)}))
    names = ["plain", "top_p", "greedy", "typical_p", "top_k", "typical_p and cut", "top_k 1", "top_k 0 is all", "cold"]

    sample(logits_of(9), [req_of(row, **FEATURES[name]) for row, name in enumerate(names)])

    assert cut_rows == {"top_k_top_p_min_p": 3, "typical_p": 2}


def test_a_batch_of_the_same_requests_is_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[list[InferReq]] = []

    def counted(reqs: list[InferReq], vocab: int, device: torch.device) -> SamplingPlan:
        planned.append(reqs)
        return make_plan(reqs, vocab, device)

    monkeypatch.setattr("lightserve.worker.sampling.sampler.make_plan", counted)
    sampler, reqs = sampler_of(logits_of(1)), mixed_reqs()
    logits = logits_of(len(reqs))

    for batch in (reqs, list(reqs), reqs[:-1], reqs):
        plan = sampler.prepare(batch)
        tokens = sampler.sample(plan, logits[: len(batch)], sampled_by_the_step(logits[: len(batch)], batch))
        sampler.logprobs(plan, tokens, logits)

    assert [len(batch) for batch in planned] == [len(reqs), len(reqs) - 1, len(reqs)]


ALL_FEATURES = [features for features in FEATURES.values() if "logprobs" not in features]


def test_logprobs_are_of_the_model_and_only_for_requests_that_want_them(backend: str) -> None:
    sampler = sampler_of(logits_of(1, device_of(backend)))
    changed = FEATURES["everything"]
    reqs = [
        req_of(0, logprobs=3, **changed),
        req_of(1, **changed),
        req_of(2, logprobs=0, temperature=0),
        req_of(3, logprobs=20, **changed),
    ]
    logits = logits_of(4, device_of(backend))
    plan = sampler.prepare(reqs)
    tokens = sampler.sample(plan, logits, sampled_by_the_step(logits, reqs))

    logprobs = sampler.logprobs(plan, tokens, logits)

    expected = logits.log_softmax(-1)
    assert logprobs is not None
    found = logprobs.by_row()
    assert 1 not in found
    for row, k in ((0, 3), (2, 0), (3, 20)):
        logprob, top = found[row]
        assert logprob == pytest.approx(float(expected[row, tokens[row]]), abs=1e-5)
        best = expected[row].topk(k)
        assert top is not None
        assert [token for token, _ in top] == best.indices.tolist()
        assert [value for _, value in top] == pytest.approx(best.values.tolist(), abs=1e-5)


@pytest.mark.parametrize("others", ["alone", "beside raw ones"])
def test_processed_logprobs_are_of_the_distribution_that_was_sampled_from(backend: str, others: str) -> None:
    wanted = [req_of(row, logprobs=3, processed_logprobs=True, **features) for row, features in enumerate(ALL_FEATURES)]
    raw = [] if others == "alone" else [req_of(len(wanted), logprobs=2), req_of(len(wanted) + 1, top_p=0.5)]
    reqs = [*raw, *wanted]
    logits = logits_of(len(reqs), device_of(backend))
    sampler = sampler_of(logits)
    plan = sampler.prepare(reqs)
    tokens = sampler.sample(plan, logits, sampled_by_the_step(logits, reqs))

    logprobs = sampler.logprobs(plan, tokens, logits)

    assert logprobs is not None
    found = logprobs.by_row()
    for row, req in enumerate(reqs[len(raw) :], start=len(raw)):
        expected = oracle_scores(logits[row : row + 1], req)[0].float().log_softmax(-1)
        assert tokens[row] == oracle_token(logits[row : row + 1], req)
        assert found[row][0] == pytest.approx(float(expected[tokens[row]]), abs=1e-4)
        assert [value for _, value in found[row][1] or ()] == pytest.approx(expected.topk(3).values.tolist(), abs=1e-4)
    if raw:
        assert found[0][0] == pytest.approx(float(logits[0].log_softmax(-1)[tokens[0]]), abs=1e-5)


def test_a_forbidden_logit_of_the_model_has_a_logprob_of_minus_infinity() -> None:
    logits = torch.tensor([[0.0, -INF, 1.0]])
    reqs = [req_of(logprobs=20, temperature=0)]

    sampler = Sampler(3, logits.device, torch.zeros(1, dtype=torch.int64), one_rank)
    found = sampler.logprobs(sampler.prepare(reqs), torch.tensor([1]), logits)
    assert found is not None
    logprob, top = found.by_row()[0]

    assert logprob == -INF
    assert top is not None
    assert [token for token, _ in top] == [2, 0, 1]  # no more than the vocabulary has
    assert top[2][1] == -INF


def test_parameters_cross_a_process_boundary_whole() -> None:
    for params in FEATURES.values():
        sampling = GenerationParams.of(max_new_tokens=100, **params)

        assert msgspec.msgpack.decode(msgspec.msgpack.encode(sampling), type=GenerationParams) == sampling


@pytest.mark.parametrize("others", [0, 1])
def test_a_row_whose_logits_are_not_numbers_gets_no_token_whatever_its_options(backend: str, others: int) -> None:
    options: list[dict[str, Any]] = [{"top_k": 5}, {"temperature": 0, "allowed_token_ids": (3,)}, {"min_p": 0.2}]
    reqs = [req_of(row, **own) for row, own in enumerate([*options, *options, *[{"temperature": 0}] * others])]
    logits = logits_of(len(reqs), device_of(backend))
    whole = sample(logits, reqs)
    logits[:3, 50] = float("nan")
    tokens = sampled_by_the_step(logits, reqs)
    tokens[:3] = ops.NO_TOKEN  # as the step returns it

    sampler = sampler_of(logits)
    out = sampler.sample(sampler.prepare(reqs), logits, tokens).tolist()

    assert out == [ops.NO_TOKEN] * 3 + whole[3:]
    plan = sampler.prepare([req_of(logprobs=1)] * len(reqs))
    found = sampler.logprobs(plan, torch.tensor(out, device=logits.device), logits)
    assert found is not None
    assert len(found.by_row()) == len(reqs)  # no index below 0


def test_a_request_that_got_no_token_counts_nothing_of_another_row() -> None:
    seen = SeenTokens(VOCAB, torch.full((4,), ops.NO_TOKEN))
    reqs = [req_of(row, output=[8], presence_penalty=1.0) for row in range(2)]
    for req in reqs:
        req.total_len += 1  # the device sampled no token

    seen.update(reqs)

    assert seen.table[:, VOCAB - 1].tolist() == [0, 0]
    assert seen.table[:, 8].tolist() == [2, 2]
