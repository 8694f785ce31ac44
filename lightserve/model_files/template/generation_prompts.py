"""How many tokens at the end of a chat's prompt begin the answer, such as ``<|im_start|>assistant\\n<think>\\n``.

The next turn of the chat may begin this answer in another way, since templates leave out old reasoning. Models with
recurrent layers can only continue a prefix where a state was kept, so they keep it before these tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson

from lightserve.errors import InvalidRequestError
from lightserve.model_files.template.budget import ON_EVENT_LOOP
from lightserve.model_files.template.chat_template import ChatTemplate
from lightserve.model_files.tokenizer.tokenizer import Tokenizer

MAX_KNOWN = 64
MAX_KEY = 1_000  # characters; templates need few variables
CHAT = ({"role": "user", "content": "x"},)


class GenerationPrompt(NamedTuple):
    text: str
    num_tokens: int


NONE = GenerationPrompt("", 0)


@dataclass(slots=True)
class GenerationPrompts:
    """By template and its variables: rendering and tokenising one takes about a millisecond."""

    _known: OrderedDict[tuple[ChatTemplate, bytes], GenerationPrompt] = field(default_factory=OrderedDict)

    def num_tokens(
        self, tokenizer: Tokenizer, template: ChatTemplate, variables: Mapping[str, Any], prompt: str
    ) -> int:
        """Of the end of ``prompt``. 0: the template adds nothing to messages, or something that depends on them."""
        key = template, orjson.dumps(dict(variables), option=orjson.OPT_SORT_KEYS)
        if len(key[1]) > MAX_KEY:
            return 0
        if key not in self._known:
            self._known[key] = _generation_prompt(tokenizer, template, variables)
        self._known.move_to_end(key)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        known = self._known[key]
        return known.num_tokens if prompt.endswith(known.text) else 0


def _generation_prompt(tokenizer: Tokenizer, template: ChatTemplate, variables: Mapping[str, Any]) -> GenerationPrompt:
    def rendered(has_turn: bool) -> str:
        fields = dict(variables) | {"tools": None, "documents": None, "add_generation_prompt": has_turn}
        return template.render(ON_EVENT_LOOP, messages=[dict(message) for message in CHAT], **fields)

    try:
        before, prompt = rendered(False), rendered(True)
    except InvalidRequestError:  # it wants other messages
        return NONE
    text = prompt.removeprefix(before) if prompt.startswith(before) else ""
    return GenerationPrompt(text, len(tokenizer.encode(text, add_special_tokens=False))) if text else NONE
