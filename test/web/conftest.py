"""One server and one browser for all tests of the pages. Without Chromium they are skipped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from test.api.scripted import ScriptedEngine, scripted_server
from test.web.chat_page import COUNT_VIOLATIONS, KEY, ROOT_PATH, ChatPage

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

CHROMIUM, CHROMEDRIVER = Path("/usr/bin/chromium"), Path("/usr/bin/chromedriver")
FLAGS = (
    "--headless",
    "--no-sandbox",  # the tests may run as root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1300,900",
)
XSS_NAME = "<img src=x onerror=alert(1)>"  # a name of the model that the card shows


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedEngine]:
    flags = ("--api_key", KEY, "--root_path", ROOT_PATH, "--model_name", "scripted", XSS_NAME)
    with scripted_server(tmp_path_factory.mktemp("engine"), *flags) as engine:
        yield engine


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    if not (CHROMIUM.exists() and CHROMEDRIVER.exists()):
        pytest.skip(f"{CHROMIUM} or {CHROMEDRIVER} is missing: apt-get install chromium chromium-driver")
    pytest.importorskip("selenium", reason="selenium is missing: pip install -r requirements-test.txt")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(str(CHROMEDRIVER)))
    driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": COUNT_VIOLATIONS})
    yield driver
    driver.quit()


@pytest.fixture
def page(browser: Chrome, engine: ScriptedEngine) -> Iterator[ChatPage]:
    """The chat page with an API key and no conversation. Fails if the browser refused or logged anything."""
    page = ChatPage(browser, engine)
    page.open_new()
    yield page
    assert page.violations() == []
    assert page.console_errors() == []
