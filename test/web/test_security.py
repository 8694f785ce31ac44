"""Text is text, wherever the page shows it: nothing runs, nothing is loaded, no element is made of it.

The fixture ``page`` checks after each test that the browser refused nothing: a payload that the policy had to stop
would be a finding too.
"""

from __future__ import annotations

import json

import pytest

from test.web.chat_page import ChatPage
from test.web.conftest import XSS_NAME
from test.web.xss_payloads import HTML, PAYLOADS

# what the page makes of Markdown
ALLOWED_TAGS = {"a", "b", "blockquote", "br", "button", "code", "del", "div", "em", "h3", "h4", "h5", "h6", "hr", "li"}
ALLOWED_TAGS |= {"ol", "p", "pre", "span", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul"}
ALLOWED_ATTRIBUTES = {"aria-label", "class", "href", "rel", "role", "scope", "start", "tabindex", "target", "title"}
ALLOWED_ATTRIBUTES |= {"type"}
MATH_TAGS = {
    "math",
    "mfrac",
    "mi",
    "mn",
    "mo",
    "mover",
    "mroot",
    "mrow",
    "mspace",
    "msqrt",
    "mstyle",
    "msub",
    "msubsup",
}
MATH_TAGS |= {"msup", "mtable", "mtd", "mtext", "mtr", "munder", "munderover", "mphantom"}
MATH_ATTRIBUTES = {"accent", "alttext", "class", "display", "displaystyle", "fence", "form", "linethickness", "lspace"}
MATH_ATTRIBUTES |= {"mathvariant", "minsize", "movablelimits", "rspace", "stretchy", "width"}
ELEMENTS = """
return [...document.querySelectorAll(".message .content *, .tool-call *")].map((node) => [
  node.localName,
  Object.fromEntries([...node.attributes].map((one) => [one.name, one.value])),
]);
"""


def check_elements(page: ChatPage) -> None:
    for tag, attributes in page.run(ELEMENTS):
        allowed = MATH_ATTRIBUTES if tag in MATH_TAGS else ALLOWED_ATTRIBUTES
        assert tag in ALLOWED_TAGS | MATH_TAGS, (tag, attributes)
        assert set(attributes) <= allowed, (tag, attributes)
        if tag == "a":
            assert attributes["href"].startswith(("https://", "http://"))
            assert "noopener" in attributes["rel"]


@pytest.fixture
def attacked(page: ChatPage) -> ChatPage:
    """The page after a conversation full of payloads."""
    page.will_answer("Payloads", "\n\n".join(PAYLOADS))
    page.send("Payloads")
    return page


def test_there_are_enough_payloads() -> None:
    assert len(set(PAYLOADS)) >= 50


def test_payloads_of_the_model_are_text(attacked: ChatPage) -> None:
    shown = attacked.answer

    assert [payload for payload in HTML if payload not in shown] == []
    assert attacked.run("return window.attacked") is None
    check_elements(attacked)


def test_payloads_in_every_other_place_are_text(page: ChatPage) -> None:
    payload = "<img src=x onerror=window.attacked=1>"
    call = json.dumps({"name": "f", "arguments": {payload: payload}})
    page.set_field("tools", json.dumps([{"type": "function", "function": {"name": "f"}}]))
    page.will_answer(payload, f"<think>\n{payload}\n</think>\n\n{payload}\n<tool_call>\n{call}\n</tool_call>")

    page.send(payload)  # the title of the conversation is the same text
    page.click(".assistant .thinking summary")

    assert page.titles == [payload]
    assert page.text(".user > .content") == page.text(".assistant > .content").strip() == payload
    assert page.text(".assistant .thinking .content") == payload
    assert payload in page.text(".tool-call pre")
    assert XSS_NAME in page.text("#model-facts")
    assert page.all("img") == []
    assert page.run("return window.attacked") is None
    check_elements(page)


def test_stored_payloads_are_text_after_a_reload(attacked: ChatPage) -> None:
    attacked.load()

    assert attacked.run("return window.attacked") is None
    check_elements(attacked)


def test_the_policy_refuses_html_and_inline_scripts(page: ChatPage) -> None:
    with pytest.raises(Exception, match="TrustedHTML"):
        page.run("document.body.innerHTML = '<b>x</b>'")
    with pytest.raises(Exception, match="TrustedScript"):
        page.run("document.body.setAttribute('onclick', 'window.attacked=1')")

    assert len(page.violations()) == 2
    page.run("window.violations = []")
    page.browser.get_log("browser")


def test_a_text_full_of_markers_is_rendered_quickly(page: ChatPage) -> None:
    """Text that makes careless expressions and searches take minutes; the deadline of a script is 30 s."""
    render = """
    const [texts, done] = arguments;
    import(new URL("web/markdown/markdown.js", document.baseURI)).then(({MarkdownView}) => {
      const view = new MarkdownView(document.createElement("div"));
      const begin = performance.now();
      texts.forEach((text) => view.show(text));
      done(performance.now() - begin);
    });
    """
    size = 20_000
    texts = ["*" * size, "_a " * size, "[" * size, "`a``" * size, "# " + "#" * size + "x", "> " * size, "- " * size]
    texts += [("[a](" + " " * 1900) * 40, ("http://a" + "." * 1900 + "b ") * 40]
    texts += ["$" * size, "$a " * size, "$$\n" * size, "\\[a\n" * size, "\\(" * size, "\\begin{align}\n" * size]
    commands = ("{", "\\frac", "\\left(", "\\begin{matrix}", "^", "\\text{")
    texts += [f"$${command * (4000 // len(command))}$$" for command in commands]
    texts += [f"```{name}\n" + "<a '" * 7000 for name in ("python", "js", "html", "yaml", "css", "sql", "bash")]
    texts += ["|\n-" + " " * size + "x", "![](" * size, "<http://" * size, "http://" * size, " *a" * size, "1. " * size]

    assert page.browser.execute_async_script(render, texts) > 0
