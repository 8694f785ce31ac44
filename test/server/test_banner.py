"""What the operator reads when the server is ready."""

from __future__ import annotations

import io
import json
import logging
import sys

import pytest

from lightserve.config import ClusterConfig, HttpConfig
from lightserve.messages.control import EngineInfo
from lightserve.server.banner import banner, print_banner, print_error
from lightserve.server.checks import ModelInfo
from lightserve.utils.logger import FORMAT_VARIABLE, JsonFormatter
from test.model_files.test_progress import Terminal

URL = "http://127.0.0.1:8000"
MODEL = ModelInfo("tiny", "LlamaForCausalLM", "")
ENGINE = EngineInfo(max_total_token_num=4096, max_req_total_len=1024, vocab_size=100, pipeline_depth=1)


@pytest.mark.parametrize("no_web", [False, True])
def test_the_banner_has_the_address_of_the_chat_page(no_web: bool, capsys: pytest.CaptureFixture[str]) -> None:
    print_banner(URL, banner(URL, MODEL, ENGINE, HttpConfig(no_web=no_web), {}))

    lines = [line.split() for line in capsys.readouterr().err.splitlines()]
    assert lines[0][-1] == URL
    assert (["chat", "page", f"{URL}/"] in lines) is not no_web


def test_a_program_reads_the_banner_as_one_object(monkeypatch: pytest.MonkeyPatch) -> None:
    records = json_records(monkeypatch)

    print_banner(URL, banner(URL, MODEL, ENGINE, HttpConfig(), {}, ClusterConfig(dp=2)))
    print_error("it died")

    ready, died = (json.loads(line) for line in records.getvalue().splitlines())
    assert ready["message"] == f"LightServe is ready at {URL}"
    assert (ready["url"], ready["chat_page"], ready["KV_pool"]) == (URL, f"{URL}/", "4,096 tokens in 2 engines")
    assert (died["level"], died["logger"], died["message"]) == ("error", "lightserve.launcher", "it died")


def json_records(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What the launcher's logger writes with --log_format json."""
    monkeypatch.setenv(FORMAT_VARIABLE, "json")
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    monkeypatch.setattr(logging.getLogger("lightserve"), "handlers", [handler])
    return stream


def test_errors_are_red_on_a_terminal_and_replace_the_progress_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)

    print_error("no such file")
    monkeypatch.setenv("NO_COLOR", "1")
    print_error("no such file")

    assert terminal.getvalue() == (
        "\r\x1b[K\x1b[31mlightserve:\x1b[0m no such file\n\r\x1b[Klightserve: no such file\n"
    )


def test_the_banner_says_who_may_replace_the_weights() -> None:
    open_to_all = banner(URL, MODEL, ENGINE, HttpConfig(enable_rl=True, weights_dir="/steps"), {})
    with_key = banner(URL, MODEL, ENGINE, HttpConfig(enable_rl=True, admin_key=["key"]), {})

    assert "trainer" not in banner(URL, MODEL, ENGINE, HttpConfig(), {})
    assert open_to_all["trainer"] == (
        "may pause the server and replace its weights, also from folders below /steps; everybody who reaches the port: "
        "there is no --admin_key"
    )
    assert with_key["trainer"] == "may pause the server and replace its weights; with an admin key"
