"""The pooling endpoints over a fake engine: the result of a text is made of its token ids."""

from __future__ import annotations

import asyncio
import base64
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import orjson
import pytest
from starlette.types import Message

from lightserve.httpserver.app import build_app
from lightserve.httpserver.pooling.engine import GROUP
from lightserve.messages.output import Admission, EmbeddingOut
from lightserve.messages.request import GenerateReq
from lightserve.messages.step import ReqFailed
from lightserve.model_files.pooling import PoolingConfig
from lightserve.model_files.pooling.score_templates import read_score_template
from lightserve.model_files.tokenizer.special_tokens import SpecialTokens
from lightserve.model_files.tokenizer.tokenizer import Tokenizer
from test.httpserver.fake_engine import LIMITS, FakeEngine, Script, engine
from test.pooling.files import CLS, SEP, word_tokenizer
from test.waiting import DEADLINE_S, until

EMBED = PoolingConfig("embed", "mean", 4, prompts={"query": "w9 "})
WIDE = PoolingConfig("embed", "mean", 8192)
CLASSIFY = PoolingConfig("classify", "cls", 3, labels=("bad", "fair", "good"))
SCORE = PoolingConfig("classify", "cls", 1, labels=("LABEL_0",), type_vocab_size=2)
ANSWERS = PoolingConfig("score", "last", 2, answers=("no", "yes"))
REWARD = PoolingConfig("reward", "last", 1)
LONGEST = len("[UNK]")  # characters of a token
TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"
FAIL_ID = 100  # of a token that makes a request fail

Post = Callable[..., Awaitable[httpx2.Response]]


def result_of(size: int) -> Script:
    """The first numbers of the token ids, repeated."""

    def script(req: GenerateReq) -> list[EmbeddingOut | ReqFailed]:
        if FAIL_ID in req.prompt_ids:
            return [ReqFailed(req.req_id, 429, "the queue is full")]
        values = np.resize(np.array(req.prompt_ids[1:], dtype=np.float32) / 10, size)
        return [EmbeddingOut(req.req_id, values.astype(np.float32).tobytes(), Admission(0.0, 0))]

    return script


@asynccontextmanager
async def pooling_server(
    tmp_path: Path, pooling: PoolingConfig | None
) -> AsyncIterator[tuple[httpx2.AsyncClient, FakeEngine]]:
    tokenizer = Tokenizer(word_tokenizer(), SpecialTokens(), TEMPLATE)
    async with engine(tmp_path, result_of(pooling.size if pooling else 1), tokenizer) as (context, fake):
        app = build_app(replace(context, pooling=pooling))
        transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as http:
            yield http, fake


def with_pooling(
    tmp_path: Path, pooling: PoolingConfig | None, check: Callable[[Post, FakeEngine], Awaitable[None]]
) -> None:
    async def run() -> None:
        async with pooling_server(tmp_path, pooling) as (http, fake):
            await check(http.post, fake)

    asyncio.run(run())


def posted(tmp_path: Path, pooling: PoolingConfig | None, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    found: list[httpx2.Response] = []

    async def check(post: Post, fake: FakeEngine) -> None:
        found.append(await post(path, json=body))

    with_pooling(tmp_path, pooling, check)
    return found[0].status_code, found[0].json()


def unit(*values: float) -> list[float]:
    vector = np.array(values, dtype=np.float32)
    return [float(one) for one in vector / np.linalg.norm(vector)]


def test_rerank_reads_the_pair_by_the_score_template(tmp_path: Path) -> None:
    template = read_score_template("{{ query }} w9 {{ document }}")._replace(scale=0.5)
    pooling = PoolingConfig("score", "last", 1, answers=("yes",), template=template)

    async def check(post: Post, fake: FakeEngine) -> None:
        answer = (await post("/v1/rerank", json={"query": "w5", "documents": ["w6", "w7 w8"]})).json()

        assert [req.prompt_ids for req in fake.received] == [[CLS, 5, 9, 6, SEP], [CLS, 5, 9, 7, 8, SEP]]
        assert answer["results"][0]["relevance_score"] == pytest.approx(1 / (1 + np.exp(-0.5 * 0.5)))

    with_pooling(tmp_path, pooling, check)


BODIES: dict[str, dict[str, Any]] = {  # a request to every endpoint
    "/v1/embeddings": {"input": "w5"},
    "/pooling": {"input": "w5"},
    "/embed": {"inputs": "w5"},
    "/classify": {"input": "w5"},
    "/predict": {"inputs": "w5"},
    "/rerank": {"query": "w5", "documents": ["w6"]},
    "/score": {"text_1": "w5", "text_2": "w6"},
    "/get_score": {"chat": "w5"},
}


@pytest.mark.parametrize("pooling", [EMBED, CLASSIFY, SCORE, ANSWERS, REWARD], ids=str)
def test_a_browser_gets_the_task_and_exactly_the_endpoints_that_answer(tmp_path: Path, pooling: PoolingConfig) -> None:
    async def ask() -> None:
        async with pooling_server(tmp_path, pooling) as (http, _):
            page = await http.get("/", headers={"Accept": "text/html"})
            statuses = {path: (await http.post(path, json=body)).status_code for path, body in BODIES.items()}
            refused = await http.post("/v1/chat/completions", json={"messages": []})

        assert page.headers["content-type"] == "text/plain; charset=utf-8"
        assert f"its task is {pooling}" in page.text
        (listed,) = re.findall(r"^POST (.*)$", page.text, flags=re.MULTILINE)
        assert set(listed.split(", ")) == {path for path, status in statuses.items() if status == 200}
        assert f"use {listed} (--task)" in refused.json()["error"]["message"]

    asyncio.run(ask())


PAIR = {"query": "w5", "documents": ["w6"], "return_document": True}
TEXTS = {"text_1": "w5", "text_2": "w6", "instructoin": "w7"}
MISSPELT: dict[str, tuple[PoolingConfig, dict[str, Any], str]] = {  # body, and the field that was meant
    "/v1/embeddings": (EMBED, {"input": "w5", "dimension": 2}, "dimensions"),
    "/pooling": (EMBED, {"input": "w5", "modle": "m"}, "model"),
    "/api/embed": (EMBED, {"input": "w5", "dimension": 2}, "dimensions"),
    "/api/embeddings": (EMBED, {"prompt": "w5", "modle": "m"}, "model"),
    "/embed": (EMBED, {"inputs": "w5", "normalise": True}, "normalize"),
    "/classify": (CLASSIFY, {"input": "w5", "modle": "m"}, "model"),
    "/predict": (CLASSIFY, {"inputs": "w5", "raw_score": True}, "raw_scores"),
    "/rerank": (SCORE, PAIR, "return_documents"),
    "/v1/rerank": (SCORE, PAIR, "return_documents"),
    "/v2/rerank": (SCORE, PAIR, "return_documents"),
    "/score": (SCORE, TEXTS, "instruction"),
    "/v1/score": (SCORE, TEXTS, "instruction"),
    "/get_score": (REWARD, {"chat": "w5", "paramters": {}}, "parameters"),
}


@pytest.mark.parametrize("path", MISSPELT)
def test_every_pooling_endpoint_warns_of_a_misspelt_field(tmp_path: Path, path: str) -> None:
    pooling, body, meant = MISSPELT[path]

    async def check(post: Post, fake: FakeEngine) -> None:
        response = await post(path, json=body)

        assert response.status_code == 200, response.text
        assert f"did you mean {meant}?" in response.headers.get("warning", "")

    with_pooling(tmp_path, pooling, check)


def test_every_kind_of_input_is_embedded(tmp_path: Path) -> None:
    async def check(post: Post, fake: FakeEngine) -> None:
        for given, ids in (
            ("w5 w6", [[CLS, 5, 6, SEP]]),
            (["w5", "w6"], [[CLS, 5, SEP], [CLS, 6, SEP]]),
            ([7, 8], [[7, 8]]),
            ([[7, 8], [9]], [[7, 8], [9]]),
        ):
            fake.received.clear()
            response = await post("/v1/embeddings", json={"input": given})

            assert response.status_code == 200
            assert [one.prompt_ids for one in fake.received] == ids
            assert [one["index"] for one in response.json()["data"]] == list(range(len(ids)))
            assert response.json()["usage"]["prompt_tokens"] == sum(map(len, ids))

    with_pooling(tmp_path, EMBED, check)


def test_embeddings_are_normalised_cut_and_encoded(tmp_path: Path) -> None:
    async def check(post: Post, fake: FakeEngine) -> None:
        async def embedding(**fields: Any) -> Any:
            response = await post("/v1/embeddings", json={"input": [4, 10, 20, 30, 40], **fields})
            return response.json()["data"][0]["embedding"]

        assert await embedding() == pytest.approx(unit(1, 2, 3, 4))
        assert await embedding(dimensions=2) == pytest.approx(unit(1, 2))
        assert await embedding(normalize=False) == pytest.approx([1, 2, 3, 4])
        encoded = np.frombuffer(base64.b64decode(await embedding(encoding_format="base64")), dtype=np.float32)
        assert encoded.tolist() == pytest.approx(unit(1, 2, 3, 4))

    with_pooling(tmp_path, EMBED, check)


def test_a_prompt_of_the_model_precedes_the_text(tmp_path: Path) -> None:
    async def check(post: Post, fake: FakeEngine) -> None:
        await post("/v1/embeddings", json={"input": "w5", "prompt_name": "query"})
        await post("/embed", json={"inputs": "w5", "prompt_name": "query"})

        assert [one.prompt_ids for one in fake.received] == [[CLS, 9, 5, SEP]] * 2

    with_pooling(tmp_path, EMBED, check)


def test_many_inputs_are_sent_in_groups(tmp_path: Path) -> None:
    status, body = posted(tmp_path, EMBED, "/v1/embeddings", {"input": [[4, i + 10] for i in range(80)] * 4})

    assert status == 200
    assert len(body["data"]) == 320
    assert body["usage"]["prompt_tokens"] == 640
    assert body["data"][319]["embedding"] == body["data"][79]["embedding"]


def test_priority_and_timeout_reach_the_router(tmp_path: Path) -> None:
    async def check(post: Post, fake: FakeEngine) -> None:
        await post("/v1/embeddings", json={"input": "w5", "priority": 3, "timeout": 7})

        assert (fake.received[0].scheduling.priority, fake.received[0].scheduling.timeout_s) == (3, 7)

    with_pooling(tmp_path, EMBED, check)


def test_a_long_text_is_refused_or_truncated_before_its_last_token(tmp_path: Path) -> None:
    async def check(post: Post, fake: FakeEngine) -> None:
        text = "w5 " * (LIMITS.max_req_total_len + 10)
        refused = await post("/v1/embeddings", json={"input": text})
        await post("/v1/embeddings", json={"input": text, "truncate_prompt_tokens": -1})
        await post("/embed", json={"inputs": text, "truncate": True})
        await post("/v1/embeddings", json={"input": text, "truncate_prompt_tokens": 5})

        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        lengths = [len(one.prompt_ids) for one in fake.received]
        assert lengths == [LIMITS.max_req_total_len] * 2 + [5]
        assert {one.prompt_ids[-1] for one in fake.received} == {SEP}

    with_pooling(tmp_path, EMBED, check)


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_documents_are_reranked_by_the_cosine(tmp_path: Path, path: str) -> None:
    body = {"query": "w5 w6", "documents": ["w60", {"text": "w5 w6"}, "w10 w12"], "top_n": 2}

    status, found = posted(tmp_path, EMBED, path, body)

    assert status == 200
    assert [one["index"] for one in found["results"]] == [1, 2]
    assert found["results"][0]["relevance_score"] == pytest.approx(1)
    assert ("document" in found["results"][0]) == (path != "/v2/rerank")


def test_a_body_with_texts_is_reranked_as_in_tei(tmp_path: Path) -> None:
    body = {"query": "w5", "texts": ["w6", "w7"], "return_text": True, "raw_scores": True}

    status, found = posted(tmp_path, SCORE, "/rerank", body)

    assert status == 200
    assert found == [{"index": 0, "score": 0.5, "text": "w6"}, {"index": 1, "score": 0.5, "text": "w7"}]


def test_a_pair_has_the_token_types_of_its_texts(tmp_path: Path) -> None:
    async def check(post: Post, fake: FakeEngine) -> None:
        response = await post("/score", json={"text_1": "w5", "text_2": ["w6", "w7"]})

        assert [one["score"] for one in response.json()["data"]] == pytest.approx([1 / (1 + np.exp(-0.5))] * 2)
        second = LIMITS.vocab_size
        assert fake.received[0].prompt_ids == [CLS, 5, SEP, second + 6, second + SEP]

    with_pooling(tmp_path, SCORE, check)


def test_a_model_that_answers_scores_by_the_softmax_of_two_logits(tmp_path: Path) -> None:
    status, found = posted(tmp_path, ANSWERS, "/score", {"text_1": "w5", "text_2": "w6", "instruction": "w8"})

    assert status == 200
    assert 0 < found["data"][0]["score"] < 1


def test_labels_are_classified_and_predicted(tmp_path: Path) -> None:
    async def check(post: Post, fake: FakeEngine) -> None:
        shares = np.exp([0.1, 0.2, 0.3]) / np.exp([0.1, 0.2, 0.3]).sum()
        classified = (await post("/classify", json={"input": [9, 1, 2, 3]})).json()["data"][0]
        single = (await post("/predict", json={"inputs": "w4 w5"})).json()
        many = (await post("/predict", json={"inputs": [["w4 w5"], ["w4", "w5"]], "raw_scores": True})).json()

        assert classified["label"] == "good"
        assert classified["probs"] == pytest.approx(shares.tolist())
        assert [one["label"] for one in single] == ["fair", "bad", "good"]
        assert [one["score"] for one in many[0]] == pytest.approx([0.5, 0.4, 0.3])
        assert fake.received[-1].prompt_ids == [CLS, 4, SEP, 5, SEP]

    with_pooling(tmp_path, CLASSIFY, check)


def test_a_reward_is_the_number_of_the_head(tmp_path: Path) -> None:
    status, found = posted(tmp_path, REWARD, "/get_score", {"chat": "w5 w6", "parameters": {}})

    assert status == 200
    assert found == {"score": 0.5, "prompt_tokens": 4, "finish_reason": "stop"}


def test_a_chat_is_rendered_beside_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    render = Tokenizer.apply_chat_template

    def recorded(tokenizer: Tokenizer, *args: Any, **kwargs: Any) -> str:
        threads.append(threading.get_ident())
        return render(tokenizer, *args, **kwargs)

    monkeypatch.setattr(Tokenizer, "apply_chat_template", recorded)
    chat = [{"role": "user", "content": "w5"}, {"role": "assistant", "content": "w6"}]

    status, found = posted(tmp_path, REWARD, "/get_score", {"chat": chat})
    refused, _ = posted(tmp_path, REWARD, "/get_score", {"chat": chat * 1025})

    assert (status, found["prompt_tokens"], refused) == (200, 2, 400)
    assert threads
    assert threading.get_ident() not in threads


def test_pooling_returns_the_numbers_as_they_are(tmp_path: Path) -> None:
    status, found = posted(tmp_path, REWARD, "/pooling", {"input": "w5"})

    assert status == 200
    assert found["data"] == [{"index": 0, "object": "pooling", "data": [0.5]}]


@pytest.mark.parametrize(
    ("texts", "ending"),
    [
        (["w5"], "prompt=3 .* finish=stop"),
        (["w5"] * 300, r"prompt=900 .* finish=stop\*300"),
        ([f"w{FAIL_ID}", *["w5"] * 299], "prompt=900 .* finish=error:429"),
    ],
    ids=["one", "many", "one of many fails"],
)
def test_a_request_has_one_short_line_however_many_texts_it_has(
    tmp_path: Path, log: pytest.LogCaptureFixture, texts: list[str], ending: str
) -> None:
    with log.at_level("INFO", "lightserve.access"):
        posted(tmp_path, EMBED, "/v1/embeddings", {"input": texts})

    (line,) = [record.getMessage() for record in log.records if record.name == "lightserve.access"]
    assert re.search(f"{ending}$", line)
    assert len(line) < 200


@pytest.mark.parametrize(
    ("text", "count"), [("w5 " * 2000, "2002"), ("w5 " * 40_000, f"at least {40_000 * 3 // LONGEST}")]
)
def test_the_error_for_a_long_text_has_its_number_of_tokens(tmp_path: Path, text: str, count: str) -> None:
    status, found = posted(tmp_path, EMBED, "/v1/embeddings", {"input": text})

    assert status == 400
    assert f"maximum context length is 1024 tokens: the text has {count} tokens" in found["error"]["message"]


def test_one_failing_input_fails_its_request_only(tmp_path: Path) -> None:
    async def check(post: Post, fake: FakeEngine) -> None:
        bad, good = await asyncio.gather(
            post("/v1/embeddings", json={"input": ["w5", f"w{FAIL_ID}"]}), post("/v1/embeddings", json={"input": "w5"})
        )

        assert (bad.status_code, good.status_code) == (429, 200)
        assert "Retry-After" in bad.headers

    with_pooling(tmp_path, EMBED, check)


def unanswered(req: GenerateReq) -> list[EmbeddingOut | ReqFailed]:
    return []


MANY = 2 * GROUP
TEXTS_OF_MANY = [f"w{i + 5}" for i in range(MANY)]
LONG_BODIES: dict[str, tuple[PoolingConfig, dict[str, Any]]] = {
    "/v1/embeddings": (EMBED, {"input": TEXTS_OF_MANY}),
    "/pooling": (EMBED, {"input": TEXTS_OF_MANY}),
    "/embed": (EMBED, {"inputs": TEXTS_OF_MANY}),
    "/classify": (CLASSIFY, {"input": TEXTS_OF_MANY}),
    "/predict": (CLASSIFY, {"inputs": [[text] for text in TEXTS_OF_MANY]}),
    "/rerank": (SCORE, {"query": "w5", "documents": TEXTS_OF_MANY}),
    "/v1/rerank": (EMBED, {"query": "w5", "documents": TEXTS_OF_MANY}),
    "/v2/rerank": (SCORE, {"query": "w5", "documents": TEXTS_OF_MANY}),
    "/score": (SCORE, {"text_1": "w5", "text_2": TEXTS_OF_MANY}),
    "/v1/score": (EMBED, {"text_1": "w5", "text_2": TEXTS_OF_MANY}),
    "/get_score": (REWARD, {"chat": "w5"}),
    "/rerank of TEI": (SCORE, {"query": "w5", "texts": TEXTS_OF_MANY}),
}


@pytest.mark.parametrize("name", LONG_BODIES)
def test_a_request_ends_with_its_client(tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
    pooling, body = LONG_BODIES[name]
    sent = 1 if name == "/get_score" else GROUP

    async def run() -> None:
        tokenizer = Tokenizer(word_tokenizer(), SpecialTokens(), None)
        async with engine(tmp_path, unanswered, tokenizer) as (context, fake):
            app = build_app(replace(context, pooling=pooling))
            client = LeavingClient(name.split()[0], body)
            responding = asyncio.create_task(app(client.scope, client.receive, client.send))
            await until(lambda: len(fake.received) == sent)
            client.has_left.set()
            await asyncio.wait_for(responding, DEADLINE_S)
            await until(lambda: len(fake.aborted) == sent)
            assert context.manager.running_requests == 0
            assert len(fake.received) == sent

    with caplog.at_level("INFO", "lightserve.access"):
        asyncio.run(run())
    [line] = [record.getMessage() for record in caplog.records if record.name == "lightserve.access"]
    assert line.endswith("finish=abort")


class LeavingClient:
    """An ASGI client that sends a body and disconnects when it is told to."""

    def __init__(self, path: str, body: dict[str, Any]) -> None:
        headers = [(b"content-type", b"application/json")]
        self.scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b""}
        self.has_left = asyncio.Event()
        self._unsent = [orjson.dumps(body)]

    async def receive(self) -> Message:
        if self._unsent:
            return {"type": "http.request", "body": self._unsent.pop(), "more_body": False}
        await self.has_left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Nobody reads it."""


@pytest.mark.parametrize(
    ("pooling", "path", "body", "found"),
    [
        (None, "/v1/embeddings", {"input": "w5"}, "this model generates text"),
        (None, "/score", {"text_1": "w5", "text_2": "w5"}, "this model generates text"),
        (None, "/pooling", {"input": "w5"}, "this model generates text"),
        (None, "/get_score", {"chat": "w5"}, "this model generates text"),
        (EMBED, "/classify", {"input": "w5"}, "the task of this one is embed"),
        (EMBED, "/get_score", {"chat": "w5"}, "the task of this one is embed"),
        (CLASSIFY, "/v1/embeddings", {"input": "w5"}, "the task of this one is classify"),
        (CLASSIFY, "/rerank", {"query": "w5", "documents": ["w6"]}, "the model has 3 labels"),
        (EMBED, "/v1/chat/completions", {"messages": []}, "use /v1/embeddings"),
        (EMBED, "/v1/completions", {"prompt": "w5"}, "use /v1/embeddings"),
        (REWARD, "/v1/messages", {}, "the task of this model is reward"),
        (EMBED, "/v1/embeddings", {"input": ""}, "must not be empty"),
        (EMBED, "/v1/embeddings", {"input": []}, "must not be empty"),
        (EMBED, "/v1/embeddings", {"input": [[5], []]}, "must not be empty"),
        (EMBED, "/v1/embeddings", {"input": 5}, "a string, a list of strings"),
        (EMBED, "/v1/embeddings", {"input": [-1]}, "token id -1"),
        (EMBED, "/v1/embeddings", {"input": [10**9]}, "is not in the range"),
        (EMBED, "/v1/embeddings", {"input": ["w5"] * 2049}, "at most 2048 inputs"),
        (WIDE, "/v1/embeddings", {"input": ["w5"] * 2048}, "send at most 1024 inputs at once"),
        (WIDE, "/v1/embeddings", {"input": ["w5"] * 2048, "dimensions": 4097}, "send at most 2047 inputs at once"),
        (WIDE, "/pooling", {"input": ["w5"] * 1025}, "1025 inputs of 8192 numbers each are more than 8,388,608"),
        (EMBED, "/v1/embeddings", {"input": "w5", "dimensions": 5}, "the model has 4"),
        (EMBED, "/v1/embeddings", {"input": "w5", "dimensions": 0}, "dimensions"),
        (EMBED, "/v1/embeddings", {"input": "w5", "encoding_format": "hex"}, "encoding_format"),
        (EMBED, "/v1/embeddings", {"input": "w5", "prompt_name": "nope"}, "the model has query"),
        (EMBED, "/v1/embeddings", {"input": "w5", "truncate_prompt_tokens": 0}, "0 is not allowed"),
        (EMBED, "/score", {"text_1": ["w5", "w6"], "text_2": ["w5"] * 3}, "as many"),
        (EMBED, "/score", {"text_1": "w5", "text_2": "w6", "instruction": "x"}, "a score template reads it"),
        (EMBED, "/rerank", {"query": "w5", "documents": []}, "documents"),
        (EMBED, "/rerank", {"query": "w5", "documents": [{"title": "x"}]}, "documents"),
    ],
)
def test_a_wrong_request_gets_one_clear_error(
    tmp_path: Path, pooling: PoolingConfig | None, path: str, body: dict[str, Any], found: str
) -> None:
    status, response = posted(tmp_path, pooling, path, body)

    assert status == 400
    assert found in str(response["error"])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/embed", {"inputs": []}),
        ("/embed", {"inputs": "w5", "dimensions": 9}),
        ("/predict", {"inputs": "w5"}),
        ("/predict", {"inputs": ["a", "b", "c"]}),
        ("/rerank", {"query": "w5", "texts": []}),
    ],
)
def test_errors_of_tei_have_its_format(tmp_path: Path, path: str, body: dict[str, Any]) -> None:
    status, response = posted(tmp_path, EMBED, path, body)

    assert status == 422
    assert response["error_type"] == "validation"
