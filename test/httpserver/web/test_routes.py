"""The files of the chat page and of Swagger UI over HTTP."""

from __future__ import annotations

import asyncio
import gzip
import re
from collections.abc import Sequence
from pathlib import Path

import httpx2
import pytest

from lightserve.config import HttpConfig
from lightserve.httpserver.web.routes import FOLDER
from test.httpserver.app_client import served

BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
KEYED = HttpConfig(api_key=["secret"])
ROOTED = HttpConfig(root_path="/llm")
CHAT = FOLDER / "chat"
CHAT_FILES = sorted(path.relative_to(CHAT).as_posix() for path in CHAT.rglob("*.*"))
MEDIA_TYPES = {"css": "text/css", "html": "text/html", "js": "text/javascript", "svg": "image/svg+xml"}
MAX_PAGE_BYTES = 200_000  # compressed


def get_all(run_dir: Path, paths: Sequence[str], config: HttpConfig | None = None) -> list[httpx2.Response]:
    async def ask() -> list[httpx2.Response]:
        async with served(run_dir, config) as server:
            return [await server.get(path, headers=BROWSER) for path in paths]

    return asyncio.run(ask())


def get(
    run_dir: Path,
    path: str,
    config: HttpConfig | None = None,
    headers: dict[str, str] | None = None,
    method: str = "GET",
) -> httpx2.Response:
    async def ask() -> httpx2.Response:
        async with served(run_dir, config) as server:
            return await server.http.request(method, path, headers=headers)

    return asyncio.run(ask())


def test_a_browser_gets_the_chat_page(tmp_path: Path) -> None:
    response = get(tmp_path, "/", headers=BROWSER)

    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert '<script type="module" src="web/main.js">' in response.text


def test_another_client_gets_what_runs_here_as_text(tmp_path: Path) -> None:
    response = get(tmp_path, "/")

    assert response.headers["content-type"] == "text/plain; charset=utf-8"
    assert "serves tiny" in response.text
    assert "/v1/chat/completions" in response.text
    assert "Ollama is running" in response.text


def test_no_web_turns_the_page_off(tmp_path: Path) -> None:
    config = HttpConfig(no_web=True)

    assert get(tmp_path, "/", config, BROWSER).headers["content-type"] == "text/plain; charset=utf-8"
    assert get(tmp_path, "/web/main.js", config).status_code == 404


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_a_page_runs_only_scripts_of_the_server(tmp_path: Path, path: str) -> None:
    headers = get(tmp_path, path, headers=BROWSER).headers

    policy = dict(part.strip().partition(" ")[::2] for part in headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["base-uri"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"


def test_the_chat_page_makes_no_html_of_strings(tmp_path: Path) -> None:
    policy = get(tmp_path, "/", headers=BROWSER).headers["content-security-policy"]

    assert "require-trusted-types-for 'script'; trusted-types 'none'" in policy


@pytest.mark.parametrize("page", sorted(FOLDER.rglob("index.html")), ids=lambda page: page.parent.name)
def test_a_page_has_relative_links_and_nothing_inline(page: Path) -> None:
    text = page.read_text()

    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=", text)
    assert not re.search(r'(?:src|href)="(?:/|\w+://)', text)


def test_every_file_has_its_media_type(tmp_path: Path) -> None:
    responses = get_all(tmp_path, [f"/web/{name}" for name in CHAT_FILES])

    for name, response in zip(CHAT_FILES, responses, strict=True):
        assert response.status_code == 200
        assert response.headers["content-type"].startswith(MEDIA_TYPES[name.rpartition(".")[2]])
        assert response.content == (FOLDER / "chat" / name).read_bytes()


def test_files_import_only_files_of_the_package() -> None:
    imports = [
        (path.parent / found).resolve()
        for path in CHAT.rglob("*.js")
        for found in re.findall(r'(?:from |import\()"(\.\.?/.*?)"', path.read_text())
    ]
    others = [
        found
        for path in CHAT.rglob("*.js")
        for found in re.findall(r'(?:from |import\()"(?!\.\.?/)(.*?)"', path.read_text())
    ]

    assert imports
    assert {path.relative_to(CHAT).as_posix() for path in imports} <= set(CHAT_FILES)
    assert others == []


def test_every_imported_name_is_exported() -> None:
    """What a browser reports first; this finds it without one."""
    sources = {path: path.read_text() for path in CHAT.rglob("*.js")}
    imports = [
        (name.strip(), (path.parent / module).resolve())
        for path, source in sources.items()
        for names, module in re.findall(r'^import \{(.*?)\} from "(.*?)";$', source, flags=re.MULTILINE)
        for name in names.split(",")
    ]

    assert len(imports) > 30
    for name, module in imports:
        assert re.search(rf"^export .*\b{re.escape(name)}\b", sources[module], flags=re.MULTILINE), (name, module)


def test_the_page_is_small() -> None:
    size = sum(len(gzip.compress((FOLDER / "chat" / name).read_bytes())) for name in CHAT_FILES)

    assert size < MAX_PAGE_BYTES


def test_a_file_is_compressed_for_a_client_that_can_read_it(tmp_path: Path) -> None:
    compressed = get(tmp_path, "/web/main.js", headers={"Accept-Encoding": "gzip"})
    plain = get(tmp_path, "/web/main.js", headers={"Accept-Encoding": "identity"})

    assert compressed.headers["content-encoding"] == "gzip"
    assert "content-encoding" not in plain.headers
    assert compressed.content == plain.content
    assert "Accept-Encoding" in plain.headers["vary"]


def test_a_client_that_has_a_file_does_not_get_it_again(tmp_path: Path) -> None:
    first = get(tmp_path, "/web/main.js")
    again = get(tmp_path, "/web/main.js", headers={"If-None-Match": first.headers["etag"]})
    changed = get(tmp_path, "/web/main.js", headers={"If-None-Match": 'W/"another"'})

    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == first.headers["etag"]
    assert first.headers["cache-control"] == "no-cache"
    assert changed.status_code == 200


@pytest.mark.parametrize("path", ["/", "/web/main.js", "/docs", "/docs/docs.js"])
def test_head_has_headers_and_no_body(tmp_path: Path, path: str) -> None:
    response = get(tmp_path, path, headers=BROWSER, method="HEAD")

    assert (response.status_code, response.content) == (200, b"")
    assert "etag" in response.headers


@pytest.mark.parametrize("folder", ["/web/", "/docs/"])
def test_nothing_else_can_be_read(tmp_path: Path, folder: str) -> None:
    names = ["unknown.js", "../routes.py", "..%2froutes.py", "%2e%2e%2froutes.py", "chat/main.js", "", "main.js%00"]

    assert [response.status_code for response in get_all(tmp_path, [folder + name for name in names])] == [404] * 7


# keys


@pytest.mark.parametrize("path", ["/", "/web/main.js", "/docs", "/docs/docs.js"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_the_files_of_a_page_need_no_key(tmp_path: Path, path: str, method: str) -> None:
    response = get(tmp_path, path, KEYED, BROWSER, method)

    assert response.status_code == 200
    assert "tiny" not in response.text


@pytest.mark.parametrize(
    ("method", "path", "headers"),
    [
        ("GET", "/", {}),  # it names the model
        ("POST", "/", BROWSER),
        ("GET", "/get_server_info", BROWSER),
        ("GET", "/openapi.json", BROWSER),
        ("POST", "/web/main.js", BROWSER),
        ("GET", "/webs", BROWSER),
    ],
)
def test_everything_else_needs_one(tmp_path: Path, method: str, path: str, headers: dict[str, str]) -> None:
    assert get(tmp_path, path, KEYED, headers, method).status_code == 401


def test_without_the_page_its_paths_need_a_key(tmp_path: Path) -> None:
    config = HttpConfig(api_key=["secret"], no_web=True)

    assert get(tmp_path, "/", config, BROWSER).status_code == 401
    assert get(tmp_path, "/web/main.js", config).status_code == 401


# behind a proxy


@pytest.mark.parametrize("prefix", ["", "/llm"], ids=["proxy removes it", "proxy keeps it"])
def test_pages_work_under_a_root_path(tmp_path: Path, prefix: str) -> None:
    paths = ["/", "/web/main.js", "/docs", "/docs/docs.js", "/get_server_info", "/openapi.json"]

    responses = get_all(tmp_path, [prefix + path for path in paths], ROOTED)

    assert [response.status_code for response in responses] == [200] * len(paths)


def test_the_schema_names_the_root_path(tmp_path: Path) -> None:
    assert get(tmp_path, "/llm/openapi.json", ROOTED).json()["servers"] == [{"url": "/llm"}]
