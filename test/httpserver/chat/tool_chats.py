"""A tool, and outputs of a model that reasons and calls it, for the tests of every API with tools."""

from __future__ import annotations

import json
from typing import Any

from test.httpserver.openai_server import Server
from test.text.parsing.corpus import PARIS, call, tagged

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
THOUGHT = "<think>\nHm.\n</think>\n\n"
TWO_CALLS = f"Let me see.\n{tagged(call('weather', PARIS))}\n{tagged(call('now', '{}'))}"
ALL = THOUGHT + TWO_CALLS


def prompt(server: Server) -> Any:
    """What the template was given for the last request, where it shows that as JSON."""
    return json.loads(server.context.tokenizer.decode(server.engine.received[-1].prompt_ids))
