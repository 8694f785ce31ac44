"""--root_path: the checks of a path see the route, whether or not the proxy has removed the prefix."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx2
import pytest

from lightserve.config import HttpConfig
from lightserve.errors import ServerError
from lightserve.httpserver.http.paths import route_path
from test.httpserver.app_client import served

CONFIG = HttpConfig(root_path="/llm", api_key=["client"], admin_key=["boss"])
CLIENT = {"Authorization": "Bearer client"}


def post(run_dir: Path, path: str, headers: dict[str, str]) -> httpx2.Response:
    async def ask() -> httpx2.Response:
        async with served(run_dir, CONFIG) as server:
            return await server.post(path, json={"abort_all": True}, headers=headers)

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("path", "expected"),
    [("/llm/health", "/health"), ("/health", "/health"), ("/llmx/health", "/llmx/health"), ("/llm/", "/")],
)
def test_the_prefix_is_removed_once(path: str, expected: str) -> None:
    assert route_path({"path": path, "root_path": "/llm"}) == expected


@pytest.mark.parametrize("prefix", ["", "/llm"])
def test_an_admin_path_under_the_prefix_needs_the_admin_key(tmp_path: Path, prefix: str) -> None:
    refused = post(tmp_path, f"{prefix}/abort_request", CLIENT)
    allowed = post(tmp_path, f"{prefix}/abort_request", {"Authorization": "Bearer boss"})

    assert refused.status_code == 403
    assert allowed.status_code == 200


@pytest.mark.parametrize("prefix", ["", "/llm"])
def test_health_under_the_prefix_needs_no_key(tmp_path: Path, prefix: str) -> None:
    assert post(tmp_path, f"{prefix}/readiness", {}).status_code == 200


@pytest.mark.parametrize("prefix", ["", "/llm"])
def test_errors_under_the_prefix_have_the_format_of_their_api(tmp_path: Path, prefix: str) -> None:
    of_a_route = post(tmp_path, f"{prefix}/v1/messages", CLIENT)
    of_the_key_check = post(tmp_path, f"{prefix}/v1/messages", {})

    assert of_a_route.json()["type"] == of_the_key_check.json()["type"] == "error"  # Anthropic's


@pytest.mark.parametrize("root_path", ["llm", "/llm/", "/"])
def test_a_malformed_prefix_is_refused(root_path: str) -> None:
    with pytest.raises(ServerError, match="root_path="):
        HttpConfig(root_path=root_path)
