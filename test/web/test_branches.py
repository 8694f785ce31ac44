"""Regenerate and Edit keep what was there: a person goes back to it."""

from __future__ import annotations

import pytest

from test.web.chat_page import ChatPage

COUNTING = " ".join(map(str, range(150)))
SHOWN = "return [...document.querySelectorAll('.message > .content')].map((one) => one.textContent)"


def shown(page: ChatPage) -> list[str]:
    """The texts of the messages on the page."""
    return list(page.run(SHOWN))


def edit(page: ChatPage, text: str, message: int = 0) -> None:
    """Write another text into the field of a message of the person, and leave the focus there."""
    page.run("document.querySelectorAll('.user')[arguments[0]].setAttribute('data-edited', '')", message)
    page.click_button("Edit", "[data-edited]")
    page.run("document.querySelector('.user textarea').value = ''")
    page.type(".user textarea", text)


def test_a_regenerated_answer_stands_beside_the_first(page: ChatPage) -> None:
    page.will_answer("Twice, please", "The first.")
    page.will_answer("Twice, please", "The second.")
    page.send("Twice, please")
    page.click_button("Regenerate")
    page.wait(lambda: page.answer == "The second.")
    page.wait_for_answer()

    assert page.text(".assistant .branches") == "←2 / 2→"
    page.click_button("←")
    assert shown(page) == ["Twice, please", "The first."]
    assert page.text(".assistant .branches") == "←1 / 2→"
    assert page.text("#announcer") == "Version 1 of 2"
    assert page.run("return document.activeElement.getAttribute('aria-label')") == "Next version"

    page.load()
    page.click_button("→")
    assert shown(page) == ["Twice, please", "The second."]


def test_an_edited_message_keeps_what_followed_the_old_one(page: ChatPage) -> None:
    page.will_answer("First wording", "To the first.")
    page.will_answer("And more of the first", "More.")
    page.will_answer("Second wording", "To the second.")
    page.send("First wording")
    page.send("And more of the first")

    edit(page, "Second wording")
    page.click_button("Send again")
    page.wait(lambda: page.answer == "To the second.")
    page.wait_for_answer()
    assert shown(page) == ["Second wording", "To the second."]

    page.click_button("←")
    assert shown(page) == ["First wording", "To the first.", "And more of the first", "More."]


def test_an_answer_in_the_middle_is_regenerated(page: ChatPage) -> None:
    for prompt, answer in (("Begin", "Begun."), ("Continue it", "Continued.")):
        page.will_answer(prompt, answer)
        page.send(prompt)
    page.will_answer("Begin", "Begun anew.")

    page.click_button("Regenerate")
    page.wait(lambda: page.answer == "Begun anew.")
    page.wait_for_answer()

    assert shown(page) == ["Begin", "Begun anew."]
    page.click_button("←")
    assert shown(page) == ["Begin", "Begun.", "Continue it", "Continued."]


def test_only_the_shown_branch_is_sent(page: ChatPage) -> None:
    page.will_answer("Which way", "Left.")
    page.will_answer("Which way", "Right.")
    page.send("Which way")
    page.click_button("Regenerate")
    page.wait(lambda: page.answer == "Right.")
    page.wait_for_answer()
    page.click_button("←")
    page.record_requests()

    page.will_answer("Go on", "Gone.")
    page.send("Go on")

    sent = page.requests()[-1]["messages"]
    assert [message["content"] for message in sent] == ["Which way", "Left.", "Go on"]


def test_another_version_ends_the_answer_that_is_being_written(page: ChatPage) -> None:
    page.will_answer("One at a time", "Done.")
    page.will_answer("One at a time", COUNTING, step_s=0.05)
    page.send("One at a time")
    page.click_button("Regenerate")
    page.wait(lambda: "0 1 2" in page.answer)

    page.click_button("←")
    page.wait(lambda: not page.is_generating)
    assert page.answer == "Done."
    page.click_button("→")

    assert page.answer.startswith("0 1 2")
    assert page.text(".assistant .stats").startswith("Stopped.")


def test_an_answer_that_failed_is_not_kept(page: ChatPage) -> None:
    page.set_field("max_tokens", "99999999")
    page.send("Fail once")
    page.set_field("max_tokens", "")
    page.will_answer("Fail once", "Now it works.")

    page.click_button("Regenerate")
    page.wait(lambda: page.answer == "Now it works.")
    page.wait_for_answer()

    assert not page.one(".assistant .branches").is_displayed()


@pytest.mark.parametrize("with_control", [False, True])
def test_enter_sends_an_edited_message(page: ChatPage, with_control: bool) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    page.will_answer("Old text", "To the old.")
    page.will_answer("New text\nof two lines", "To the new.")
    page.send("Old text")
    edit(page, "New text")
    keys = ActionChains(page.browser)
    keys.key_down(Keys.SHIFT).send_keys(Keys.ENTER).key_up(Keys.SHIFT).send_keys("of two lines").perform()
    keys = ActionChains(page.browser)
    if with_control:
        keys.key_down(Keys.CONTROL)
    keys.send_keys(Keys.ENTER).key_up(Keys.CONTROL).perform()
    page.wait(lambda: page.answer == "To the new.")

    assert shown(page) == ["New text\nof two lines", "To the new."]
