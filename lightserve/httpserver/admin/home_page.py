"""GET /: what runs here. A browser gets a page, any other client the same as text."""

from __future__ import annotations

from html import escape

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response

from lightserve import __version__
from lightserve.httpserver.context import ServerContext

ENDPOINTS = (
    ("OpenAI", "POST /v1/chat/completions, /v1/completions, /v1/responses"),
    ("Anthropic", "POST /v1/messages"),
    ("Ollama", "POST /api/chat, /api/generate"),
    ("LightLLM and TGI", "POST /generate, /generate_stream"),
)
LINKS = ("/v1/models", "/health", "/metrics", "/docs", "/openapi.json")
# clients of Ollama look for this sentence
OLLAMA = "Ollama is running: this server has its API too."

_PAGE = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>{title}</title></head>
<body>
<h1>{title}</h1>
<ul>
{endpoints}
</ul>
<p>{links}</p>
<p>{ollama}</p>
</body>
</html>
"""


def add_home_page(router: APIRouter, context: ServerContext) -> None:
    title = f"LightServe {__version__} serves {', '.join(context.model_names)}"
    text = PlainTextResponse(_text(title))
    page = HTMLResponse(_page(title))

    @router.get("/", response_class=PlainTextResponse, responses={200: {"content": {"text/html": {}}}})
    @router.head("/", response_class=PlainTextResponse)
    async def home(request: Request) -> Response:
        """The model and the endpoints, as text or as a page."""
        return page if "text/html" in request.headers.get("accept", "") else text


def _text(title: str) -> str:
    rows = [f"{name}: {paths}" for name, paths in ENDPOINTS]
    return "\n".join([title, "", *rows, f"See also: {', '.join(LINKS)}", "", OLLAMA, ""])


def _page(title: str) -> str:
    return _PAGE.format(
        title=escape(title),
        endpoints="\n".join(f"<li>{name}: {paths}</li>" for name, paths in ENDPOINTS),
        links=" ".join(f'<a href="{path}">{path}</a>' for path in LINKS),
        ollama=OLLAMA,
    )
