"""Colours, narrow screens, and what assistive technology needs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from test.web.chat_page import ChatPage

WIDE, NARROW = (1300, 900), (390, 800)
TABLE = "| a | b |\n|---|---|\n| 1 | 2 |"
FORMULAS = "$x^2$\n\n$$\\frac{a}{b}$$\n\n- [ ] open\n- [x] done\n\n> quoted"
CODE = "```python\ndef f(x):  # why\n    return 'x' + 1\n```"
ANSWER = f"# Title\n\nText with `code` and a [link](https://example.com).\n\n{CODE}\n\n{TABLE}\n\n{FORMULAS}"
BACKGROUND = "return getComputedStyle(document.body).backgroundColor"
AXE = Path(os.environ["LIGHTSERVE_TEST_AXE"]) if "LIGHTSERVE_TEST_AXE" in os.environ else None  # axe.min.js of npm
RULES = {"rules": {"target-size": {"enabled": True}}}  # which the Python package's does not have
LIGHT_PAGE, DARK_PAGE = "rgb(255, 255, 255)", "rgb(22, 24, 29)"


@pytest.fixture
def narrow(page: ChatPage) -> Iterator[ChatPage]:
    page.browser.set_window_size(*NARROW)
    yield page
    page.browser.set_window_size(*WIDE)


def choose_theme(page: ChatPage, theme: str) -> None:
    page.click(f"#theme option[value={theme}]")


def findings(page: ChatPage) -> list[str]:
    """Of axe-core: rules that the page breaks, with the elements. It is that of the Python package, or another one."""
    from axe_core_python.selenium import Axe

    page.run(AXE.read_text() if AXE else Axe().axe_script)
    found = page.browser.execute_async_script("axe.run(arguments[0]).then(arguments[1])", RULES if AXE else {})
    return [f"{one['impact']} {one['id']}: {[node['html'] for node in one['nodes']]}" for one in found["violations"]]


def findings_in_both_themes(page: ChatPage) -> list[str]:
    found = []
    for theme in ("light", "dark"):
        choose_theme(page, theme)
        found += findings(page)
    return found


def test_the_switch_sets_the_colours_and_a_reload_keeps_them(page: ChatPage) -> None:
    choose_theme(page, "light")
    assert page.run(BACKGROUND) == LIGHT_PAGE

    choose_theme(page, "dark")
    assert page.run(BACKGROUND) == DARK_PAGE

    page.load()
    assert page.run(BACKGROUND) == DARK_PAGE


def test_without_a_choice_the_system_decides(page: ChatPage) -> None:
    for scheme, colour in (("dark", DARK_PAGE), ("light", LIGHT_PAGE)):
        feature = {"name": "prefers-color-scheme", "value": scheme}
        page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})

        assert page.run(BACKGROUND) == colour

    page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_axe_finds_nothing_in_a_chat(page: ChatPage) -> None:
    page.will_answer("Render all", f"<think>\nHm.\n</think>\n\n{ANSWER}")
    page.send("Render all")
    page.run("document.querySelectorAll('details').forEach((one) => (one.open = true))")

    assert findings_in_both_themes(page) == []


def test_axe_finds_nothing_on_a_narrow_screen(narrow: ChatPage) -> None:
    narrow.will_answer("Render all", f"<think>\nHm.\n</think>\n\n{ANSWER}")
    narrow.send("Render all")
    narrow.run("document.querySelectorAll('details').forEach((one) => (one.open = true))")

    assert findings_in_both_themes(narrow) == []

    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    for drawer in ("#conversations-toggle", "#details-toggle"):
        narrow.click(drawer)
        assert findings(narrow) == []
        ActionChains(narrow.browser).send_keys(Keys.ESCAPE).perform()


def test_axe_finds_nothing_in_comparisons_files_and_probabilities(page: ChatPage, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("a note")
    page.set_field("probabilities", "on")
    page.click("#compare")
    page.will_answer("Compare all", ANSWER, ANSWER)
    page.type("#attach-file", str(tmp_path / "notes.txt"))
    page.wait(lambda: page.all("#attachments li") != [])
    page.send("Compare all")
    page.type("#attach-file", str(tmp_path / "notes.txt"))
    page.wait(lambda: page.all("#attachments li") != [])
    page.click_button("Probabilities")
    page.run("document.querySelectorAll('details').forEach((one) => (one.open = true))")

    assert findings_in_both_themes(page) == []


def test_axe_finds_nothing_elsewhere(narrow: ChatPage) -> None:
    assert findings(narrow) == []  # no messages

    narrow.click("#details-toggle")
    assert findings(narrow) == []

    narrow.open_new(key=None)
    narrow.wait(lambda: narrow.one("#text-dialog").is_displayed())
    assert findings(narrow) == []


def test_a_narrow_screen_needs_no_sideways_scrolling(narrow: ChatPage) -> None:
    narrow.will_answer("Wide text", f"{'x' * 300}\n\n```\n{'y' * 300}\n```\n\n{ANSWER}")
    narrow.send("Wide text")

    assert narrow.run("return document.documentElement.scrollWidth <= window.innerWidth")
    assert narrow.run("const log = document.getElementById('log'); return log.scrollWidth <= log.clientWidth")


def test_drawers_open_by_button_and_close_by_escape(narrow: ChatPage) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    assert not narrow.one("#conversations").is_displayed()

    narrow.click("#conversations-toggle")
    assert narrow.one("#conversations").is_displayed()
    assert narrow.run("return document.activeElement.id") == "new-conversation"
    assert narrow.one("#conversations-toggle").get_attribute("aria-expanded") == "true"

    ActionChains(narrow.browser).send_keys(Keys.ESCAPE).perform()
    assert not narrow.one("#conversations").is_displayed()
    assert narrow.run("return document.activeElement.id") == "conversations-toggle"


def test_everything_is_reachable_with_the_tab_key(page: ChatPage) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    reached: list[str] = []
    page.run("document.activeElement.blur()")
    for _ in range(35):
        ActionChains(page.browser).send_keys(Keys.TAB).perform()
        reached.append(page.run("return document.activeElement.id || document.activeElement.name || ''"))

    assert {"theme", "new-conversation", "prompt", "send", "system"} <= set(reached)
