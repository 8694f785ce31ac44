"""Swagger UI at /docs, from the package."""

from __future__ import annotations

from test.web.chat_page import ChatPage

OPEN_VERSION = """
document.querySelector('[data-path="/version"]').closest(".opblock-summary-control").click();
"""


def test_an_operation_is_tried_with_the_key_of_the_chat_page(page: ChatPage) -> None:
    page.browser.get(page.url + "docs")
    page.wait(lambda: len(page.all(".opblock")) > 20)
    assert "/v1/chat/completions" in page.text("#swagger-ui")
    assert page.run("return performance.getEntriesByType('resource').every((one) => one.name.startsWith(origin))")

    page.run(OPEN_VERSION)
    page.wait(lambda: page.all(".try-out__btn") != [])
    page.run("document.querySelector('.try-out__btn').click()")
    page.wait(lambda: page.all(".execute") != [])
    page.run("document.querySelector('.execute').click()")

    page.wait(lambda: "0.1.0" in page.text(".live-responses-table"))


def test_without_a_key_the_docs_say_where_to_enter_it(page: ChatPage) -> None:
    page.run("localStorage.clear()")
    page.browser.get(page.url + "docs")

    page.wait(lambda: "needs an API key" in page.text("#swagger-ui"))
