"""Requests as LangChain's ChatOllama 1.1.0 sends them with the ollama package 0.6.3, in an agent that calls tools."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]

PATH = "/api/chat"
SYSTEM_PROMPT = "You are an assistant for travellers. " + " ".join(
    f"Rule {i}: name the city and the day before you tell the weather, and never guess what a tool can tell."
    for i in range(1, 31)
)


def tool(name: str, description: str, required: tuple[str, ...], /, **properties: Json) -> Json:
    """The package drops what it does not know of a schema: an optional argument is ``{}``."""
    parameters = {"type": "object", "required": list(required), "properties": properties}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = [
    tool("weather", "The weather of a city.", ("city",), city={"type": "string"}, days={}),
    tool("search", "Search for places.", ("query",), query={"type": "string", "description": "what to look for"}),
    tool("book", "Book a room.", ("hotel", "nights"), hotel={"type": "string"}, nights={"type": "integer"}),
]


class ChatOllama:
    """A conversation. Results of tools have neither an id nor a name: the package drops the id that LangChain sets."""

    def __init__(self, model: str, system: str = SYSTEM_PROMPT) -> None:
        self._model = model
        self.messages: list[Json] = [{"role": "system", "content": system}]

    def request(self) -> Json:
        return {
            "model": self._model,
            "stream": True,
            "options": {"num_ctx": 8192, "temperature": 0.0},
            "keep_alive": "10m",
            "messages": self.messages,
            "tools": TOOLS,
            "think": True,
        }

    def add_user(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def add_result(self, text: str) -> None:
        self.messages.append({"role": "tool", "content": text})

    def add_reply(self, lines: list[Json]) -> list[Json]:
        """Keep the message of a stream; returns its calls."""
        parts = [line["message"] for line in lines]
        content = "".join(part["content"] for part in parts)
        thinking = "".join(part.get("thinking", "") for part in parts)
        calls: list[Json] = [call for part in parts for call in part.get("tool_calls", ())]
        sent = [{"function": {name: call["function"][name] for name in ("name", "arguments")}} for call in calls]
        given = {"content": content, "thinking": thinking, "tool_calls": sent}
        self.messages.append({"role": "assistant", **{name: value for name, value in given.items() if value}})
        return calls
