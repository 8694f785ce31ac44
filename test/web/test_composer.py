"""The message field: files and images that go with a message, saved system prompts, and the context that is used."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from test.web.chat_page import ChatPage

SEES_IMAGES = """
{ const { fetch } = window;
window.fetch = async (url, init) => {
  const response = await fetch(url, init);
  if (!String(url).includes("get_server_info")) return response;
  const info = await response.json();
  info.model.input_modalities = ["text", "image"];
  return new Response(JSON.stringify(info));
}; }
"""
PUT_FILE = """
const [kind, name, type, encoded] = arguments;
const bytes = Uint8Array.from(atob(encoded), (one) => one.charCodeAt(0));
const data = new DataTransfer();
data.items.add(new File([bytes], name, { type }));
const init = { bubbles: true, cancelable: true };
const event = kind === "paste" ? new ClipboardEvent(kind, { ...init, clipboardData: data })
  : new DragEvent(kind, { ...init, dataTransfer: data });
document.getElementById(kind === "paste" ? "prompt" : "log").dispatchEvent(event);
return event.defaultPrevented;
"""


def picture(width: int, height: int, file_format: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), "teal").save(file, file_format)
    return file.getvalue()


def put(page: ChatPage, kind: str, name: str, media_type: str, data: bytes) -> None:
    """Paste or drop a file."""
    assert page.run(PUT_FILE, kind, name, media_type, base64.b64encode(data).decode())


def chips(page: ChatPage) -> list[str]:
    return list(page.run("return [...document.querySelectorAll('#attachments span')].map((one) => one.textContent)"))


@pytest.fixture
def sighted(page: ChatPage) -> ChatPage:
    """The page of a server whose model reads images, as far as the page can know."""
    source: dict[str, Any] = {"source": SEES_IMAGES}
    added = page.browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", source)
    page.open_new()
    page.browser.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)
    return page


def test_a_text_file_is_sent_with_the_message(page: ChatPage, tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("# Notes\n```\ncode\n```\n")
    page.record_requests()
    page.will_answer("Read it", "I have read it.")

    page.type("#attach-file", str(tmp_path / "notes.md"))
    page.wait(lambda: chips(page) == ["notes.md"])
    page.send("Read it")

    sent = page.requests()[-1]["messages"]
    assert sent == [{"role": "user", "content": "File notes.md:\n````\n# Notes\n```\ncode\n```\n````\n\nRead it"}]
    assert page.text(".user > .content") == "Read it"
    assert chips(page) == []
    page.click(".attachment summary")
    page.wait(lambda: "# Notes" in page.text(".attachment pre"))
    page.load()
    assert page.text(".attachment summary") == "notes.md (5 lines)"


def test_a_file_is_removed_again(page: ChatPage, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    page.type("#attach-file", str(tmp_path / "a.txt"))
    page.wait(lambda: chips(page) == ["a.txt"])

    page.click("#attachments button")

    assert chips(page) == []
    assert page.run("return document.activeElement.id") == "prompt"


@pytest.mark.parametrize("kind", ["paste", "drop"])
def test_a_file_is_pasted_or_dropped(page: ChatPage, kind: str) -> None:
    put(page, kind, "data.csv", "text/csv", b"a,b\n1,2\n")
    page.wait(lambda: chips(page) == ["data.csv"])


@pytest.mark.parametrize(
    ("name", "media_type", "data", "says"),
    [
        ("a.png", "image/png", picture(2, 2), "a.png: this model reads no images"),
        ("a.zip", "application/zip", b"PK\x00\xff", "a.zip is not a text in UTF-8"),
        ("a.txt", "text/plain", b"x" * 300_001, "a.txt has 300,001 characters; the limit is 300,000"),
    ],
)
def test_a_file_that_cannot_be_sent_is_refused(
    page: ChatPage, name: str, media_type: str, data: bytes, says: str
) -> None:
    put(page, "drop", name, media_type, data)
    page.wait(lambda: page.one("#text-dialog").is_displayed())

    assert says in page.text("#text-dialog-message")
    assert chips(page) == []


@pytest.mark.parametrize("kind", ["attach", "paste", "drop"])
def test_an_image_is_sent_and_shown(sighted: ChatPage, tmp_path: Path, kind: str) -> None:
    if kind == "attach":
        (tmp_path / "teal.png").write_bytes(picture(40, 30))
        sighted.type("#attach-file", str(tmp_path / "teal.png"))
    else:
        put(sighted, kind, "teal.png", "image/png", picture(40, 30))
    sighted.wait(lambda: chips(sighted) == ["teal.png"])
    sighted.record_requests()

    sighted.start("What is it?")
    sighted.wait_for_answer()

    image, text = sighted.requests()[-1]["messages"][0]["content"]
    assert text == {"type": "text", "text": "What is it?"}
    prefix, _, encoded = image["image_url"]["url"].partition(",")
    assert (image["type"], prefix) == ("image_url", "data:image/png;base64")
    assert base64.b64decode(encoded) == picture(40, 30)
    assert sighted.run("return document.querySelector('.user img').naturalWidth") == 40
    assert "image" in sighted.text(".assistant .error")  # of the scripted model, which reads none


def test_a_large_image_is_made_smaller(sighted: ChatPage) -> None:
    put(sighted, "drop", "wide.png", "image/png", picture(4000, 1000))
    sighted.wait(lambda: chips(sighted) == ["wide.png"])
    sighted.record_requests()

    sighted.start("Look")
    sighted.wait_for_answer()

    url = sighted.requests()[-1]["messages"][0]["content"][0]["image_url"]["url"]
    sent = Image.open(io.BytesIO(base64.b64decode(url.removeprefix("data:image/jpeg;base64,"))))
    assert sent.size == (1536, 384)


def test_system_prompts_are_saved_and_used_again(page: ChatPage) -> None:
    page.set_field("system", "Speak like a pirate")
    page.click("#save-prompt")
    page.wait(lambda: page.one("#text-dialog").is_displayed())
    page.run("document.getElementById('text-dialog-input').value = 'Pirate'")
    page.click("#text-dialog-confirm")
    page.wait(lambda: page.one("#saved-prompts").is_displayed())
    page.set_field("system", "")
    page.load()

    page.click("#saved-prompts option[value=Pirate]")
    assert page.run("return document.querySelector('[name=system]').value") == "Speak like a pirate"
    page.will_answer("Speak like a pirate", "Arr.")
    page.send("Hello there")
    assert page.answer == "Arr."

    page.click("#delete-prompt")
    assert not page.one("#saved-prompts").is_displayed()
    assert page.run("return document.querySelector('[name=system]').value") == "Speak like a pirate"


def test_the_context_that_is_used_is_shown(page: ChatPage) -> None:
    assert not page.one("#context-use").is_displayed()
    page.will_answer("How full", "Not very.")

    page.send("How full")

    page.wait(lambda: page.one("#context-use").is_displayed())
    prompt, output = page.text(".assistant .stats").replace("prompt tokens", "").split(" · ")[:2]
    used = int(prompt.split()[0]) + int(output.split()[0])
    assert page.text("#context-text") == f"{used} of 65,536 tokens"
