"""What the operator reads when the server is ready."""

from __future__ import annotations

import pytest

from lightserve.config import HttpConfig
from lightserve.io_struct import EngineReady
from lightserve.server.banner import banner
from lightserve.server.checks import ModelInfo

URL = "http://127.0.0.1:8000"
MODEL = ModelInfo("tiny", "LlamaForCausalLM", "")
ENGINE = EngineReady(max_total_token_num=4096, max_req_total_len=1024, vocab_size=100, pipeline_depth=1)


@pytest.mark.parametrize("no_web", [False, True])
def test_the_banner_has_the_address_of_the_chat_page(no_web: bool) -> None:
    text = banner(URL, MODEL, ENGINE, HttpConfig(no_web=no_web), {})

    lines = [line.split() for line in text.splitlines()]
    assert lines[0][-1] == URL
    assert (["chat", "page", f"{URL}/"] in lines) is not no_web
