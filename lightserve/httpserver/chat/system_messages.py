"""System messages where a chat template takes them.

Clients send several system messages at the start, and some in the middle of a conversation. Many templates take one
only, at the start; some take none. A message that the template would refuse or drop is moved as little as possible, so
that the prompts of a conversation keep their common prefix:

- several at the start become one;
- without a system role, the first message of the user begins with the text;
- a later one becomes a message of the user, or part of a neighbour if the template wants alternating roles.
"""

from __future__ import annotations

from typing import Any

from lightserve.model_files.template.chat_template import SystemRules

SEPARATOR = "\n\n"

TemplateMessage = dict[str, Any]


def arrange_system_messages(messages: list[TemplateMessage], rules: SystemRules) -> list[TemplateMessage]:
    """The same conversation as messages that the template keeps."""
    count = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    first, rest = messages[:count], messages[count:]
    if not rules.takes_late:
        rest = _without_system(rest, rules)
    if len(first) > 1 and not rules.takes_several:
        first = [_with_text(first[0], *(message["content"] for message in first))]
    if first and not rules.takes_system:
        return _without_system(first + rest, rules)
    return first + rest


def _without_system(messages: list[TemplateMessage], rules: SystemRules) -> list[TemplateMessage]:
    arranged: list[TemplateMessage] = []
    waiting: list[str] = []  # texts for the next message
    for i, message in enumerate(messages):
        if message["role"] != "system":
            arranged.append(_with_text(message, *waiting, message["content"]) if waiting else message)
            waiting = []
            continue
        following = messages[i + 1]["role"] if i + 1 < len(messages) else None
        if rules.takes_users_in_a_row and arranged:
            arranged.append(message | {"role": "user"})
        elif following in ("user", "system"):
            waiting.append(message["content"])
        elif arranged and arranged[-1]["role"] in ("user", "tool"):
            arranged[-1] = _with_text(arranged[-1], arranged[-1]["content"], *waiting, message["content"])
            waiting = []
        else:
            arranged.append(_with_text(message | {"role": "user"}, *waiting, message["content"]))
            waiting = []
    return arranged


def _with_text(message: TemplateMessage, *texts: str | None) -> TemplateMessage:
    return message | {"content": SEPARATOR.join(text for text in texts if text)}
