"""System messages in templates that take several, one or none."""

from __future__ import annotations

import pytest

from lightserve.httpserver.chat.system_messages import arrange_system_messages
from lightserve.model_files.template.chat_template import ChatTemplate, SystemRules
from lightserve.model_files.tokenizer.special_tokens import SpecialTokens

CHATML = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
# the first message may be a system message; others are refused, dropped or written as user messages
FIRST_ONLY = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('system must be first') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
DROPS = (
    "{% if messages[0].role == 'system' %}<system>{{ messages[0].content }}{% endif %}"
    "{% for m in messages %}{% if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)
ALTERNATES = (
    "{% if messages[0].role == 'system' %}<system>{{ messages[0].content }}{% set rest = messages[1:] %}{% else %}"
    "{% set rest = messages %}{% endif %}"
    "{% for m in rest | rejectattr('role', 'equalto', 'tool') | list %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% endfor %}{% for m in rest %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
FOR_TOOLS = "{% for tool in tools %}{{ tool.function.name }}{% endfor %}" + FIRST_ONLY
TEMPLATES = {"chatml": CHATML, "first": FIRST_ONLY, "drops": DROPS, "alternates": ALTERNATES, "none": NO_SYSTEM}


def template_of(text: str) -> ChatTemplate:
    return ChatTemplate(text, SpecialTokens())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CHATML, SystemRules(True, True, True, True)),
        (FIRST_ONLY, SystemRules(True, False, False, True)),
        (DROPS, SystemRules(True, False, False, True)),
        (ALTERNATES, SystemRules(True, False, False, False)),
        (NO_SYSTEM, SystemRules(False, False, False, False)),
        (FOR_TOOLS, SystemRules(True, False, False, True)),
        ("{{ raise_exception('never') }}", SystemRules(True, True, True, True)),
    ],
)
def test_where_a_template_keeps_system_messages_is_found_by_rendering(text: str, expected: SystemRules) -> None:
    assert template_of(text).system_rules == expected


LEADING = "system:A system:B user:Hi"
LATE = "system:A user:Hi assistant:Yes system:B user:Go"
LAST = "system:A user:Hi assistant:Yes system:B"
AFTER_TOOL = "user:Hi tool:4 system:B system:C assistant:Yes user:Go"


@pytest.mark.parametrize(
    ("name", "chat", "expected"),
    [
        ("chatml", LEADING, "<system>A<system>B<user>Hi"),
        ("chatml", LATE, "<system>A<user>Hi<assistant>Yes<system>B<user>Go"),
        ("first", LEADING, "<system>A\n\nB<user>Hi"),
        ("drops", LEADING, "<system>A\n\nB<user>Hi"),
        ("none", LEADING, "<user>A\n\nB\n\nHi"),
        ("none", "system:A assistant:Yes", "<user>A<assistant>Yes"),
        ("first", LATE, "<system>A<user>Hi<assistant>Yes<user>B<user>Go"),
        ("drops", LATE, "<system>A<user>Hi<assistant>Yes<user>B<user>Go"),
        ("alternates", LATE, "<system>A<user>Hi<assistant>Yes<user>B\n\nGo"),
        ("none", LATE, "<user>A\n\nHi<assistant>Yes<user>B\n\nGo"),
        ("first", LAST, "<system>A<user>Hi<assistant>Yes<user>B"),
        ("alternates", LAST, "<system>A<user>Hi<assistant>Yes<user>B"),
        ("first", AFTER_TOOL, "<user>Hi<tool>4<user>B<user>C<assistant>Yes<user>Go"),
        ("alternates", AFTER_TOOL, "<user>Hi<tool>4\n\nB\n\nC<assistant>Yes<user>Go"),
        ("alternates", "user:Hi system:B assistant:Yes", "<user>Hi\n\nB<assistant>Yes"),
        ("none", "system:A", "<user>A"),
    ],
)
def test_system_messages_are_kept_where_the_template_takes_them(name: str, chat: str, expected: str) -> None:
    template = template_of(TEMPLATES[name])
    messages = [dict(zip(("role", "content"), part.split(":"), strict=True)) for part in chat.split()]

    arranged = arrange_system_messages(messages, template.system_rules)

    assert template.render(messages=arranged) == expected


def test_the_prompt_of_the_next_turn_begins_with_the_prompt_of_this_one() -> None:
    for text in TEMPLATES.values():
        template = template_of(text)
        turns = [("system", "A"), ("system", "B"), ("user", "Hi"), ("tool", "4"), ("system", "C")]
        if text == NO_SYSTEM:
            turns.remove(("tool", "4"))  # it has no tools
        now = [{"role": role, "content": content} for role, content in turns]
        later = [*now, {"role": "assistant", "content": "Yes"}, {"role": "user", "content": "Go"}]

        prompts = [
            template.render(messages=arrange_system_messages(chat, template.system_rules)) for chat in (now, later)
        ]

        assert prompts[1].startswith(prompts[0])
