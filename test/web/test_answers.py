"""What can be done with answers: continue them, see the probabilities of their tokens, compare two, call tools."""

from __future__ import annotations

import json
from typing import Any

import pytest

from test.web.chat_page import ChatPage

COUNTING = " ".join(map(str, range(150)))
LABELS = "return [...document.querySelectorAll('.comparison .author')].map((one) => one.textContent)"
SHOWN = "return [...document.querySelectorAll('.assistant > .content')].map((one) => one.textContent)"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def test_a_stopped_answer_is_continued(page: ChatPage) -> None:
    page.will_answer("Go on and on", COUNTING, step_s=0.05)
    page.start("Go on and on")
    page.wait(lambda: "0 1 2" in page.answer)
    page.click("#send")
    page.wait(lambda: "Stopped." in page.text(".assistant .stats"))
    stopped = page.answer
    page.record_requests()

    page.will_answer(stopped, " and the end.")
    page.click_button("Continue")
    page.wait(lambda: page.answer == f"{stopped} and the end.")
    page.wait_for_answer()

    sent = page.requests()[-1]
    assert sent["continue_final_message"]
    assert sent["messages"][-1] == {"role": "assistant", "content": stopped}
    assert "Stopped." not in page.text(".assistant .stats")
    assert page.text(".message-buttons").count("Continue") == 0
    assert len(page.all(".message")) == 2


def test_an_answer_that_reached_its_limit_is_continued(page: ChatPage) -> None:
    page.set_field("max_tokens", "3")
    page.will_answer("In pieces", "one two three four five six")
    page.send("In pieces")
    assert "token limit" in page.text(".assistant .stats")

    page.will_answer("In pieces", " seven.")
    page.click_button("Continue")

    page.wait(lambda: page.answer.endswith(" seven."))
    page.wait_for_answer()
    assert " · 6 tokens" in page.text(".assistant .stats") or " · 5 tokens" in page.text(".assistant .stats")


def test_probabilities_are_shown_under_the_pointer_and_by_keys(page: ChatPage) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    page.set_field("probabilities", "on")
    page.will_answer("How sure", "Very sure.")
    page.send("How sure")
    assert page.answer == "Very sure."

    page.click_button("Probabilities")
    tokens = page.run("return [...document.querySelectorAll('.tokens span')].map((one) => one.textContent)")
    assert "".join(tokens).startswith("Very sure.")
    assert not page.one(".token-details").is_displayed()

    ActionChains(page.browser).move_to_element(page.one(".tokens span:nth-child(2)")).perform()
    page.wait(lambda: page.one(".token-details").is_displayed())
    assert "%" in page.text(".token-details .taken")
    page.run("document.querySelector('.tokens').focus()")
    ActionChains(page.browser).send_keys(Keys.ARROW_LEFT).perform()
    page.wait(lambda: page.text(".token-details .taken code") == tokens[0].replace(" ", "␣"))

    page.click_button("Probabilities")
    assert page.answer == "Very sure."


def test_two_settings_are_compared_and_one_answer_goes_on(page: ChatPage) -> None:
    page.set_field("temperature", "0.5")
    page.click("#compare")
    page.set_field("temperature", "0.9")
    page.will_answer("Which is better", "The same answer.", "The same answer.")
    page.record_requests()

    page.start("Which is better")
    page.wait_for_answer()

    assert [body["temperature"] for body in page.requests() if "temperature" in body] == [0.5, 0.9]
    assert page.run(LABELS) == ["Assistant · temperature 0.5", "Assistant · temperature 0.9"]
    assert page.run(SHOWN) == ["The same answer."] * 2
    left, right = page.run("return [...document.querySelectorAll('.comparison .message')].map((one) => one.offsetLeft)")
    assert left < right
    page.load()
    assert page.run(SHOWN) == ["The same answer."] * 2

    page.run("document.querySelectorAll('.comparison .message')[1].setAttribute('data-chosen', '')")
    page.click_button("Go on with this one", "[data-chosen]")
    assert page.run(SHOWN) == ["The same answer."]
    assert page.text(".assistant .branches") == "←2 / 2→"
    page.click("#compare")
    assert page.run("return document.querySelector('[name=temperature]').value") == "0.5"
    page.will_answer("And then", "Only one.")
    page.send("And then")
    assert page.run(SHOWN) == ["The same answer.", "Only one."]


def test_both_compared_answers_are_stopped(page: ChatPage) -> None:
    page.click("#compare")
    page.will_answer("Count twice", COUNTING, COUNTING, step_s=0.05)
    page.start("Count twice")
    page.wait(lambda: all("0 1 2" in text for text in page.run(SHOWN)))

    page.click("#send")

    stats = "return [...document.querySelectorAll('.assistant .stats')].map((one) => one.textContent)"
    page.wait(lambda: all("Stopped." in text for text in page.run(stats)))
    page.wait(lambda: "Running0" in page.text("#load-facts"))


def test_another_model_is_chosen(page: ChatPage) -> None:
    page.wait(lambda: page.one("[name=model]").is_displayed())
    names = page.run("return [...document.querySelector('[name=model]').options].map((one) => one.textContent)")
    assert names[0] == "scripted"
    page.record_requests()
    page.will_answer("To the other", "By the other.")

    page.run("document.querySelector('[name=model]').selectedIndex = 1")
    page.run("document.querySelector('[name=model]').dispatchEvent(new Event('input', {bubbles: true}))")
    page.send("To the other")

    assert page.answer == "By the other."
    assert page.requests()[-1]["model"] == names[1]
    assert page.text("#served-model") == names[1]
    page.load()
    page.wait(lambda: page.text("#served-model") == names[1])


@pytest.mark.parametrize(
    "pasted",
    [
        {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}},
        {"name": "get_weather", "description": "", "input_schema": SCHEMA},
        {"name": "get_weather", "inputSchema": SCHEMA},
        SCHEMA | {"title": "get_weather"},
    ],
    ids=["OpenAI", "Anthropic", "MCP", "JSON schema"],
)
def test_a_tool_of_any_form_is_called(page: ChatPage, pasted: dict[str, Any]) -> None:
    page.set_field("tools", json.dumps(pasted))
    page.will_answer(
        "Weather in Oslo", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    )
    page.record_requests()

    page.send("Weather in Oslo")

    (tool,) = page.requests()[-1]["tools"]
    assert (tool["type"], tool["function"]["name"], tool["function"]["parameters"]) == (
        "function",
        "get_weather",
        SCHEMA,
    )
    assert page.text(".tool-call h3") == "Calls get_weather"
    assert page.text(".tool-call pre") == '{\n  "city": "Oslo"\n}'


def test_a_tool_without_a_name_is_refused_before_sending(page: ChatPage) -> None:
    page.set_field("tools", json.dumps(SCHEMA))
    page.type("#prompt", "Send this\n")

    page.wait(lambda: 'needs a "name"' in page.text("#tools-error"))
    assert page.all(".message") == []
