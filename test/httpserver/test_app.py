"""Request ids, keys, CORS and the shape of errors, whatever the route."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from lightserve.config import HttpConfig
from lightserve.errors import (
    ClientDisconnectedError,
    DeadlineError,
    InvalidRequestError,
    LightserveError,
    OverloadedError,
    PromptTooLongError,
    ServerError,
    UnavailableError,
    WorkerDiedError,
)
from lightserve.httpserver.http.errors import error_object
from lightserve.httpserver.http.middleware import ApiKeys, RequestMiddleware
from test.httpserver.app_client import Served, served

KEYED = HttpConfig(api_key=["sk-right", "schlüssel"])
SECRET = "/home/someone/weights.bin"


def with_server(run_dir: Path, check: Callable[[Served], Awaitable[None]], config: HttpConfig | None = None) -> None:
    async def run() -> None:
        async with served(run_dir, config) as server:
            await check(server)

    asyncio.run(run())


def add_failing(server: Served, error: Exception) -> None:
    async def fail() -> None:
        raise error

    server.app.add_api_route("/fail", fail)


# request ids


@pytest.mark.parametrize(
    ("given", "echoed"),
    [
        (b"abc-1.2:3_4", "abc-1.2:3_4"),
        (b"x" * 128, "x" * 128),
        (b"x" * 1_000_000, "x" * 128),
        (b"a\r\nSet-Cookie: b=c", "aSet-Cookie:bc"),
        ("é漢a".encode(), "a"),
        (b"../../etc/passwd", "....etcpasswd"),
    ],
)
def test_a_request_id_is_cleaned_and_echoed(given: bytes, echoed: str) -> None:
    seen, headers = through_middleware([(b"x-request-id", given)])

    assert seen == echoed
    assert headers == [(b"a", b"b"), (b"x-request-id", echoed.encode())]


@pytest.mark.parametrize("given", [[], [(b"x-request-id", b"")], [(b"x-request-id", b" \xff\r\n")]])
def test_a_request_without_a_usable_id_gets_a_fresh_one(given: list[tuple[bytes, bytes]]) -> None:
    ids = {through_middleware(given)[0] for _ in range(3)}

    assert len(ids) == 3
    assert all(re.fullmatch("[0-9a-f]{16}", one) for one in ids)


def through_middleware(given: list[tuple[bytes, bytes]]) -> tuple[str, list[tuple[bytes, bytes]]]:
    """The id that the application sees, and the headers that the client gets."""
    seen: list[str] = []
    sent: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["state"]["request_id"])
        await send({"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]})
        await send({"type": "http.response.body", "body": b"x"})

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        raise AssertionError("nobody reads the body here")

    scope = {"type": "http", "method": "GET", "path": "/", "headers": given}
    asyncio.run(RequestMiddleware(app, ApiKeys())(scope, receive, send))
    assert sent[1] == {"type": "http.response.body", "body": b"x"}
    return seen[0], sent[0]["headers"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/health", 200), ("GET", "/nowhere", 404), ("PUT", "/health", 405), ("GET", "/fail", 500)],
)
def test_every_response_has_the_request_id(tmp_path: Path, method: str, path: str, status: int) -> None:
    async def check(server: Served) -> None:
        add_failing(server, RuntimeError(SECRET))

        response = await server.http.request(method, path, headers={"X-Request-Id": "mine"})

        assert (response.status_code, response.headers["x-request-id"]) == (status, "mine")

    with_server(tmp_path, check)


# keys


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer "},
        {"Authorization": "Bearer sk-wrong"},
        {"Authorization": "Bearer SK-RIGHT"},
        {"Authorization": "Bearer sk-right-and-more"},
        {"Authorization": "Basic sk-right"},
        {"Authorization": "sk-right"},
        {"Authorization": b"Bearer \xff\xfe"},
        {"Authorization": "Bearer " + "k" * 2**20},
        {"x-api-key": ""},
        {"x-api-key": "sk-wrong"},
        {"x-api-key": "Bearer sk-right"},
    ],
    ids=lambda headers: str(headers)[:40],
)
def test_a_request_without_a_valid_key_is_refused(tmp_path: Path, headers: dict[str, str]) -> None:
    async def check(server: Served) -> None:
        for path in ("/v1/models", "/metrics", "/openapi.json", "/nowhere"):
            response = await server.get(path, headers=headers)

            assert response.status_code == 401
            assert response.headers["www-authenticate"] == "Bearer"
            assert response.headers["x-request-id"]
            error = response.json()["error"]
            assert (error["type"], error["code"], error["param"]) == ("authentication_error", "invalid_api_key", None)
            assert "sk-" not in error["message"]

    with_server(tmp_path, check, KEYED)


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer sk-right"},
        {"Authorization": "bearer sk-right"},
        {"Authorization": "BEARER  sk-right"},
        {"Authorization": "Bearer schlüssel".encode()},
        {"x-api-key": "sk-right"},
        {"x-api-key": "sk-right", "Authorization": "Bearer sk-wrong"},
    ],
    ids=str,
)
def test_a_valid_key_is_accepted(tmp_path: Path, headers: dict[str, str]) -> None:
    async def check(server: Served) -> None:
        assert (await server.get("/v1/models", headers=headers)).status_code == 200

    with_server(tmp_path, check, KEYED)


def test_probes_need_no_key(tmp_path: Path) -> None:
    async def check(server: Served) -> None:
        for path in ("/health", "/healthz", "/liveness", "/readiness"):
            assert (await server.get(path)).status_code == 200

    with_server(tmp_path, check, KEYED)


def test_an_empty_key_is_not_valid(tmp_path: Path) -> None:
    async def check(server: Served) -> None:
        assert (await server.get("/v1/models", headers={"x-api-key": ""})).status_code == 401

    with_server(tmp_path, check, HttpConfig(api_key=[""]))


@pytest.mark.parametrize(
    ("config", "headers", "status"),
    [
        (HttpConfig(), {}, 200),
        (KEYED, {"x-api-key": "sk-right"}, 200),
        (HttpConfig(admin_key=["boss"]), {}, 401),
        (HttpConfig(admin_key=["boss"]), {"x-api-key": "boss"}, 200),
        (HttpConfig(admin_key=["boss"], api_key=["k"]), {"x-api-key": "k"}, 403),
        (HttpConfig(admin_key=["boss"], api_key=["k"]), {"x-api-key": "k", "Authorization": "Bearer boss"}, 200),
    ],
)
def test_admin_paths_need_an_admin_key_where_one_is_set(
    tmp_path: Path, config: HttpConfig, headers: dict[str, str], status: int
) -> None:
    async def check(server: Served) -> None:
        response = await server.post("/abort_request", json={"request_id": "a"}, headers=headers)
        listed = await server.get("/debug/requests", headers=headers)
        shown = await server.get("/debug/requests/a", headers=headers)

        assert response.status_code == listed.status_code == status
        assert shown.status_code == (404 if status == 200 else status)

    with_server(tmp_path, check, config)


def test_without_api_keys_an_admin_key_protects_admin_paths_only(tmp_path: Path) -> None:
    async def check(server: Served) -> None:
        assert (await server.get("/v1/models")).status_code == 200

    with_server(tmp_path, check, HttpConfig(admin_key=["boss"]))


# CORS

PREFLIGHT = {
    "Origin": "http://page",
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


@pytest.mark.parametrize("origin", ["http://page", "*"])
def test_a_preflight_of_an_allowed_page_needs_no_key(tmp_path: Path, origin: str) -> None:
    async def check(server: Served) -> None:
        response = await server.http.options("/v1/models", headers=PREFLIGHT)

        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == origin
        assert "authorization" in response.headers["access-control-allow-headers"]

    with_server(tmp_path, check, HttpConfig(api_key=["k"], allowed_origins=[origin]))


def test_an_allowed_page_can_read_an_error_and_the_request_id(tmp_path: Path) -> None:
    async def check(server: Served) -> None:
        response = await server.get("/v1/models", headers={"Origin": "http://page"})

        assert response.status_code == 401
        assert response.headers["access-control-allow-origin"] == "http://page"
        assert "X-Request-Id" in response.headers["access-control-expose-headers"]

    with_server(tmp_path, check, HttpConfig(api_key=["k"], allowed_origins=["http://page"]))


@pytest.mark.parametrize("origins", [[], ["http://other"]])
def test_other_pages_get_no_cors_headers(tmp_path: Path, origins: list[str]) -> None:
    async def check(server: Served) -> None:
        simple = await server.get("/version", headers={"Origin": "http://page"})
        preflight = await server.http.options("/version", headers=PREFLIGHT)

        assert "access-control-allow-origin" not in simple.headers
        assert preflight.status_code >= 400
        assert "access-control-allow-origin" not in preflight.headers

    with_server(tmp_path, check, HttpConfig(allowed_origins=origins))


# errors


@pytest.mark.parametrize(
    ("error", "status", "expected"),
    [
        (InvalidRequestError("no", "top_p"), 400, ("no", "invalid_request_error", "top_p", None)),
        (
            PromptTooLongError(9, 9),
            400,
            (
                "This model's maximum context length is 9 tokens: the prompt has 9 tokens; the limit is 8",
                "invalid_request_error",
                None,
                "context_length_exceeded",
            ),
        ),
        (OverloadedError("later"), 429, ("later", "rate_limit_error", None, "rate_limit_exceeded")),
        (UnavailableError("loading"), 503, ("loading", "service_unavailable", None, "service_unavailable")),
        (DeadlineError("its time was over"), 504, ("its time was over", "server_error", None, "timeout")),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_of_the_client_is_reported_in_full(
    tmp_path: Path, error: LightserveError, status: int, expected: tuple[str | None, ...]
) -> None:
    async def check(server: Served) -> None:
        add_failing(server, error)

        response = await server.get("/fail")

        assert response.status_code == status
        message, kind, param, code = expected
        assert response.json() == {"error": {"message": message, "type": kind, "param": param, "code": code}}
        assert ("retry-after" in response.headers) == (status in (429, 503))
        assert response.json() == error_object(error)

    with_server(tmp_path, check)


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (ServerError(SECRET), 500, "server_error"),
        (WorkerDiedError(SECRET), 503, "service_unavailable"),
        (RuntimeError(SECRET), 500, "server_error"),
        (AssertionError(SECRET), 500, "server_error"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_server_fault_is_logged_with_its_traceback_and_reported_without_detail(
    tmp_path: Path, log: list[logging.LogRecord], error: Exception, status: int, kind: str
) -> None:
    async def check(server: Served) -> None:
        add_failing(server, error)

        response = await server.get("/fail", headers={"X-Request-Id": "mine"})

        assert response.status_code == status
        assert response.json()["error"] == {
            "message": "the server failed to process this request; the request id is mine",
            "type": kind,
            "param": None,
            "code": None,
        }

    with_server(tmp_path, check)
    (record,) = log
    assert record.levelno == logging.ERROR
    assert record.getMessage() == f"mine failed: {SECRET}"
    assert record.exc_info is not None
    assert record.exc_info[2] is not None


def test_errors_of_the_client_are_logged_without_a_traceback(tmp_path: Path, log: list[logging.LogRecord]) -> None:
    async def check(server: Served) -> None:
        for i, error in enumerate((InvalidRequestError("no"), DeadlineError("late"), UnavailableError("loading"))):
            server.app.add_api_route(f"/fail{i}", _raising(error))
            await server.get(f"/fail{i}")

    with_server(tmp_path, check)
    (record,) = log
    assert record.getMessage().endswith("refused: loading")
    assert record.exc_info is None


def _raising(error: Exception) -> Callable[[], Awaitable[None]]:
    async def fail() -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", "/nowhere/at%0aall", 404, "not_found_error"),
        ("GET", "/v1/models/", 404, "not_found_error"),
        ("GET", "/health/", 404, "not_found_error"),
        ("DELETE", "/health", 405, "invalid_request_error"),
        ("BREW", "/metrics", 405, "invalid_request_error"),
        ("GET", "/number/x%2Fy", 400, "invalid_request_error"),
    ],
)
def test_errors_of_the_framework_have_the_same_format(
    tmp_path: Path, method: str, path: str, status: int, kind: str
) -> None:
    async def number(value: int) -> None:
        raise AssertionError("the value is no number")

    async def check(server: Served) -> None:
        server.app.add_api_route("/number/{value:path}", number)

        response = await server.http.request(method, path)

        assert response.status_code == status
        assert response.headers["content-type"] == "application/json"
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == kind
        assert not re.search(r"nowhere|Traceback|\.py|detail", error["message"])

    with_server(tmp_path, check)


@pytest.mark.parametrize(
    ("method", "path", "told"),
    [
        ("POST", "/chat/completions", "; did you mean POST /v1/chat/completions?"),
        ("POST", "/v1/v1/chat/completions", "; did you mean POST /v1/chat/completions?"),
        ("GET", "/v1/chat/completions/", "; did you mean POST /v1/chat/completions?"),
        ("POST", "/v1/chat", "; did you mean POST /v1/chat/completions?"),
        ("GET", "/llm/V1/model", "; did you mean GET /llm/v1/models?"),
        ("POST", "/v1/audio/speech", ""),
        ("GET", "/favicon.ico", ""),
        ("GET", f"/{'v1/models' * 1000}", ""),
    ],
)
def test_an_unknown_path_gets_the_nearest_endpoint(tmp_path: Path, method: str, path: str, told: str) -> None:
    async def check(server: Served) -> None:
        response = await server.http.request(method, path)

        assert (response.status_code, response.json()["error"]["message"]) == (404, f"there is no such endpoint{told}")

    with_server(tmp_path, check, HttpConfig(root_path="/llm"))


def test_a_refused_method_gets_every_method_of_the_path(tmp_path: Path) -> None:
    async def check(server: Served) -> None:
        refused = await server.http.delete("/health")
        assert refused.headers["allow"] == "GET, HEAD"
        assert refused.json()["error"]["message"].endswith("it takes GET, HEAD")
        assert (await server.http.delete("/get_model_name")).headers["allow"] == "GET, POST"

    with_server(tmp_path, check)


def test_a_client_that_has_disconnected_gets_an_empty_response(tmp_path: Path, log: list[logging.LogRecord]) -> None:
    async def check(server: Served) -> None:
        add_failing(server, ClientDisconnectedError("disconnected"))

        response = await server.get("/fail")

        assert (response.status_code, response.content) == (499, b"")

    with_server(tmp_path, check)
    assert not log


def test_a_response_that_breaks_off_does_not_look_complete(tmp_path: Path, log: list[logging.LogRecord]) -> None:
    sent: list[Message] = []

    async def pieces() -> AsyncIterator[bytes]:
        yield b"one"
        raise RuntimeError("broken")

    async def stream(request: Request) -> StreamingResponse:
        return StreamingResponse(pieces())

    async def check(server: Served) -> None:
        server.app.add_api_route("/stream", stream)
        with pytest.raises(RuntimeError, match="broken"):
            await call(server.app, "/stream", sent)

    with_server(tmp_path, check)
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert sent[1]["more_body"] is True
    assert log[0].exc_info is not None


async def call(app: Any, path: str, sent: list[Message]) -> None:
    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    scope = {"type": "http", "method": "GET", "path": path, "headers": [], "query_string": b"", "root_path": ""}
    await app(scope, receive, send)


@pytest.fixture
def log() -> Any:
    """What the error handlers wrote."""
    records: list[logging.LogRecord] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    logger, handler = logging.getLogger("lightserve.httpserver.http.errors"), Keep()
    logger.addHandler(handler)
    yield records
    logger.removeHandler(handler)


# documentation


def test_the_docs_describe_every_route_validly(tmp_path: Path) -> None:
    async def check(server: Served) -> None:
        assert (await server.get("/docs")).status_code == 200
        document = (await server.get("/openapi.json")).json()

        ids = [operation["operationId"] for path in document["paths"].values() for operation in path.values()]
        assert len(ids) == len(set(ids))
        for ref in refs(document):
            node = document
            for part in ref.removeprefix("#/").split("/"):
                node = node[part]
        assert {"/health", "/v1/models", "/metrics", "/abort_request"} <= set(document["paths"])
        assert "4XX" in document["paths"]["/v1/models/{model_id}"]["get"]["responses"]

    with_server(tmp_path, check)


def refs(node: Any) -> list[str]:
    if isinstance(node, dict):
        own = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
        return own + [ref for value in node.values() for ref in refs(value)]
    if isinstance(node, list):
        return [ref for value in node for ref in refs(value)]
    return []
