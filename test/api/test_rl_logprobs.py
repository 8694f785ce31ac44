"""--logprobs_mode processed: each logprob is that of the distribution from which transformers would have sampled.

The distribution is computed by transformers' own processors, from the logits of its own model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from test.api.server import ServerProcess, running_server
from test.rl_checkpoints import save_checkpoints

pytestmark = pytest.mark.slow

PROMPT = [5, 17, 3, 99, 42, 17]
NUM_TOKENS, NUM_TOP, TOLERANCE = 12, 4, 1e-3
NOT_POSSIBLE = -9999.0  # JSON has no infinity
BIAS = {5: 14.0, 17: 13.0, 1000: 14.5, 99: 13.5, 3: -4.0}  # some tokens come again and again
REPEATING = {"logit_bias": {str(token): bias for token, bias in BIAS.items()}}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 0.7},
    "top_k": {"temperature": 1.3, "top_k": 20},
    "top_p": {"temperature": 1.1, "top_p": 0.8},
    "min_p": {"temperature": 1.2, "min_p": 0.05},
    "repetition_penalty": {"temperature": 0.9, "repetition_penalty": 1.05, **REPEATING},
    "presence_penalty": {"temperature": 0.9, "presence_penalty": 0.8, **REPEATING},
    "frequency_penalty": {"temperature": 0.9, "frequency_penalty": 0.6, **REPEATING},
    "logit_bias": {"temperature": 0.9, **REPEATING},
    "greedy with penalties": {"temperature": 0, "repetition_penalty": 1.05, "frequency_penalty": 0.6, **REPEATING},
    "all": {
        "temperature": 0.8,
        "top_k": 40,
        "top_p": 0.9,
        "repetition_penalty": 1.05,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.4,
        **REPEATING,
    },
}


class OutputPenalties(LogitsProcessor):  # type: ignore[misc]
    """OpenAI's, of which transformers has none: by how often a token is in the output."""

    def __init__(self, presence: float, frequency: float) -> None:
        self._presence, self._frequency = presence, frequency

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        counts = torch.zeros_like(scores)
        output = input_ids[:, len(PROMPT) :]
        counts.scatter_add_(1, output, torch.ones_like(output, dtype=scores.dtype))
        return scores - self._frequency * counts - self._presence * (counts > 0)


class Bias(LogitsProcessor):  # type: ignore[misc]
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.index_add(1, torch.tensor([*BIAS]), torch.tensor([[*BIAS.values()]]))


def processors(options: dict[str, Any]) -> LogitsProcessorList:
    """In the order of the server."""
    made: dict[str, Any] = {
        "logit_bias": lambda _: Bias(),
        "repetition_penalty": RepetitionPenaltyLogitsProcessor,
        "frequency_penalty": lambda value: OutputPenalties(0.0, value),
        "presence_penalty": lambda value: OutputPenalties(value, 0.0),
        "temperature": TemperatureLogitsWarper,
        "top_k": TopKLogitsWarper,
        "top_p": TopPLogitsWarper,
        "min_p": MinPLogitsWarper,
    }
    in_order = [make(options[name]) for name, make in made.items() if options.get(name)]  # temperature 0 is greedy
    return LogitsProcessorList(in_order)


class Serving(NamedTuple):
    server: ServerProcess
    reference: Any  # a model of transformers


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def serving(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = save_checkpoints(tmp_path_factory.mktemp("model"), ("first",))["first"]
    sizes = ("--max_total_token_num", "4096", "--max_req_total_len", "1024")
    flags = ("--device", request.param, "--data_type", "float32", *sizes, "--logprobs_mode", "processed", "--enable_rl")
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with running_server(tmp_path_factory.mktemp("log") / "log", "--model_dir", str(folder), *flags) as server:
        yield Serving(server, reference)


def completed(server: ServerProcess, **options: Any) -> Any:
    body = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "seed": 7, "logprobs": NUM_TOP, "ignore_eos": True}
    fields = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    status, reply = server.post("/v1/completions", body | fields | options)
    assert status == 200, reply
    return reply["choices"][0]


@torch.inference_mode()
def distributions(reference: Any, output: list[int], options: dict[str, Any]) -> Tensor:
    """Log probabilities ``[tokens, vocab]`` from which each token of the output is sampled."""
    ids = torch.tensor([PROMPT + output])
    logits = reference(ids).logits[0]
    process, first = processors(options), len(PROMPT)
    rows = [process(ids[:, :end], logits[end - 1 : end].clone()) for end in range(first, first + len(output))]
    return torch.cat(rows).log_softmax(-1).clamp(min=NOT_POSSIBLE)


@pytest.mark.parametrize("name", OPTIONS)
def test_processed_logprobs_are_of_what_transformers_would_sample_from(serving: Serving, name: str) -> None:
    options = OPTIONS[name]

    choice = completed(serving.server, **options)

    expected = distributions(serving.reference, choice["token_ids"], options)
    logprobs = choice["logprobs"]
    assert len(logprobs["token_logprobs"]) == NUM_TOKENS
    assert "logit_bias" not in options or len(set(choice["token_ids"])) < NUM_TOKENS
    for row, token, logprob, top in zip(
        expected, choice["token_ids"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert logprob == pytest.approx(float(row[token]), abs=TOLERANCE)
        best = sorted(top.values(), reverse=True)[:NUM_TOP]
        assert best == pytest.approx(row.topk(NUM_TOP).values.tolist(), abs=TOLERANCE)


def test_sglangs_generate_has_the_same(serving: Serving) -> None:
    options = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "repetition_penalty": 1.2}
    sampling = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True, "sampling_seed": 7, **options}

    _, reply = serving.server.post(
        "/generate", {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True}
    )

    found = reply["meta_info"]["output_token_logprobs"]
    expected = distributions(serving.reference, [token for _, token, _ in found], options)
    assert [logprob for logprob, _, _ in found] == pytest.approx(
        [float(row[token]) for row, (_, token, _) in zip(expected, found, strict=True)], abs=TOLERANCE
    )
