"""The chat page as a test uses it: what a person does, and what a person sees."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from test.api.scripted import ScriptedEngine
from test.api.server import ServerProcess
from test.waiting import wait_until

if TYPE_CHECKING:
    from selenium.webdriver import Chrome
    from selenium.webdriver.remote.webelement import WebElement

KEY = "a-key"
ROOT_PATH = "/llm"
DEADLINE_S = 120.0  # Swagger UI took 30 s on two cores with a load of 20
# counts what the Content-Security-Policy refuses, from before the first script of the page runs
COUNT_VIOLATIONS = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) => {
  window.violations.push(`${event.violatedDirective} ${event.blockedURI} ${event.sample}`);
});
"""
RECORD_REQUESTS = """
const { fetch } = window;
window.sent = [];
window.fetch = (url, init) => {
  if (init?.body) window.sent.push(init.body);
  return fetch(url, init);
};
"""
EXPECTED_ERRORS = ("401 (Unauthorized)", "400 (Bad Request)", "404 (Not Found)")  # Chromium logs every refused request


class ChatPage:
    def __init__(self, browser: Chrome, engine: ScriptedEngine | ServerProcess, root_path: str = ROOT_PATH) -> None:
        self.browser = browser
        self.engine = engine
        self.url = f"{engine.url}{root_path}/"

    def open_new(self, key: str | None = KEY) -> None:
        """Load the page with empty storage, and with an API key unless it is None."""
        self.browser.get(f"{self.url}web/icon.svg")  # of the same origin, without the page's scripts
        self.run("localStorage.clear(); sessionStorage.clear()")
        if key is not None:
            self.run("localStorage.setItem(arguments[0], arguments[1])", f"lightserve:{ROOT_PATH}/:api_key", key)
        self.browser.get_log("browser")  # forget what earlier tests logged
        self.load()

    def load(self) -> None:
        self.browser.get(self.url)
        self.wait(lambda: self.text("#model-status") != "" or self.one("#text-dialog").is_displayed())

    def will_answer(self, prompt: str, *texts: str, step_s: float = 0.0) -> None:
        """Let the model answer with these texts, one after the other, when the conversation has this prompt."""
        assert isinstance(self.engine, ScriptedEngine)
        self.engine.will_write(*texts, when=re.escape(prompt), step_s=step_s)

    # what a person does

    def send(self, text: str) -> None:
        """Type a message, send it with Enter, and wait for the whole answer."""
        self.start(text)
        self.wait_for_answer()

    def start(self, text: str) -> None:
        from selenium.webdriver.common.keys import Keys

        self.type("#prompt", text)
        self.type("#prompt", Keys.ENTER)
        self.wait(lambda: self.run("return document.getElementById('prompt').value") == "")

    def type(self, selector: str, text: str) -> None:
        self.one(selector).send_keys(text)

    def set_field(self, name: str, text: str) -> None:
        """Set a field of the settings at once: long text takes seconds to type."""
        self.run(
            "const field = document.getElementById('settings').elements.namedItem(arguments[0]);"
            "field.value = arguments[1]; field.dispatchEvent(new Event('input', {bubbles: true}))",
            name,
            text,
        )

    def click(self, selector: str) -> None:
        self.one(selector).click()

    def click_button(self, label: str, inside: str = "body") -> None:
        self.wait(lambda: self._button(label, inside) is not None)
        button = self._button(label, inside)
        assert button is not None
        button.click()

    def _button(self, label: str, inside: str) -> WebElement | None:
        buttons = self.all(f"{inside} button")
        return next((one for one in buttons if one.text == label and one.is_displayed()), None)

    # what a person sees

    def one(self, selector: str) -> WebElement:
        return self.browser.find_element("css selector", selector)

    def all(self, selector: str) -> list[WebElement]:
        return list(self.browser.find_elements("css selector", selector))

    def text(self, selector: str) -> str:
        """The text of an element, also of one that is not visible."""
        return str(self.run("return document.querySelector(arguments[0])?.textContent ?? ''", selector))

    @property
    def is_generating(self) -> bool:
        return self.text("#send") == "Stop"

    @property
    def answer(self) -> str:
        """The text of the last answer."""
        script = "return [...document.querySelectorAll('.assistant > .content')].at(-1)?.textContent ?? ''"
        return str(self.run(script))

    @property
    def titles(self) -> list[str]:
        script = "return [...document.querySelectorAll('.conversation')].map((one) => one.textContent)"
        return list(self.run(script))

    def wait_for_answer(self) -> None:
        self.wait(lambda: not self.is_generating)

    def wait(self, condition: Callable[[], bool]) -> None:
        wait_until(condition, DEADLINE_S)

    # what the page sends

    def record_requests(self) -> None:
        """Keep the bodies of the requests from now on, until the page is loaded again."""
        self.run(RECORD_REQUESTS)

    def requests(self) -> list[Any]:
        """The bodies since record_requests."""
        return list(self.run("return window.sent.map((body) => JSON.parse(body))"))

    # what the browser reports

    def run(self, script: str, *args: Any) -> Any:
        return self.browser.execute_script(script, *args)

    def violations(self) -> list[str]:
        """What the Content-Security-Policy refused since the page was loaded."""
        return list(self.run("return window.violations"))

    def console_errors(self) -> list[str]:
        """Errors and warnings since the test began."""
        entries = [entry["message"] for entry in self.browser.get_log("browser") if entry["level"] != "INFO"]
        return [one for one in entries if not any(expected in one for expected in EXPECTED_ERRORS)]
