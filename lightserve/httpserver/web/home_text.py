"""GET / where there is no chat page, and for clients that are not browsers: what runs here, as text."""

from __future__ import annotations

from lightserve import __version__
from lightserve.httpserver.context import ServerContext
from lightserve.httpserver.pooling.endpoints import endpoints_of

ENDPOINTS = (
    ("OpenAI", "POST /v1/chat/completions, /v1/completions, /v1/responses"),
    ("Anthropic", "POST /v1/messages"),
    ("Ollama", "POST /api/chat, /api/generate"),
    ("LightLLM and TGI", "POST /generate, /generate_stream"),
)
LINKS = ("/v1/models", "/health", "/metrics", "/docs", "/openapi.json")
# clients of Ollama look for this sentence
OLLAMA = "Ollama is running: this server has its API too."


def home_text(context: ServerContext) -> str:
    title = f"LightServe {__version__} serves {', '.join(context.model_names)}"
    links = f"See also: {', '.join(LINKS)}"
    if context.pooling is not None:
        task = f"It computes no text; its task is {context.pooling}."
        return "\n".join([title, task, "", f"POST {', '.join(endpoints_of(context.pooling))}", links, ""])
    rows = [f"{name}: {paths}" for name, paths in ENDPOINTS]
    return "\n".join([title, "", *rows, links, "", OLLAMA, ""])
