"""A model that reads images answers about one that was dropped on the page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from test.api.server import ServerProcess, running_server
from test.vision_model import save_vision_model
from test.web.chat_page import ChatPage
from test.web.test_composer import chips, picture, put

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

pytestmark = pytest.mark.long  # a model of torch starts for one test


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder, _ = save_vision_model(tmp_path_factory.mktemp("model"))
    flags = ("--max_total_token_num", "4096", "--default_max_tokens", "12")
    log = tmp_path_factory.mktemp("server") / "log"
    with running_server(log, "--model_dir", folder, *flags) as server:
        yield server


def test_an_image_reaches_the_model(browser: Chrome, server: ServerProcess) -> None:
    page = ChatPage(browser, server, root_path="")
    page.open_new(key=None)
    page.wait(lambda: "Ready" in page.text("#model-status"))
    put(page, "drop", "teal.png", "image/png", picture(84, 56))
    page.wait(lambda: chips(page) == ["teal.png"])

    page.start("w7")
    page.wait_for_answer()

    assert not page.one(".assistant .error").is_displayed()
    prompt_tokens = int(page.text(".assistant .stats").split(" prompt tokens")[0].rpartition(" ")[2])
    assert prompt_tokens == 3 + 2 + 3 * 2  # w1, w7 and w2; the image begins, ends, and has a token for 28 x 28 pixels
    assert page.run("return document.querySelector('.user img').naturalWidth") == 84
