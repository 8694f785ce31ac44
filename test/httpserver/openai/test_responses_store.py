"""Stored responses: previous_response_id, GET, DELETE, cancel, input_items, and the limits of the store."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from lightserve.config import HttpConfig
from lightserve.httpserver.http.access_log import AccessLog
from lightserve.httpserver.openai.responses.response import ResponsesResponse, ResponsesSpec
from lightserve.httpserver.openai.responses.saving import SavedResponse
from lightserve.httpserver.openai.responses.store import ResponseStore
from lightserve.messages.output import StrOut
from lightserve.messages.params import FinishReason
from lightserve.messages.step import Token
from test.httpserver.chat.test_parts import plain_parser
from test.httpserver.chat.tool_chats import ALL, prompt
from test.httpserver.openai.test_responses import SHOW, TOOLS, create, refused, stream
from test.httpserver.openai_server import Server, fails, rows, running, with_template
from test.waiting import DEADLINE_S, wait_until


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("run"), with_template(SHOW)) as server:
        yield server


def get(server: Server, response_id: str, path: str = "", **headers: str) -> Any:
    return server.http.get(f"/v1/responses/{response_id}{path}", headers=headers)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_response_can_be_read_and_deleted(server: Server, is_stream: bool) -> None:
    server.engine.script = rows(*(ALL[at : at + 5] for at in range(0, len(ALL), 5)))
    response = stream(server, tools=TOOLS)[-1]["response"] if is_stream else create(server, tools=TOOLS)

    assert response["store"] is True
    assert get(server, response["id"]).json() == response
    found: Any = server.openai.responses.retrieve(response["id"])
    assert (found.status, found.output[1].content[0].text) == ("completed", "Let me see.")
    server.openai.responses.delete(response["id"])
    with pytest.raises(openai.NotFoundError) as missing:
        server.openai.responses.retrieve(response["id"])
    assert missing.value.code == "response_not_found"


def test_a_conversation_continues_by_the_id_of_its_last_response(server: Server) -> None:
    server.engine.script = rows("Paris.")
    first = server.openai.responses.create(model="tiny", input="Capital of France?", instructions="Be brief.")
    second = server.openai.responses.create(model="tiny", input="And Spain?", previous_response_id=first.id)
    third = server.openai.responses.create(model="tiny", input="And Italy?", previous_response_id=second.id)

    assert third.previous_response_id == second.id
    assert [(one["role"], one["content"]) for one in prompt(server)["messages"]] == [
        ("user", "Capital of France?"),
        ("assistant", "Paris."),
        ("user", "And Spain?"),
        ("assistant", "Paris."),
        ("user", "And Italy?"),
    ]


def test_the_result_of_a_call_continues_its_response(server: Server) -> None:
    server.engine.script = rows(ALL)
    first = create(server, tools=TOOLS)
    calls = [item["call_id"] for item in first["output"] if item["type"] == "function_call"]
    results = [{"type": "function_call_output", "call_id": one, "output": "wet"} for one in calls]

    create(server, input=results, previous_response_id=first["id"], tools=TOOLS)

    _, assistant, *tools = prompt(server)["messages"]
    assert [one["id"] for one in assistant["tool_calls"]] == calls
    assert assistant["reasoning_content"] == "Hm."
    assert [one["tool_call_id"] for one in tools] == calls


def test_an_item_reference_is_the_item_of_a_stored_response(server: Server) -> None:
    server.engine.script = rows("Paris.")
    first = create(server, input="Capital of France?")
    reference = {"type": "item_reference", "id": first["output"][0]["id"]}

    create(server, input=[{"role": "user", "content": "Capital?"}, reference, {"role": "user", "content": "Sure?"}])
    messages = prompt(server)["messages"]
    status, error = refused(server, input=[{"type": "item_reference", "id": "msg_1_0"}])

    assert [one["content"] for one in messages] == ["Capital?", "Paris.", "Sure?"]
    assert (status, error["param"]) == (400, "input")
    assert "'msg_1_0'" in error["message"]


def test_a_response_may_be_sent_without_storing_it(server: Server) -> None:
    server.engine.script = rows("x")
    response = create(server, store=False)

    assert response["store"] is False
    assert get(server, response["id"]).status_code == 404
    status, error = refused(server, previous_response_id=response["id"])
    assert (status, error["param"], error["code"]) == (400, "previous_response_id", "previous_response_not_found")


@pytest.mark.parametrize(
    ("fields", "headers"),
    [({"rid": "same"}, {}), ({"request_id": "same"}, {}), ({}, {"X-Request-Id": "same"}), ({}, {})],
    ids=["rid", "request_id", "header", "none"],
)
@pytest.mark.parametrize("is_stream", [False, True])
def test_responses_with_the_same_request_id_are_two(
    server: Server, fields: dict[str, str], headers: dict[str, str], is_stream: bool
) -> None:
    ids = []
    for question in ("One?", "Two?"):
        server.engine.script = rows(f"Answer to {question}")
        body = {"input": question, "stream": is_stream, **fields}
        made = server.http.post("/v1/responses", json=body, headers=headers)
        assert made.headers["x-request-id"] not in made.text.partition('"output"')[0]
        ids.append(re.findall(r"resp_\w+", made.text)[0])

    assert ids[0] != ids[1]
    for question, response_id in zip(("One?", "Two?"), ids, strict=True):
        assert get(server, response_id).json()["output"][0]["content"][0]["text"] == f"Answer to {question}"
        [item] = get(server, response_id, "/input_items").json()["data"]
        assert item["content"][0]["text"] == question


def test_input_items_are_listed(server: Server) -> None:
    server.engine.script = rows("Paris.")
    first = create(server, input="Capital of France?")
    second = create(server, input=[{"role": "user", "content": "Sure?"}], previous_response_id=first["id"])

    newest = server.openai.responses.input_items.list(second["id"])
    page = get(server, second["id"], "/input_items?order=asc&limit=2").json()
    rest = get(server, second["id"], f"/input_items?order=asc&after={page['last_id']}").json()

    items: list[Any] = newest.data
    texts = [item.content[0].text for item in items]
    assert texts == ["Sure?", "Paris.", "Capital of France?"]
    assert [item["role"] for item in page["data"]] == ["user", "assistant"]
    assert (page["has_more"], rest["has_more"]) == (True, False)
    assert [item["content"] for item in rest["data"]] == [[{"type": "input_text", "text": "Sure?"}]]
    assert get(server, second["id"], "/input_items?after=x").json()["error"]["param"] == "after"
    assert get(server, second["id"], "/input_items?limit=0").status_code == 400
    assert get(server, "resp_1", "/input_items").status_code == 404


def test_a_stored_response_cannot_be_streamed(server: Server) -> None:
    server.engine.script = rows("x")
    response = create(server)

    refusal = get(server, response["id"], "?stream=true")

    assert (refusal.status_code, refusal.json()["error"]["param"]) == (400, "stream")


def test_a_response_in_progress_is_cancelled(server: Server) -> None:
    server.engine.script = rows("Hel", "lo")
    server.hold()
    events: list[Any] = []
    has_begun = threading.Event()

    def read() -> None:
        for event in server.openai.responses.create(model="tiny", input="Hi", stream=True):
            events.append(event)
            has_begun.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert has_begun.wait(DEADLINE_S)
    response_id = events[0].response.id

    in_progress = get(server, response_id).json()
    status, error = refused(server, previous_response_id=response_id)
    server.context.manager._abort_own_requests(response_id)  # the fake engine does not pass the message on
    wait_until(lambda: get(server, response_id).json()["status"] != "in_progress")
    reader.join(DEADLINE_S)
    server.release()
    again = server.http.post(f"/v1/responses/{response_id}/cancel")

    assert (in_progress["status"], in_progress["usage"]) == ("in_progress", None)
    assert (status, error["param"]) == (400, "previous_response_id")
    assert (events[-1].type, events[-1].response.status) == ("response.failed", "cancelled")
    assert get(server, response_id).json()["output"][0]["content"][0]["text"] == "Hel"
    assert (again.status_code, again.json()["error"]["param"]) == (400, "response_id")
    assert "is cancelled" in again.json()["error"]["message"]


def test_a_response_whose_reader_left_is_cancelled(server: Server) -> None:
    server.engine.script = rows("Hel", "lo")
    server.hold()

    with server.openai.responses.create(model="tiny", input="Hi", stream=True) as events:
        response_id = next(iter(events)).response.id  # type: ignore[union-attr]

    wait_until(lambda: get(server, response_id).json()["status"] == "cancelled")
    server.release()


def test_a_completed_response_cannot_be_cancelled(server: Server) -> None:
    server.engine.script = rows("x")
    response = create(server)

    with pytest.raises(openai.BadRequestError, match="is completed"):
        server.openai.responses.cancel(response["id"])
    with pytest.raises(openai.NotFoundError):
        server.openai.responses.cancel("resp_1")


def test_a_failed_response_is_stored_as_failed(server: Server) -> None:
    server.engine.script = fails(599, "secret", "Hel")
    last = stream(server)[-1]

    found = get(server, last["response"]["id"]).json()

    assert found == last["response"]
    assert found["status"] == "failed"


def test_a_response_belongs_to_the_key_that_made_it(tmp_path: Path) -> None:
    config = HttpConfig(api_key=["first", "second", "drïtter", "viérter"])
    with running(tmp_path, with_template(SHOW), config) as server:
        first, second = {"Authorization": "Bearer first"}, {"x-api-key": "second"}
        made = server.http.post("/v1/responses", json={"input": "Hi"}, headers=first).json()
        follow = {"input": "Hi", "previous_response_id": made["id"]}

        assert get(server, made["id"], **first).status_code == 200
        assert get(server, made["id"], **{"x-api-key": "first"}).status_code == 200
        assert get(server, made["id"], **second).status_code == 404
        assert server.http.post("/v1/responses", json=follow, headers=second).status_code == 400
        assert server.http.delete(f"/v1/responses/{made['id']}", headers=second).status_code == 404
        assert server.http.post(f"/v1/responses/{made['id']}/cancel", headers=second).status_code == 404
        assert server.http.post("/v1/responses", json=follow, headers=first).status_code == 200

        third, fourth = ({b"x-api-key": key.encode()} for key in ("drïtter", "viérter"))
        made = server.http.post("/v1/responses", json={"input": "Hi"}, headers=third).json()
        assert server.http.get(f"/v1/responses/{made['id']}", headers=third).status_code == 200
        assert server.http.get(f"/v1/responses/{made['id']}", headers=fourth).status_code == 404


@pytest.mark.parametrize("config", [HttpConfig(response_store_size=0), HttpConfig(response_store_bytes=0)])
def test_the_store_can_be_turned_off(tmp_path: Path, config: HttpConfig) -> None:
    with running(tmp_path, with_template(SHOW), config) as server:
        made = create(server)

        assert made["store"] is False
        assert get(server, made["id"]).status_code == 404
        assert not (tmp_path / "responses").exists()


def new_store(run_dir: Path, max_count: int = 1000, max_bytes: int = 2**20, http_index: int = 0) -> ResponseStore:
    return ResponseStore(str(run_dir), max_count, max_bytes, http_index)


def new_response(response_id: str) -> ResponsesResponse:
    return ResponsesResponse(plain_parser(), AccessLog("1", "x"), ResponsesSpec("tiny", response_id))


def response(name: str, text: str = "", status: str = "completed") -> dict[str, Any]:
    return {"id": name, "text": text, "status": status}


async def names(store: ResponseStore) -> list[str]:
    return [name for name in "abcdef" if await store.get("", name) is not None]


def test_the_oldest_responses_make_room_by_number(tmp_path: Path) -> None:
    async def run() -> None:
        store = new_store(tmp_path, max_count=3)

        for name in "abcde":
            await store.add("", response(name), [])

        assert await names(store) == ["c", "d", "e"]

    asyncio.run(run())


def test_the_oldest_responses_make_room_by_bytes(tmp_path: Path) -> None:
    async def run() -> None:
        store = new_store(tmp_path, max_bytes=1000)

        for name in "abc":
            await store.add("", response(name, "x" * 300), [])
        await store.add("", response("d", "x" * 2000), [])
        await store.update("", response("c", "x" * 700))

        assert await names(store) == ["c"]

    asyncio.run(run())


def test_two_processes_share_the_store(tmp_path: Path) -> None:
    async def run() -> None:
        first, second = (new_store(tmp_path) for _ in range(2))

        await first.add("owner", response("a"), [{"role": "user", "content": "Hi"}])
        found = await second.get("owner", "a")
        await second.update("owner", response("a", "new"))

        assert found is not None
        assert found.input == [{"role": "user", "content": "Hi"}]
        again = await first.get("owner", "a")
        assert again is not None
        assert again.response["text"] == "new"
        assert await first.get("other", "a") is None
        assert await second.delete("owner", "a") is True
        assert await first.delete("owner", "a") is False

    asyncio.run(run())


def test_responses_of_an_http_process_that_died_end_when_another_one_takes_its_place(tmp_path: Path) -> None:
    async def run() -> None:
        processes = [new_store(tmp_path, http_index=index) for index in range(2)]
        for index, store in enumerate(processes):
            await store.add("owner", response(f"running {index}", status="in_progress"), [])
            await store.add("owner", response(f"ended {index}", status="in_progress"), [])
            await store.update("owner", response(f"ended {index}", status="completed"))

        replacement = new_store(tmp_path, http_index=0)
        replacement.fail_lost()

        found = {name: await replacement.get("owner", name) for name in ("running 0", "running 1", "ended 0")}
        statuses = {name: one and one.response["status"] for name, one in found.items()}
        assert statuses == {"running 0": "failed", "running 1": "in_progress", "ended 0": "completed"}
        lost = found["running 0"]
        assert lost is not None
        assert lost.response["error"]["code"] == "server_error"
        assert "died" in lost.response["error"]["message"]

    asyncio.run(run())


def test_a_response_whose_stream_goes_on_in_another_process_is_stored_once(tmp_path: Path) -> None:
    async def run() -> None:
        first, second = (new_store(tmp_path, http_index=index) for index in range(2))
        await first.add("owner", response("a", status="in_progress"), [{"role": "user", "content": "Hi"}])
        new_store(tmp_path, http_index=0).fail_lost()

        assert await second.add("owner", response("a", status="in_progress"), []) is True
        assert await second.add("other", response("a", status="in_progress"), []) is False
        new_store(tmp_path, http_index=0).fail_lost()  # it is not of this process any more
        await second.update("owner", response("a", "new"))

        assert await second.add("owner", response("a", status="in_progress"), []) is False  # it has ended
        found = await first.get("owner", "a")
        assert found is not None
        assert (found.response["status"], found.response["text"]) == ("completed", "new")
        assert found.input == [{"role": "user", "content": "Hi"}]
        assert await second.get("other", "a") is None

    asyncio.run(run())


def test_a_response_that_was_not_added_changes_no_other(tmp_path: Path) -> None:
    async def run() -> None:
        store = new_store(tmp_path)
        added = response("resp_1", "of another request")
        await store.add("", added, [])
        saved = SavedResponse(store, "", new_response("resp_1"), [])

        await saved.save()
        saved.response.write([(0, StrOut(0, "x", Token(1), finish_reason=FinishReason.STOP))])
        await saved.save()
        saved.cancel()

        assert saved.is_stored is False
        found = await store.get("", "resp_1")
        assert found is not None
        assert found.response == added

    asyncio.run(run())


def test_a_damaged_store_does_not_keep_an_http_process_from_starting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "responses").mkdir()
    (tmp_path / "responses" / "responses.sqlite").write_bytes(b"damaged" * 1000)

    new_store(tmp_path).fail_lost()

    assert "stored responses cannot be read: file is not a database" in caplog.text


def test_a_deleted_response_does_not_come_back(tmp_path: Path) -> None:
    async def run() -> None:
        store = new_store(tmp_path)
        await store.add("", response("a"), [])
        await store.delete("", "a")

        await store.update("", response("a", "new"))

        assert await store.get("", "a") is None

    asyncio.run(run())


def test_a_response_that_cannot_be_written_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        (tmp_path / "responses").write_text("a file where the folder should be")
        store = new_store(tmp_path)

        await store.add("", response("a"), [])

        assert "a response is not stored" in caplog.text

    asyncio.run(run())
