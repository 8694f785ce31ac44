"""The pages for people: the chat at /, and Swagger UI at /docs. All of their files are in this package.

The files need no API key, because they are the same for everyone. What the pages request needs one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from lightserve import __version__
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.pooling.task_guard import endpoints_of
from lightserve.httpserver.web.assets import CONTENT_SECURITY_POLICY, Assets

FOLDER = Path(__file__).parent
INDEX = "index.html"
# The browser refuses any string that a script of the chat page would turn into HTML or code. Swagger UI does that.
CHAT_POLICY = f"{CONTENT_SECURITY_POLICY}; require-trusted-types-for 'script'; trusted-types 'none'"
ENDPOINTS = (
    ("OpenAI", "POST /v1/chat/completions, /v1/completions, /v1/responses"),
    ("Anthropic", "POST /v1/messages"),
    ("Ollama", "POST /api/chat, /api/generate"),
    ("LightLLM and TGI", "POST /generate, /generate_stream"),
)
LINKS = ("/v1/models", "/health", "/metrics", "/docs", "/openapi.json")
# clients of Ollama look for this sentence
OLLAMA = "Ollama is running: this server has its API too."


def routes(context: ServerContext) -> APIRouter:
    router = APIRouter()
    chat = Assets(FOLDER / "chat", {"Content-Security-Policy": CHAT_POLICY})
    _add_home(router, context, chat if context.has_chat else None)
    if context.has_chat:
        _add_files(router, "/web/{name:path}", chat)
    _add_docs(router)
    return router


def is_public(has_chat: bool) -> Callable[[str, str, Mapping[bytes, bytes]], bool]:
    """Tells whether a request, by method, path and headers, is for a file of this package and needs no API key."""

    def check(method: str, path: str, headers: Mapping[bytes, bytes]) -> bool:
        if method not in ("GET", "HEAD"):
            return False
        if path == "/docs" or path.startswith("/docs/"):
            return True
        is_page = path == "/" and b"text/html" in headers.get(b"accept", b"")
        return has_chat and (is_page or path.startswith("/web/"))

    return check


def _add_home(router: APIRouter, context: ServerContext, chat: Assets | None) -> None:
    text = PlainTextResponse(home_text(context), headers={"Vary": "Accept"})

    @router.get("/", response_class=PlainTextResponse, responses={200: {"content": {"text/html": {}}}})
    @router.head("/", response_class=PlainTextResponse)
    async def home(request: Request) -> Response:
        """The chat page for a browser; the model and the endpoints as text for other clients."""
        if chat is not None and "text/html" in request.headers.get("accept", ""):
            return await chat.respond(request, INDEX)
        return text


def _add_docs(router: APIRouter) -> None:
    docs = Assets(FOLDER / "docs")

    @router.get("/docs", include_in_schema=False)
    @router.head("/docs", include_in_schema=False)
    async def swagger_ui(request: Request) -> Response:
        return await docs.respond(request, INDEX)

    _add_files(router, "/docs/{name}", docs)


def _add_files(router: APIRouter, path: str, assets: Assets) -> None:
    @router.get(path, include_in_schema=False)
    @router.head(path, include_in_schema=False)
    async def get_file(request: Request, name: str) -> Response:
        return await assets.respond(request, name)


def home_text(context: ServerContext) -> str:
    title = f"LightServe {__version__} serves {', '.join(context.model_names)}"
    links = f"See also: {', '.join(LINKS)}"
    if context.pooling is not None:
        task = f"It computes no text; its task is {context.pooling}."
        return "\n".join([title, task, "", f"POST {', '.join(endpoints_of(context.pooling))}", links, ""])
    rows = [f"{name}: {paths}" for name, paths in ENDPOINTS]
    return "\n".join([title, "", *rows, links, "", OLLAMA, ""])
