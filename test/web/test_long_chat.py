"""A chat of 2,000 messages: only its end is built, the rest when it comes into view."""

from __future__ import annotations

import json

import pytest

from test.web.chat_page import ROOT_PATH, ChatPage

COUNT = 2000
SHOWN = "return [...document.querySelectorAll('.message > .content')].map((one) => one.textContent)"
MESSAGES = [
    {"role": "user", "content": f"Question {i // 2}"}
    if i % 2 == 0
    else {
        "role": "assistant",
        "content": f"Answer **{i // 2}** with `code`:\n\n```python\nx = {i}\n```",
        "finishReason": "stop",
    }
    for i in range(COUNT)
]


@pytest.fixture
def long_chat(page: ChatPage) -> ChatPage:
    chat = {"id": "long", "title": "Long", "isRenamed": True, "updated": 1, "settings": {}, "messages": MESSAGES}
    page.run(
        "localStorage.setItem(arguments[0], arguments[1])",
        f"lightserve:{ROOT_PATH}/:conversation:long",
        json.dumps(chat),
    )
    page.load()
    return page


def built(page: ChatPage) -> int:
    return int(page.run("return document.querySelectorAll('.message').length"))


def test_only_the_end_is_built_at_first(long_chat: ChatPage) -> None:
    long_chat.wait(lambda: built(long_chat) >= 60)

    assert built(long_chat) < 400
    assert "Answer 999" in long_chat.answer
    assert long_chat.run(
        "const {scrollTop, scrollHeight, clientHeight} = document.getElementById('log');"
        "return scrollHeight - scrollTop - clientHeight < 5"
    )


def test_earlier_messages_come_when_one_scrolls_up(long_chat: ChatPage) -> None:
    def reaches_the_begin() -> bool:
        long_chat.run("document.getElementById('log').scrollTop = 0")
        return built(long_chat) == COUNT

    long_chat.wait(reaches_the_begin)

    assert long_chat.text(".message > .content") == "Question 0"
    assert not long_chat.one(".earlier").is_displayed()


def test_what_is_in_view_stays_while_earlier_messages_come(long_chat: ChatPage) -> None:
    before = built(long_chat)
    top = long_chat.run(
        "window.marked = document.querySelector('.message'); document.getElementById('log').scrollTop = 1000;"
        "return window.marked.getBoundingClientRect().top"
    )

    long_chat.wait(lambda: built(long_chat) > before)

    assert long_chat.run("return window.marked.getBoundingClientRect().top") == pytest.approx(top, abs=2)


def test_an_answer_builds_no_message_again(long_chat: ChatPage) -> None:
    long_chat.run("document.querySelectorAll('.message').forEach((one) => (one.isOld = true))")
    long_chat.will_answer("One more", "Another answer.")

    long_chat.send("One more")

    assert long_chat.answer == "Another answer."
    new = "return [...document.querySelectorAll('.message')].filter((one) => !one.isOld).length"
    assert long_chat.run(new) == 2


def test_another_version_far_from_the_end_stays_in_view(long_chat: ChatPage) -> None:
    def shows_the_first() -> bool:
        long_chat.run("document.getElementById('log').scrollTop = 0")
        return built(long_chat) == COUNT

    long_chat.wait(shows_the_first)
    long_chat.run("document.querySelector('.user').setAttribute('data-first', '')")
    long_chat.will_answer("Another begin", "Another way.")
    long_chat.click_button("Edit", "[data-first]")
    long_chat.type(".user textarea", " and Another begin\n")
    long_chat.wait(lambda: long_chat.answer == "Another way.")
    long_chat.wait_for_answer()

    long_chat.click_button("←")
    assert long_chat.run(SHOWN)[-1].startswith("Answer 999")
    assert long_chat.text(".user .branches") == "←1 / 2→"
