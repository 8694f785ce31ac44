"""SGLang's /v1/score over a fake engine, for models that generate text and for classifiers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from lightserve.httpserver.pooling.engine import GROUP
from lightserve.messages.output import Admission, StrOut
from lightserve.messages.params import FinishReason
from lightserve.messages.request import GenerateReq
from lightserve.messages.step import ReqFailed, Token
from lightserve.model_files.pooling import PoolingConfig
from test.httpserver.fake_engine import FakeEngine
from test.httpserver.pooling.test_routes import CLASSIFY, EMBED, SCORE, Post, posted, with_pooling

PATH = "/v1/score"
TEXTS = {"query": "w5 ", "items": ["w6", "w7 w8"], "label_token_ids": [3, 1]}


def label_logprob(req: GenerateReq) -> list[StrOut]:
    """Of the only allowed token: its id and the length of the prompt say which."""
    (label,) = req.params.sampling.allowed_token_ids or ()
    token = Token(label, logprob=-label - len(req.prompt_ids) / 10)
    return [StrOut(req.req_id, "", token, FinishReason.LENGTH, admission=Admission(0.0, 2))]


def scored(tmp_path: Path, body: dict[str, Any]) -> tuple[Any, list[GenerateReq]]:
    responses: list[Any] = []
    received: list[GenerateReq] = []

    async def ask(post: Post, fake: FakeEngine) -> None:
        fake.script = label_logprob
        responses.append((await post(PATH, json=body)).json())
        received.extend(fake.received)

    with_pooling(tmp_path, None, ask)
    return responses[0], received


def test_every_label_of_every_item_is_scored_in_order(tmp_path: Path) -> None:
    response, received = scored(tmp_path, TEXTS)

    lengths = [len(req.prompt_ids) for req in received[::2]]
    assert response["scores"] == [[pytest.approx(math.exp(-k - n / 10)) for k in (3, 1)] for n in lengths]
    assert lengths[1] == lengths[0] + 1
    assert (response["object"], response["model"]) == ("scoring", "tiny")
    assert response["usage"] == {"prompt_tokens": sum(lengths), "total_tokens": sum(lengths), "completion_tokens": 0}
    assert all(req.params.stopping.max_new_tokens == 1 for req in received)


def test_the_item_may_come_first(tmp_path: Path) -> None:
    ids = {"query": [5, 6], "items": [[7], [8, 9]], "label_token_ids": [3]}

    _, after = scored(tmp_path, ids)
    _, before = scored(tmp_path, ids | {"item_first": True})

    assert [list(req.prompt_ids) for req in after] == [[5, 6, 7], [5, 6, 8, 9]]
    assert [list(req.prompt_ids) for req in before] == [[7, 5, 6], [8, 9, 5, 6]]


def test_softmax_is_over_the_labels(tmp_path: Path) -> None:
    response, _ = scored(tmp_path, TEXTS | {"apply_softmax": True})

    share = math.exp(-3) / (math.exp(-3) + math.exp(-1))
    assert response["scores"] == [pytest.approx([share, 1 - share])] * 2


def test_many_scores_go_to_the_engine_in_groups(tmp_path: Path) -> None:
    waiting: list[int] = []

    async def ask(post: Post, fake: FakeEngine) -> None:
        def script(req: GenerateReq) -> list[StrOut]:
            waiting.append(len(fake.received) - len(waiting))
            return label_logprob(req)

        fake.script = script
        response = await post(PATH, json={"query": [5], "items": [[6]] * 300, "label_token_ids": [1, 2]})
        assert len(response.json()["scores"]) == 300

    with_pooling(tmp_path, None, ask)
    assert len(waiting) == 600
    assert max(waiting) <= GROUP


def test_a_classifier_has_its_own_labels(tmp_path: Path) -> None:
    body = {"query": "w5 ", "items": ["w6"]}

    _, plain = posted(tmp_path, CLASSIFY, PATH, body)
    _, shares = posted(tmp_path, CLASSIFY, PATH, body | {"apply_softmax": True, "label_token_ids": [1]})
    _, pooled = posted(tmp_path, CLASSIFY, "/pooling", {"input": "w5 w6"})

    (logits,) = plain["scores"]
    assert logits == pytest.approx(pooled["data"][0]["data"])
    total = sum(map(math.exp, logits))
    assert shares["scores"] == [pytest.approx([math.exp(logit) / total for logit in logits])]


def test_the_form_of_vllm_stays_at_the_same_path(tmp_path: Path) -> None:
    status, response = posted(tmp_path, SCORE, PATH, {"text_1": "w5", "text_2": ["w6", "w7"]})

    assert (status, [one["object"] for one in response["data"]]) == (200, ["score", "score"])


@pytest.mark.parametrize(
    ("pooling", "fields", "found"),
    [
        (None, {"label_token_ids": None}, "label_token_ids: a model that generates text needs"),
        (None, {"label_token_ids": []}, "label_token_ids"),
        (None, {"label_token_ids": [10**8]}, "label_token_ids: token id 100000000 is not in the range"),
        (None, {"label_token_ids": [1] * 129}, "label_token_ids"),
        (None, {"items": ["w5"] * 65, "label_token_ids": [1] * 128}, "8,320 scores; the limit is 8,192"),
        (None, {"items": [[5]]}, "items.0: query and items must both be texts, or both token ids"),
        (None, {"query": [5], "items": [[10**8]]}, "items: token id 100000000"),
        (None, {"query": [10**8], "items": [[5]]}, "query: token id 100000000"),
        (None, {"query": ""}, "query"),
        (None, {"items": []}, "items"),
        (None, {"query": [5] * 2000, "items": [[5]]}, "the limit is"),
        (None, {"model": "none such"}, "does not exist"),
        (EMBED, {}, "the task of this one is embed"),
    ],
)
def test_a_wrong_request_is_refused(
    tmp_path: Path, pooling: PoolingConfig | None, fields: dict[str, Any], found: str
) -> None:
    status, response = posted(tmp_path, pooling, PATH, TEXTS | fields)

    assert status in (400, 404)
    assert found in response["error"]["message"]


def test_a_failed_score_fails_the_request(tmp_path: Path) -> None:
    async def ask(post: Post, fake: FakeEngine) -> None:
        fake.script = lambda req: [ReqFailed(req.req_id, 429, "the queue is full")]
        response = await post(PATH, json=TEXTS)
        assert (response.status_code, response.json()["error"]["message"]) == (429, "the queue is full")

    with_pooling(tmp_path, None, ask)
