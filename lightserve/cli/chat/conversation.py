"""The messages of a chat and its options: what a request to the server is made of."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from lightserve.errors import InvalidRequestError

OPTIONS: dict[str, type[int] | type[float]] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "max_tokens": int,
    "seed": int,
    "repetition_penalty": float,
}


@dataclass
class Conversation:
    model: str
    system: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, str]] = field(default_factory=list)

    def request(self) -> dict[str, Any]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return {"model": self.model, "messages": [*system, *self.messages], **self.options}

    def add(self, role: str, content: str) -> None:
        self.messages.append({"role": role, "content": content})

    def remove_last_answer(self) -> bool:
        """Go back to the last message of the user. False if there is none."""
        while self.messages and self.messages[-1]["role"] != "user":
            self.messages.pop()
        return bool(self.messages)

    def remove_last_question(self) -> None:
        """After a request that failed: the next one would have two messages of the user in a row."""
        if self.messages and self.messages[-1]["role"] == "user":
            self.messages.pop()

    def set_option(self, name: str, text: str) -> None:
        """``text`` empty: the server's default."""
        if name not in OPTIONS:
            raise InvalidRequestError(f"unknown option {name!r}; known: {', '.join(OPTIONS)}")
        if not text:
            self.options.pop(name, None)
            return
        try:
            self.options[name] = OPTIONS[name](text)
        except ValueError as error:
            kind = "a whole number" if OPTIONS[name] is int else "a number"
            raise InvalidRequestError(f"{name}: {text!r} is not {kind}") from error

    def as_json(self) -> str:
        return json.dumps(self.request(), indent=2, ensure_ascii=False)
