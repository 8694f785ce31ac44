"""Chatting: type, stream, stop, regenerate, edit, errors, the API key, settings."""

from __future__ import annotations

import json

from test.web.chat_page import KEY, ChatPage

SLOW_S = 0.05  # a step; an answer of COUNTING takes ten seconds and more
COUNTING = " ".join(map(str, range(150)))
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def test_an_answer_streams_and_has_its_counts(page: ChatPage) -> None:
    page.will_answer("Count, please", COUNTING[:200], step_s=0.01)

    page.start("Count, please")
    page.wait(lambda: page.is_generating and "0 1 2" in page.answer)
    page.wait_for_answer()

    assert page.answer == COUNTING[:200]
    assert page.text(".user > .content") == "Count, please"
    stats = page.text(".assistant .stats")
    assert "prompt tokens" in stats
    assert "first after" in stats
    assert "tokens/s" in stats
    assert page.run("return document.activeElement.id") == "prompt"
    assert page.text("#announcer").startswith("The answer is complete. 0 1 2")


def test_markdown_becomes_elements(page: ChatPage) -> None:
    page.will_answer(
        "Show Markdown", "# Title\n\nIt is **bold**.\n\n```python\nprint(1)\n```\n\n| a | b |\n|---|--:|\n| 1 | 2 |"
    )

    page.send("Show Markdown")

    assert page.text(".assistant h3") == "Title"
    assert page.text(".assistant strong") == "bold"
    assert page.text(".assistant pre code") == "print(1)"
    assert page.text(".assistant td.align-right") == "2"


def test_code_is_copied(page: ChatPage) -> None:
    page.browser.execute_cdp_cmd(
        "Browser.grantPermissions", {"origin": page.engine.url, "permissions": ["clipboardReadWrite"]}
    )
    page.will_answer("Code to copy", "```\na = '<b>'\n```")
    page.send("Code to copy")

    page.click_button("Copy", ".code")
    page.wait(lambda: page.text(".code button") == "Copied")

    read = "const done = arguments[0]; navigator.clipboard.readText().then(done, (error) => done(String(error)))"
    assert page.browser.execute_async_script(read) == "a = '<b>'"


def test_shift_enter_starts_a_new_line(page: ChatPage) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    page.type("#prompt", "one")
    ActionChains(page.browser).key_down(Keys.SHIFT).send_keys(Keys.ENTER).key_up(Keys.SHIFT).perform()
    page.type("#prompt", "two")

    assert page.run("return document.getElementById('prompt').value") == "one\ntwo"
    assert page.all(".message") == []


def test_escape_stops_an_answer_and_keeps_what_has_arrived(page: ChatPage) -> None:
    from selenium.webdriver.common.keys import Keys

    page.will_answer("Count for long", COUNTING, step_s=SLOW_S)
    page.start("Count for long")
    page.wait(lambda: "0 1 2" in page.answer)
    page.wait(lambda: "Running1" in page.text("#load-facts"))

    page.type("#prompt", Keys.ESCAPE)
    page.wait(lambda: "Stopped." in page.text(".assistant .stats"))
    stopped = page.answer

    assert not page.is_generating
    assert 0 < len(stopped) < len(COUNTING)
    page.wait(lambda: "Running0" in page.text("#load-facts"))  # on the server too
    assert page.answer == stopped


def test_the_button_stops_and_regenerate_asks_again(page: ChatPage) -> None:
    page.will_answer("Again, please", COUNTING, step_s=SLOW_S)
    page.will_answer("Again, please", "The second answer.")
    page.start("Again, please")
    page.wait(lambda: "0 1 2" in page.answer)

    page.click("#send")
    page.wait(lambda: "Stopped." in page.text(".assistant .stats"))
    page.click_button("Regenerate")
    page.wait(lambda: page.answer == "The second answer.")

    assert len(page.all(".message")) == 2


def test_an_error_of_the_server_is_shown(page: ChatPage) -> None:
    page.set_field("max_tokens", "99999999")
    page.send("Too much")

    assert "99999999" in page.text(".assistant .error")

    page.set_field("max_tokens", "")
    page.will_answer("Too much", "Now it works.")
    page.click_button("Regenerate")
    page.wait(lambda: page.answer == "Now it works.")
    assert not page.one(".assistant .error").is_displayed()


def test_a_key_is_asked_for_once(page: ChatPage) -> None:
    page.open_new(key=None)
    page.wait(lambda: page.one("#text-dialog").is_displayed())
    page.type("#text-dialog-input", "wrong\n")
    page.wait(lambda: "refused" in page.text("#text-dialog-message"))
    page.type("#text-dialog-input", f"{KEY}\n")
    page.wait(lambda: "Ready" in page.text("#model-status"))
    page.load()
    page.wait(lambda: "Ready" in page.text("#model-status"))

    assert not page.one("#text-dialog").is_displayed()
    page.click_button("Forget API key")
    page.wait(lambda: "needs an API key" in page.text("#model-status"))


def test_thinking_is_folded(page: ChatPage) -> None:
    page.will_answer("Think first", "<think>\nA secret thought.\n</think>\n\nThe answer.")

    page.send("Think first")

    assert page.answer == "The answer."
    assert page.text(".assistant .thinking summary").startswith("Thought")
    assert not page.one(".assistant .thinking .content").is_displayed()
    page.click(".assistant .thinking summary")
    page.wait(lambda: page.one(".assistant .thinking .content").text == "A secret thought.")


def test_a_tool_call_takes_its_result(page: ChatPage) -> None:
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    page.set_field("tools", json.dumps(TOOLS))
    page.will_answer("Weather in Rome", call)
    page.send("Weather in Rome")

    assert page.text(".tool-call h3") == "Calls get_weather"
    assert page.text(".tool-call pre") == '{\n  "city": "Rome"\n}'

    page.will_answer("sunny and 25 degrees", "It is sunny.")
    page.type(".tool-calls textarea", "sunny and 25 degrees")
    page.click_button("Send the result")
    page.wait(lambda: page.answer == "It is sunny.")
    assert page.text(".tool > .content") == "sunny and 25 degrees"


def test_structured_output_is_indented(page: ChatPage) -> None:
    page.set_field("schema", json.dumps(SCHEMA))
    page.will_answer("A city as JSON", '{"city": "Rome"}')

    page.send("A city as JSON")

    assert page.text(".assistant pre") == '{\n  "city": "Rome"\n}'


def test_a_schema_that_is_not_json_is_refused_before_sending(page: ChatPage) -> None:
    page.set_field("schema", "{")
    page.type("#prompt", "Send this\n")

    page.wait(lambda: "Not JSON" in page.text("#schema-error"))
    assert page.run("return document.activeElement.name") == "schema"
    assert page.run("return document.getElementById('prompt').value") == "Send this"
    assert page.all(".message") == []


def test_the_system_prompt_is_sent(page: ChatPage) -> None:
    page.set_field("system", "Speak like a pirate")
    page.will_answer("Speak like a pirate", "Arr.")

    page.send("Hello there")

    assert page.answer == "Arr."


def test_empty_sampling_fields_show_the_values_that_hold(page: ChatPage) -> None:
    fields = "return Object.fromEntries([...document.querySelectorAll('.fields input')].map("
    shown = page.run(fields + "(one) => [one.name, one.placeholder]))")

    assert shown == {
        "temperature": "1",
        "top_p": "1",
        "top_k": "-1",
        "min_p": "0",
        "repetition_penalty": "1",
        "presence_penalty": "0",
        "frequency_penalty": "0",
        "max_tokens": "65536",
        "seed": "random",
    }
    assert page.one("[name=min_p]").is_displayed()


def test_sampling_fields_are_sent(page: ChatPage) -> None:
    page.record_requests()
    values = {"min_p": 0.05, "repetition_penalty": 1.1, "presence_penalty": -0.5, "frequency_penalty": 0.25}
    for name, value in values.items():
        page.set_field(name, str(value))
    page.will_answer("Sample so", "Sampled.")

    page.send("Sample so")

    assert page.answer == "Sampled."
    sent = page.requests()[-1]
    assert {name: sent.get(name) for name in values} == values
    assert "temperature" not in sent


def test_everything_comes_from_this_server(page: ChatPage) -> None:
    loaded = page.run("return performance.getEntriesByType('resource').map((one) => one.name)")

    assert any(name.endswith("/web/main.js") for name in loaded)
    assert all(name.startswith(page.url) for name in loaded)


def test_the_card_shows_what_runs_and_is_folded(page: ChatPage) -> None:
    assert page.one("#model-status").is_displayed()
    assert not page.one("#model-facts").is_displayed()
    page.click("#model-card summary")
    assert page.one("#model-facts").is_displayed()

    page.wait(lambda: "524,288" in page.text("#kv-text"))

    facts = page.text("#model-facts")
    assert "LlamaForCausalLM" in facts
    assert "65,536 tokens" in facts
    assert "Waiting0" in page.text("#load-facts")
