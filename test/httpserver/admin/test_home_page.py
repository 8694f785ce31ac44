"""GET /: what runs here."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx2

from lightserve.config import HttpConfig
from test.httpserver.app_client import served

BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


def home(
    run_dir: Path, config: HttpConfig | None = None, headers: dict[str, str] | None = None, method: str = "GET"
) -> httpx2.Response:
    async def ask() -> httpx2.Response:
        async with served(run_dir, config) as server:
            return await server.http.request(method, "/", headers=headers)

    return asyncio.run(ask())


def test_a_client_reads_as_text_what_runs_here(tmp_path: Path) -> None:
    response = home(tmp_path)

    assert response.headers["content-type"] == "text/plain; charset=utf-8"
    assert "serves tiny" in response.text
    assert "/v1/chat/completions" in response.text
    assert "Ollama is running" in response.text


def test_a_browser_gets_a_page_that_shows_names_as_text(tmp_path: Path) -> None:
    response = home(tmp_path, HttpConfig(model_name=["tiny", "<b>x</b>"]), BROWSER)

    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert "serves tiny, &lt;b&gt;x&lt;/b&gt;" in response.text
    assert '<a href="/docs">' in response.text


def test_a_probe_gets_no_body(tmp_path: Path) -> None:
    response = home(tmp_path, method="HEAD")

    assert (response.status_code, response.content) == (200, b"")


def test_the_page_needs_a_key_too(tmp_path: Path) -> None:
    assert home(tmp_path, HttpConfig(api_key=["secret"])).status_code == 401
