"""Ollama's routes about models, and what surrounds every route of its API."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest

from lightserve.config import HttpConfig
from test.httpserver.fake_engine import LIMITS
from test.httpserver.ollama.ollama_client import PLAIN, SHOW, USER, error_of, lines, whole
from test.httpserver.openai_server import Server, rows, running, with_template

NAMES = ["tiny", "org/other:7b"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    config = HttpConfig(model_name=NAMES)
    with running(tmp_path_factory.mktemp("run"), with_template(SHOW), config) as server:
        yield server


def test_every_name_is_listed(server: Server) -> None:
    models = whole(server.http.get("/api/tags"))["models"]

    assert [model["name"] for model in models] == [model["model"] for model in models] == NAMES
    assert {model["digest"] for model in models} == {models[0]["digest"]}
    assert re.fullmatch("[0-9a-f]{64}", models[0]["digest"])
    assert datetime.fromisoformat(models[0]["modified_at"])
    assert list(models[0]["details"]) == [
        "parent_model",
        "format",
        "family",
        "families",
        "parameter_size",
        "quantization_level",
    ]


def test_the_model_is_shown_as_loaded_for_good(server: Server) -> None:
    [model] = whole(server.http.get("/api/ps"))["models"]

    assert (model["name"], model["context_length"]) == ("tiny", LIMITS.max_req_total_len)
    assert datetime.fromisoformat(model["expires_at"]).year == 2300


@pytest.mark.parametrize("body", [{"model": "tiny"}, {"name": "tiny:latest"}, {"model": "org/other:7b"}], ids=str)
def test_show_tells_what_editors_ask(server: Server, body: dict[str, Any]) -> None:
    shown = whole(server.post("/api/show", body))

    family = shown["model_info"]["general.architecture"]
    assert shown["model_info"][f"{family}.context_length"] == LIMITS.max_req_total_len
    assert shown["model_info"]["general.basename"] == "tiny"
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
    assert shown["template"] == SHOW


def test_a_model_that_only_chats_has_no_other_capability(tmp_path_factory: pytest.TempPathFactory) -> None:
    with running(tmp_path_factory.mktemp("run"), with_template(PLAIN)) as plain:
        assert whole(plain.post("/api/show", {"model": "tiny"}))["capabilities"] == ["completion"]


def test_the_version_is_one_that_clients_accept(server: Server) -> None:
    version = whole(server.http.get("/api/version"))["version"]

    assert tuple(map(int, version.split("."))) >= (0, 13, 4)
    assert server.http.head("/api/version").status_code == 200
    assert server.http.head("/api/tags").status_code == 200


def test_a_pull_of_the_served_model_succeeds(server: Server) -> None:
    assert whole(server.post("/api/pull", {"model": "tiny", "stream": False})) == {"status": "success"}
    assert lines(server.post("/api/pull", {"name": "tiny"}))[-1] == {"status": "success"}


@pytest.mark.parametrize("name", ["dummy", "tgi", "Dummy:latest"])
def test_names_of_clients_that_know_only_an_address_mean_the_model(server: Server, name: str) -> None:
    server.engine.script = rows("ok")

    assert whole(server.post("/api/show", {"model": name}))["details"]
    assert whole(server.post("/api/chat", {"model": name, "messages": [USER], "stream": False}))["model"] == name
    assert whole(server.post("/api/generate", {"model": name, "prompt": "Hi", "stream": False}))["response"] == "ok"


@pytest.mark.parametrize("path", ["/api/pull", "/api/show"])
def test_another_model_is_not_found(server: Server, path: str) -> None:
    assert error_of(server.post(path, {"model": "llama3"})) == (
        404,
        "model 'llama3' not found; this server has 'tiny', 'org/other:7b'",
    )


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/api/create"),
        ("POST", "/api/copy"),
        ("POST", "/api/push"),
        ("POST", "/api/blobs/sha256:0"),
        ("DELETE", "/api/delete"),
    ],
)
def test_what_this_server_cannot_do_is_refused(server: Server, method: str, path: str) -> None:
    status, message = error_of(server.http.request(method, path, json={"model": "tiny"}))

    assert status == 400
    assert "one model" in message or "not supported yet" in message


def test_keys_and_request_ids_hold_here_too(tmp_path_factory: pytest.TempPathFactory) -> None:
    with running(tmp_path_factory.mktemp("run"), with_template(PLAIN), HttpConfig(api_key=["secret"])) as guarded:
        refused = guarded.post("/api/chat", {"messages": [USER]})
        headers = {"Authorization": "Bearer secret", "X-Request-Id": "mine"}
        taken = guarded.http.post("/api/chat", json={"messages": [USER]}, headers=headers)

        assert error_of(refused)[0] == 401
        assert refused.headers["x-request-id"]
        assert [guarded.http.get(path).status_code for path in ("/api/tags", "/api/version", "/api/ps")] == [401] * 3
    assert lines(taken)[-1]["done"]
    assert taken.headers["x-request-id"] == "mine"
