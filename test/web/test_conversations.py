"""Conversations are kept in the browser."""

from __future__ import annotations

import json
from pathlib import Path

from test.web.chat_page import ChatPage


def test_a_reload_keeps_conversations_and_settings(page: ChatPage) -> None:
    page.set_field("temperature", "0.5")
    page.will_answer("The first chat", "One.")
    page.will_answer("The second chat", "Two.")
    page.send("The first chat")
    page.click("#new-conversation")
    page.send("The second chat")

    page.load()

    assert page.titles == ["The second chat", "The first chat"]
    assert page.answer == "Two."
    page.click_button("The first chat")
    assert page.answer == "One."
    assert page.run("return document.querySelector('[name=temperature]').value") == "0.5"


def test_half_an_answer_survives_a_reload(page: ChatPage) -> None:
    page.will_answer("Reload me", " ".join(map(str, range(150))), step_s=0.05)
    page.start("Reload me")
    page.wait(lambda: "0 1 2" in page.answer)

    page.load()

    assert page.answer.startswith("0 1 2")
    assert not page.is_generating


def test_a_conversation_is_renamed_and_deleted(page: ChatPage) -> None:
    page.will_answer("Name me", "Named.")
    page.send("Name me")

    page.click_button("Rename")
    page.run("document.getElementById('text-dialog-input').value = 'Another name'")
    page.click("#text-dialog-confirm")
    page.wait(lambda: page.titles == ["Another name"])
    page.load()
    assert page.titles == ["Another name"]

    page.click_button("Delete")
    page.click("#text-dialog-cancel")
    assert page.titles == ["Another name"]
    page.click_button("Delete")
    page.click("#text-dialog-confirm")
    page.wait(lambda: page.titles == [])
    page.load()
    assert page.titles == []


def test_a_conversation_is_exported(page: ChatPage, tmp_path: Path) -> None:
    page.browser.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    page.set_field("system", "Be short")
    page.will_answer("Save me", "Saved.")
    page.send("Save me")

    page.click_button("Export")
    page.wait((tmp_path / "Save-me.json").exists)

    assert json.loads((tmp_path / "Save-me.json").read_text())["messages"] == [
        {"role": "system", "content": "Be short"},
        {"role": "user", "content": "Save me"},
        {"role": "assistant", "content": "Saved."},
    ]
