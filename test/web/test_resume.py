"""A page that is loaded again goes on with the answer that was being written."""

from __future__ import annotations

from test.web.chat_page import ChatPage

COUNTING = " ".join(map(str, range(120)))
STEP_S = 0.05


def running(page: ChatPage) -> str:
    return page.text("#load-facts")


def test_a_reload_goes_on_with_the_running_answer(page: ChatPage) -> None:
    page.will_answer("Reload me", COUNTING, step_s=STEP_S)
    page.start("Reload me")
    page.wait(lambda: "0 1 2" in page.answer)

    page.load()
    page.wait(lambda: page.is_generating or page.answer == COUNTING)
    page.wait_for_answer()

    assert page.answer == COUNTING
    assert "tokens/s" in page.text(".assistant .stats")
    assert len(page.all(".message")) == 2
    page.load()
    assert page.answer == COUNTING
    assert not page.is_generating


def test_a_resumed_answer_is_stopped_on_the_server(page: ChatPage) -> None:
    page.will_answer("Reload and stop", COUNTING * 10, step_s=STEP_S)
    page.start("Reload and stop")
    page.wait(lambda: "0 1 2" in page.answer)
    page.load()
    page.wait(lambda: page.is_generating)

    page.click("#send")
    page.wait(lambda: "Running0" in running(page))

    assert "Stopped." in page.text(".assistant .stats")
    page.load()
    assert not page.is_generating


def test_an_answer_that_the_server_has_lost_keeps_what_arrived(page: ChatPage) -> None:
    page.will_answer("Lose the rest", COUNTING, step_s=STEP_S)
    page.start("Lose the rest")
    page.wait(lambda: "0 1 2" in page.answer)
    page.browser.get(f"{page.url}web/icon.svg")  # away, without the page's scripts
    page.run(
        "for (const [key, text] of Object.entries(localStorage)) localStorage.setItem("
        'key, text.replace(/"eventId":"[^.]*/, \'"eventId":"AAAAAAAAAAAAAAAAAAAAAA\'))'
    )

    page.load()
    page.wait(lambda: "The rest is lost" in page.text(".assistant .stats"))

    assert page.answer.startswith("0 1 2")
    page.will_answer("Lose the rest", " and the end.")
    page.click_button("Continue")
    page.wait(lambda: page.answer.endswith(" and the end."))
