"""Conversations are kept in the browser."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

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


def test_an_exported_conversation_is_imported_with_its_branches(page: ChatPage, tmp_path: Path) -> None:
    page.browser.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    page.set_field("system", "Be short")
    for answer in ("Exported.", "Exported anew."):
        page.will_answer("Take me along", answer)
    page.send("Take me along")
    page.click_button("Regenerate")
    page.wait(lambda: page.answer == "Exported anew.")
    page.wait_for_answer()
    page.click_button("Export")
    page.wait((tmp_path / "Take-me-along.json").exists)

    page.open_new()
    page.type("#import-file", str(tmp_path / "Take-me-along.json"))
    page.wait(lambda: page.titles == ["Take me along"])
    page.load()

    assert page.answer == "Exported anew."
    page.click_button("←")
    assert page.answer == "Exported."
    assert page.run("return document.querySelector('[name=system]').value") == "Be short"


def test_messages_of_openai_are_imported(page: ChatPage, tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "Be kind"},
        {"role": "user", "content": [{"type": "text", "text": "From elsewhere"}]},
        {"role": "assistant", "content": "Welcome, **you**."},
    ]
    (tmp_path / "list.json").write_text(json.dumps(messages))

    page.type("#import-file", str(tmp_path / "list.json"))
    page.wait(lambda: page.titles == ["From elsewhere"])

    assert page.answer == "Welcome, you."
    assert page.run("return document.querySelector('[name=system]').value") == "Be kind"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "bad.json is not JSON"),
        ("null", "bad.json is not a chat"),
        ('{"messages": 3}', "bad.json is not a chat"),
        ('{"messages": [{"role": "ghost", "content": ""}]}', "bad.json is not a chat"),
    ],
)
def test_a_file_without_a_chat_is_refused(page: ChatPage, tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "bad.json").write_text(text)

    page.type("#import-file", str(tmp_path / "bad.json"))
    page.wait(lambda: page.one("#text-dialog").is_displayed())

    assert says in page.text("#text-dialog-message")
    assert page.titles == []


@pytest.mark.parametrize(
    "damage", [{"stats": {}}, {"content": 3}, {"branch": {"index": 0, "others": [[]]}}, {"toolCalls": [{}]}]
)
def test_a_damaged_history_gives_way_to_the_messages(page: ChatPage, tmp_path: Path, damage: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": "Intact"}, {"role": "assistant", "content": "All of it."}]
    (tmp_path / "chat.json").write_text(
        json.dumps({"messages": messages, "history": [messages[0], messages[1] | damage]})
    )

    page.type("#import-file", str(tmp_path / "chat.json"))
    page.wait(lambda: page.titles == ["Intact"])

    assert page.answer == "All of it."


def test_search_finds_titles_and_messages(page: ChatPage) -> None:
    page.will_answer("About apples", "They are Red.")
    page.will_answer("About plums", "They are blue.")
    page.send("About apples")
    page.click("#new-conversation")
    page.send("About plums")

    for text, titles in (("APPLES", ["About apples"]), ("red they", ["About apples"]), ("pears", [])):
        page.run("document.getElementById('conversation-search').value = ''")
        page.type("#conversation-search", text)
        assert page.titles == titles
        assert page.one("#conversation-none").is_displayed() == (titles == [])
