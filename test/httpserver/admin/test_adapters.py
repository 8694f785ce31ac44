"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter in the HTTP process, with a router that the test scripts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import given, settings, strategies as st

from lightserve.config import HttpConfig
from lightserve.messages.output import AdapterReply
from lightserve.messages.request import LoadAdapter, UnloadAdapter
from test.httpserver.admin.test_routes import with_server
from test.httpserver.app_client import Served

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
HEADERS = {"Content-Type": "application/json"}
LOADED = {"lora_name": "sql", "lora_path": "folder/sql"}
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=300),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=6,
)
FIELDS = ("lora_name", "lora_path", "load_inplace", "lora_int_id")

WRONG: list[tuple[str, Any]] = [
    (LOAD, {}),
    (LOAD, {"lora_name": "a"}),
    (LOAD, {"lora_name": "", "lora_path": "a"}),
    (LOAD, {"lora_name": "a" * 257, "lora_path": "a"}),
    (LOAD, {"lora_name": "a", "lora_path": "a" * 4097}),
    (LOAD, LOADED | {"load_inplace": "yes"}),
    (LOAD, {"lora_name": "base", "lora_path": "a"}),  # the name of the base model
    (LOAD, []),
    (UNLOAD, {}),
    (UNLOAD, {"lora_name": 5}),
    (UNLOAD, {"lora_name": "a", "lora_int_id": "b"}),
]


def test_names_and_paths_reach_the_router_as_they_are(tmp_path: Path) -> None:
    async def check(server: Served) -> None:
        loaded = await server.post(LOAD, json=LOADED)
        replaced = await server.post(LOAD, json=LOADED | {"load_inplace": True})
        unloaded = await server.post(UNLOAD, json={"lora_name": "sql", "lora_int_id": 7})

        assert [one.status_code for one in (loaded, replaced, unloaded)] == [200] * 3
        assert loaded.json() == {"status": "ok", "message": "the adapter 'sql' is loaded"}
        first, second, last = server.fake.adapter_queries
        assert isinstance(first, LoadAdapter)
        assert (first.name, first.path, first.replaces) == ("sql", "folder/sql", False)
        assert isinstance(second, LoadAdapter)
        assert second.replaces
        assert isinstance(last, UnloadAdapter)
        assert last.name == "sql"

    with_server(tmp_path, check)


def test_the_reason_of_a_refusal_reaches_the_operator(tmp_path: Path) -> None:
    async def check(server: Served) -> None:
        for status, path, body in ((400, LOAD, LOADED), (404, UNLOAD, {"lora_name": "sql"})):
            server.fake.adapter_reply = AdapterReply(0, status, "the rank is 64; the limit is 16")
            response = await server.post(path, json=body)
            assert response.status_code == status
            assert response.json()["error"]["message"] == "the rank is 64; the limit is 16"

    with_server(tmp_path, check)


def test_a_wrong_body_is_refused_before_the_router_sees_it(tmp_path: Path) -> None:
    async def check(server: Served) -> None:
        for path, body in WRONG:
            response = await server.post(path, json=body)
            assert response.status_code == 400, (path, body)
            assert "\n" not in response.json()["error"]["message"]
        assert server.fake.adapter_queries == []

    with_server(tmp_path, check, HttpConfig(model_name=["base"]))


def test_an_admin_key_is_needed_where_there_is_one(tmp_path: Path) -> None:
    async def check(server: Served) -> None:
        for path, body in ((LOAD, LOADED), (UNLOAD, {"lora_name": "sql"})):
            statuses = [
                (await server.post(path, json=body, headers=headers)).status_code
                for headers in ({}, {"Authorization": "Bearer user"}, {"Authorization": "Bearer admin"})
            ]
            assert statuses[0] == 401
            assert statuses[1] in (401, 403)
            assert statuses[2] == 200
        assert len(server.fake.adapter_queries) == 2

    with_server(tmp_path, check, HttpConfig(api_key=["user"], admin_key=["admin"]))


def test_a_web_page_of_another_origin_cannot_load_an_adapter(tmp_path: Path) -> None:
    async def check(server: Served) -> None:
        for path in (LOAD, UNLOAD):
            response = await server.post(path, content=b"{}", headers={"Origin": "http://evil.test"})
            assert response.status_code == 415
        assert server.fake.adapter_queries == []

    with_server(tmp_path, check)


def test_any_json_gets_200_or_400(tmp_path: Path) -> None:
    async def check(server: Served) -> None:
        bodies: list[Any] = []

        @settings(max_examples=60, database=None, derandomize=True, deadline=None)
        @given(st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=9), JSON_VALUES, max_size=4) | JSON_VALUES)
        def collect(body: Any) -> None:
            bodies.append(body)

        collect()
        for body in bodies:
            for path in (LOAD, UNLOAD):
                response = await server.post(path, content=json.dumps(body), headers=HEADERS)
                assert response.status_code in (200, 400), (path, body, response.text)

    with_server(tmp_path, check)
