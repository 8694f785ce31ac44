"""/v1/files, /v1/batches and /v1/messages/batches of a real server, with the clients of OpenAI and Anthropic."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from test.api.scripted import write_model
from test.api.server import RESPONSE_S, ServerProcess, running_server
from test.waiting import wait_until

pytestmark = pytest.mark.slow

CHAT = "/v1/chat/completions"
KEYS = ("--api_key", "ours", "theirs")
ENDED = ("completed", "failed", "cancelled", "expired")
# a token takes 5 ms, so that a batch of long texts can be interrupted
NULL = ("--null_worker", "--null_step_ms", "5")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    return str(folder)


@pytest.fixture(scope="module")
def server(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("server")
    flags = ("--model_dir", model, "--batch_dir", str(folder / "batches"), "--httpserver_workers", "2", *KEYS)
    with running_server(folder / "log", *NULL, *flags) as server:
        yield server


def client_of(server: ServerProcess, key: str = "ours") -> Any:  # its types have None where this server has values
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=RESPONSE_S)


@pytest.fixture
def client(server: ServerProcess) -> Any:
    return client_of(server)


def chat(custom_id: str, **fields: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "ignore_eos": True} | fields
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body}


def upload(client: Any, lines: Sequence[dict[str, Any] | str]) -> str:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    return str(client.files.create(file=("requests.jsonl", text.encode()), purpose="batch").id)


def start(client: Any, lines: Sequence[Any], endpoint: Any = CHAT, window: Any = "24h") -> str:
    file_id = upload(client, lines)
    fields = {"endpoint": endpoint, "completion_window": window, "metadata": {"name": "test"}}
    return str(client.batches.create(input_file_id=file_id, **fields).id)


def wait_for_end(client: Any, batch_id: str) -> Any:
    wait_until(lambda: client.batches.retrieve(batch_id).status in ENDED, pause_s=0.1)
    return client.batches.retrieve(batch_id)


def results(client: Any, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def test_a_batch_has_an_output_line_for_each_request(client: Any) -> None:
    batch = wait_for_end(client, start(client, [chat(f"request-{i}") for i in range(20)]))

    assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", 20, 0)
    assert batch.metadata == {"name": "test"}
    assert batch.error_file_id is None
    lines = results(client, batch.output_file_id)
    assert [line["custom_id"] for line in lines] == [f"request-{i}" for i in range(20)]
    assert {line["response"]["status_code"] for line in lines} == {200}
    usages = [line["response"]["body"]["usage"] for line in lines]
    assert {usage["completion_tokens"] for usage in usages} == {4}
    assert (batch.usage.output_tokens, batch.usage.total_tokens) == (80, sum(one["total_tokens"] for one in usages))
    assert len({line["id"] for line in lines}) == 20


ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Once", "max_tokens": 3},
    "/v1/responses": {"input": "Once", "max_output_tokens": 3},
    "/v1/messages": {"messages": [{"role": "user", "content": "Once"}], "max_tokens": 3},
}


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_batch_may_be_of_any_endpoint(server: ServerProcess, client: Any, endpoint: str) -> None:
    line: dict[str, Any] = {
        "custom_id": "a",
        "method": "POST",
        "url": endpoint,
        "body": ENDPOINTS[endpoint] | {"seed": 1},
    }

    (result,) = results(client, wait_for_end(client, start(client, [line], endpoint)).output_file_id)
    status, direct = server.post(endpoint, line["body"], Authorization="Bearer ours")

    assert status == 200
    assert set(result["response"]["body"]) == set(direct)
    assert {key: direct["usage"][key] for key in direct["usage"] if key.endswith("_tokens")} == {
        key: value for key, value in result["response"]["body"]["usage"].items() if key.endswith("_tokens")
    }


def test_a_request_that_is_refused_is_in_the_error_file(client: Any) -> None:
    batch = wait_for_end(client, start(client, [chat("good"), chat("bad", temperature=-1), chat("x", model="none")]))

    assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", 1, 2)
    bad, unknown = results(client, batch.error_file_id)
    assert (bad["custom_id"], bad["response"]["status_code"]) == ("bad", 400)
    assert "temperature" in bad["response"]["body"]["error"]["message"]
    assert unknown["response"]["status_code"] == 404


def test_every_wrong_line_is_named_with_its_number(client: Any) -> None:
    lines = [
        chat("a"),
        "{not json",
        "",
        chat("a"),
        chat("b") | {"method": "GET"},
        chat("c") | {"url": "/v1/completions"},
        chat("d", stream=True),
        {"custom_id": 7},
        "[1]",
    ]

    batch = wait_for_end(client, start(client, lines))

    assert batch.status == "failed"
    assert [(error.line, error.code) for error in batch.errors.data] == [
        (2, "invalid_json_line"),
        (4, "duplicate_custom_id"),
        (5, "invalid_method"),
        (6, "mismatched_endpoint"),
        (7, "invalid_body"),
        (8, "invalid_custom_id"),
        (9, "invalid_json_line"),
    ]
    assert "line 1" in batch.errors.data[1].message


def test_a_cancelled_batch_keeps_what_has_finished(client: Any) -> None:
    lines = [chat(f"quick-{i}") for i in range(3)] + [chat(f"slow-{i}", max_tokens=900) for i in range(5)]
    batch_id = start(client, lines)
    wait_until(lambda: client.batches.retrieve(batch_id).request_counts.completed >= 3)

    assert client.batches.cancel(batch_id).status in ("cancelling", "cancelled")
    batch = wait_for_end(client, batch_id)

    done = [line["custom_id"] for line in results(client, batch.output_file_id)]
    undone = results(client, batch.error_file_id)
    assert batch.status == "cancelled"
    assert sorted(done + [line["custom_id"] for line in undone]) == sorted(line["custom_id"] for line in lines)
    assert {line["error"]["code"] for line in undone} == {"batch_cancelled"}
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(start_and_end(client))


def start_and_end(client: Any) -> str:
    return str(wait_for_end(client, start(client, [chat("a")])).id)


def test_a_batch_that_takes_too_long_expires(client: Any) -> None:
    batch = wait_for_end(client, start(client, [chat(f"{i}", max_tokens=900) for i in range(3)], window="1s"))

    assert batch.status == "expired"
    assert [line["error"]["code"] for line in results(client, batch.error_file_id)] == ["batch_expired"] * 3


def test_files_and_batches_are_listed_in_pages_and_deleted(server: ServerProcess) -> None:
    client = client_of(server, "theirs")
    ids = [upload(client, [chat("a")]) for _ in range(3)]
    batch_id = client.batches.create(input_file_id=ids[0], endpoint=CHAT, completion_window="24h").id
    wait_for_end(client, batch_id)

    assert [file.id for file in client.files.list(limit=2, order="asc", purpose="batch")] == ids
    assert client.files.list(limit=2).has_more
    assert [batch.id for batch in client.batches.list(limit=1)] == [batch_id]
    assert client.files.delete(ids[2]).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.content(ids[2])
    assert deleted(client, f"/batches/{batch_id}")
    assert list(client.batches.list()) == []


def deleted(client: Any, path: str) -> bool:
    answer: Any = client.delete(path, cast_to=object)
    return bool(answer["deleted"])


def test_another_key_sees_neither_files_nor_batches(server: ServerProcess, client: Any) -> None:
    file_id, batch_id = upload(client, [chat("a")]), start(client, [chat("a")])
    other = client_of(server, "theirs")

    for call in (other.files.retrieve, other.files.content, other.files.delete):
        with pytest.raises(openai.NotFoundError):
            call(file_id)
    for see in (other.batches.retrieve, other.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            see(batch_id)
    with pytest.raises(openai.NotFoundError):
        other.batches.create(input_file_id=file_id, endpoint=CHAT, completion_window="24h")
    assert batch_id not in [batch.id for batch in other.batches.list()]


def test_anthropic_batches_give_messages(server: ServerProcess) -> None:
    client: Any = anthropic.Anthropic(base_url=server.url, api_key="ours", max_retries=0, timeout=RESPONSE_S)
    messages: Any = [{"role": "user", "content": "Hi"}]
    requests: Any = [
        {"custom_id": "good", "params": {"model": "tgi", "max_tokens": 3, "messages": messages}},
        {"custom_id": "bad", "params": {"model": "tgi", "max_tokens": -3, "messages": messages}},
    ]

    batch = client.messages.batches.create(requests=requests)
    assert (batch.processing_status, batch.request_counts.processing) == ("in_progress", 2)
    wait_until(lambda: client.messages.batches.retrieve(batch.id).processing_status == "ended", pause_s=0.1)
    batch = client.messages.batches.retrieve(batch.id)

    good, bad = client.messages.batches.results(batch.id)
    assert (batch.request_counts.succeeded, batch.request_counts.errored) == (1, 1)
    assert (good.custom_id, good.result.type, bad.custom_id, bad.result.type) == ("good", "succeeded", "bad", "errored")
    assert good.result.message.usage.output_tokens == 3
    assert bad.result.error.error.type == "invalid_request_error"
    assert next(found.id for found in client.messages.batches.list(limit=1)) == batch.id
    assert client.messages.batches.delete(batch.id).id == batch.id
    with pytest.raises(anthropic.NotFoundError):
        client.messages.batches.retrieve(batch.id)


def test_anthropic_batches_can_be_cancelled(server: ServerProcess) -> None:
    client: Any = anthropic.Anthropic(base_url=server.url, api_key="ours", max_retries=0, timeout=RESPONSE_S)
    params: Any = {
        "model": "tgi",
        "max_tokens": 900,
        "ignore_eos": True,
        "messages": [{"role": "user", "content": "Hi"}],
    }
    batch_id = client.messages.batches.create(requests=[{"custom_id": "long", "params": params}]).id

    client.messages.batches.cancel(batch_id)
    wait_until(lambda: client.messages.batches.retrieve(batch_id).processing_status == "ended", pause_s=0.1)

    (result,) = client.messages.batches.results(batch_id)
    assert (result.custom_id, result.result.type) == ("long", "canceled")


def test_metrics_count_batches_and_their_requests(server: ServerProcess, client: Any) -> None:
    wait_for_end(client, start(client, [chat("a"), chat("b", temperature=-1)]))

    request = urllib.request.Request(f"{server.url}/metrics", headers={"Authorization": "Bearer ours"})
    with urllib.request.urlopen(request, timeout=RESPONSE_S) as response:
        text = response.read().decode()
    assert 'lightserve_batches{model_name="' in text
    for result in ("completed", "failed"):
        (line,) = [line for line in text.splitlines() if f'result="{result}"' in line]
        assert float(line.split()[-1]) >= 1


def test_a_wrong_upload_is_refused(server: ServerProcess, client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.files.create(file=("a.jsonl", b"{}"), purpose="vision")
    status, answer = server.post("/v1/files", {}, Authorization="Bearer ours")
    assert (status, "multipart/form-data" in answer["error"]["message"]) == (415, True)
    with pytest.raises(openai.BadRequestError, match="completion_window"):
        start(client, [chat("a")], window="soon")
    with pytest.raises(openai.BadRequestError, match="endpoint"):
        start(client, [chat("a")], endpoint="/v1/nothing")


def test_a_batch_of_embeddings(tmp_path: Path) -> None:
    flags = ("--task", "embed", "--batch_dir", str(tmp_path / "batches"))
    with running_server(tmp_path / "log", *NULL, *flags) as server:
        client = client_of(server)
        path = "/v1/embeddings"
        lines = [{"custom_id": f"{i}", "method": "POST", "url": path, "body": {"input": [[5, 6]]}} for i in range(3)]
        refused = [chat("a")]

        batch = wait_for_end(client, start(client, lines, path))
        other = wait_for_end(client, start(client, refused))

        bodies = [line["response"]["body"] for line in results(client, batch.output_file_id)]
        assert [len(body["data"]) for body in bodies] == [1, 1, 1]
        (line,) = results(client, other.error_file_id)
        assert "generates text" in line["response"]["body"]["error"]["message"]
        assert server.stop() == 0
