"""GET / for clients that are not browsers: what runs here, as text."""

from __future__ import annotations

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


def home_text(context: ServerContext) -> str:
    title = f"LightServe {__version__} serves {', '.join(context.model_names)}"
    rows = [f"{name}: {paths}" for name, paths in ENDPOINTS]
    return "\n".join([title, "", *rows, f"See also: {', '.join(LINKS)}", "", OLLAMA, ""])
