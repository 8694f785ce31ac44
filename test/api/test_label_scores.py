"""SGLang's /v1/score with the real default model. The oracle is the log probability of the label as a prompt token."""

from __future__ import annotations

import math
from typing import Any

import pytest

from test.api.server import ServerProcess

pytestmark = pytest.mark.slow

QUERY = "Is the following city the capital of France? "
ITEMS = ["Paris. Answer:", "London. Answer:", "Berlin. Answer:"]
LABELS = [9230, 2838, 2]  # " Yes", " No", and the end token


def score(server: ServerProcess, **fields: Any) -> Any:
    body = {"query": QUERY, "items": ITEMS, "label_token_ids": LABELS, **fields}
    status, response = server.post("/v1/score", body)
    assert status == 200, response
    return response


def encode(server: ServerProcess, text: str) -> list[int]:
    ids: list[int] = server.post("/tokenize", {"prompt": text})[1]["tokens"]
    return ids


def probability(server: ServerProcess, prompt: list[int], label: int) -> float:
    """Of a label after a prompt, from the logprobs of a prompt that has both."""
    body = {"prompt": [*prompt, label], "max_tokens": 1, "prompt_logprobs": 0}
    last = server.post("/v1/completions", body)[1]["choices"][0]["prompt_logprobs"][-1]
    return math.exp(last[str(label)]["logprob"])


@pytest.mark.parametrize("item_first", [False, True])
def test_a_score_is_the_probability_of_the_label(server: ServerProcess, item_first: bool) -> None:
    prompts = [encode(server, item + QUERY if item_first else QUERY + item) for item in ITEMS]
    expected = [[probability(server, prompt, label) for label in LABELS] for prompt in prompts]

    response = score(server, item_first=item_first)

    assert response["scores"] == [pytest.approx(row, rel=1e-4) for row in expected]
    assert response["object"] == "scoring"
    assert response["usage"]["prompt_tokens"] == sum(map(len, prompts))


def test_softmax_gives_shares_of_the_labels(server: ServerProcess) -> None:
    plain = score(server)["scores"]

    shares = score(server, apply_softmax=True)["scores"]

    assert shares == [pytest.approx([value / sum(row) for value in row], rel=1e-4) for row in plain]


def test_token_ids_score_like_their_text(server: ServerProcess) -> None:
    ids = [encode(server, QUERY + item) for item in ITEMS]

    found = score(server, query=ids[0][:3], items=[one[3:] for one in ids])["scores"]

    assert found == [pytest.approx(row, rel=1e-4) for row in score(server)["scores"]]


def test_unlikely_labels_have_their_own_probabilities(server: ServerProcess) -> None:
    row = score(server, items=ITEMS[:1], label_token_ids=list(range(100, 130)))["scores"][0]

    assert len(set(row)) == 30
    assert 0 < sum(row) < 1
