"""``lightserve chat`` as a person uses it: in a terminal, with a server that runs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightserve.config import HttpConfig
from lightserve.messages.params import FinishReason
from test.cli.terminal import CTRL_C, CTRL_D, ROOT, Terminal, in_terminal
from test.httpserver.fake_engine import spell
from test.httpserver.openai_server import Server, fails, rows, running
from test.real_model import smollm2_tokenizer as smol
from test.waiting import wait_until

KEY = "secret"
THINKING = ("<think>", "Hm", "m", "</think>", "Because")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    config = HttpConfig(api_key=[KEY], model_name=["tiny", "other"], reasoning_parser="qwen3")
    with running(tmp_path_factory.mktemp("run"), config=config) as server:
        yield server


@pytest.fixture
def chat(server: Server, tmp_path: Path) -> Iterator[Terminal]:
    server.engine.script = spell("Hello")
    server.engine.received.clear()
    env = {"LIGHTSERVE_API_KEY": KEY, "XDG_STATE_HOME": str(tmp_path)}
    with in_terminal("chat", "--url", str(server.http.base_url), env=env) as terminal:
        terminal.wait_for("/help lists the commands")
        yield terminal


def prompt_of(server: Server, number: int = -1) -> str:
    """The text that the engine got for a request."""
    return smol().decode(server.engine.received[number].prompt_ids)


def test_an_answer_arrives_with_its_tokens_and_speed(server: Server, chat: Terminal) -> None:
    chat.type("Hi there\n")
    chat.wait_for("Hello")
    assert "[5 tokens, " in chat.wait_for("first after") + "first after"

    chat.type("/quit\n")

    assert chat.wait_end() == 0
    assert "Hi there" in prompt_of(server)


def test_the_conversation_is_sent_again_until_it_is_reset(server: Server, chat: Terminal) -> None:
    for question in ("first question", "second question"):
        chat.type(f"{question}\n")
        chat.wait_for("first after")
    assert "first question" in prompt_of(server)
    assert "Hello" in prompt_of(server)

    chat.type("/reset\n")
    chat.wait_for("new conversation")
    chat.type("/system You are terse.\n")
    chat.wait_for("system prompt set")
    chat.type("third question\n")
    chat.wait_for("first after")
    assert "first question" not in prompt_of(server)
    assert "You are terse." in prompt_of(server)

    chat.wait_for("> ")  # while an answer is printed the terminal, not the chat, reads the key
    chat.type(CTRL_D)
    assert chat.wait_end() == 0


def test_retry_asks_the_last_question_again(server: Server, chat: Terminal) -> None:
    chat.type("/retry\n")
    chat.wait_for("nothing to retry")

    chat.type("only question\n")
    chat.wait_for("first after")
    server.engine.script = spell("Goodbye")
    chat.type("/retry\n")
    chat.wait_for("Goodbye")
    chat.wait_for("first after")

    assert prompt_of(server, -1) == prompt_of(server, -2)


def test_ctrl_c_stops_an_answer_and_not_the_program(server: Server, chat: Terminal) -> None:
    server.engine.script = spell("XYZ")
    server.hold()
    try:
        chat.type("go on\n")
        chat.wait_for("X")
        chat.type(CTRL_C)
        chat.wait_for("stopped]")
        wait_until(lambda: bool(server.engine.aborted))
    finally:
        server.release()

    chat.type(CTRL_C)  # at the prompt
    chat.wait_for("/quit or Ctrl-D leaves")
    server.engine.script = spell("Hello")
    chat.type("again\n")
    chat.wait_for("Hello")
    chat.wait_for("first after")
    chat.type("/exit\n")
    assert chat.wait_end() == 0


def test_thinking_is_dimmed_and_not_sent_back(server: Server, chat: Terminal) -> None:
    server.engine.script = rows(*THINKING)
    chat.type("why\n")
    chat.wait_for("\x1b[2m")
    assert chat.wait_for("\x1b[0m") == "Hmm"
    assert chat.wait_for("Because").strip() == ""
    chat.wait_for("first after")

    chat.type("and\n")
    chat.wait_for("first after")
    assert "Because" in prompt_of(server)
    assert "Hmm" not in prompt_of(server)


def test_an_answer_cannot_control_the_terminal(server: Server, chat: Terminal) -> None:
    server.engine.script = rows("a\x1b]0;title\x07", "b\x1b[2J")
    chat.type("hi\n")
    chat.wait_for("first after")

    assert "a]0;titleb[2J" in chat.raw
    assert "\x1b]0" not in chat.raw
    assert "\x1b[2J" not in chat.raw


def test_commands_explain_themselves(server: Server, chat: Terminal) -> None:
    chat.type("/help\n")
    assert "/system" in chat.wait_for("stops an answer")
    chat.type("/rety\n")
    chat.wait_for("unknown command /rety; did you mean /retry?")
    chat.type("/model other\n")
    chat.wait_for("* other")
    chat.type("/model big\n")
    chat.wait_for("the server has no model 'big'; it has tiny, other")
    chat.type("/set temperature 0.5\n")
    chat.wait_for("temperature 0.5\r\n")
    chat.type("/set temperature hot\n")
    chat.wait_for("temperature: 'hot' is not a number")
    chat.type("hi\n")
    chat.wait_for("first after")
    assert server.engine.received[-1].params.sampling.temperature == 0.5


def test_a_message_may_have_several_lines_and_be_saved(chat: Terminal, tmp_path: Path) -> None:
    chat.type('"""one\ntwo"""\n')
    chat.wait_for("first after")
    path = tmp_path / "chat.json"
    for answer in ("saved as", "File exists"):
        chat.type(f"/save {path}\n")
        chat.wait_for(answer)

    saved: dict[str, Any] = json.loads(path.read_text())
    assert [message["content"] for message in saved["messages"]] == ["one\ntwo", "Hello"]


def test_an_error_is_one_line_and_the_chat_goes_on(server: Server, chat: Terminal) -> None:
    server.engine.script = fails(503, "the model worker died")
    chat.type("a question that fails\n")
    chat.wait_for("error: the model worker died")
    server.engine.script = spell("Hello", FinishReason.LENGTH)
    chat.type("another\n")
    chat.wait_for("cut at the length limit]")

    assert "a question that fails" not in prompt_of(server)


def test_typed_lines_are_remembered_for_the_next_chat(server: Server, tmp_path: Path) -> None:
    pytest.importorskip("readline", reason="this Python has no readline")
    server.engine.script = spell("Hello")
    env = {"LIGHTSERVE_API_KEY": KEY, "XDG_STATE_HOME": str(tmp_path)}
    up = "\x1b[A"
    for typed in ("unforgettable\n", f"{up}{up}\n"):  # the last line of the first chat is /quit
        with in_terminal("chat", "--url", str(server.http.base_url), env=env) as terminal:
            terminal.wait_for("> ")
            terminal.type(typed)
            terminal.wait_for("first after")
            terminal.type("/quit\n")
            assert terminal.wait_end() == 0

    assert "unforgettable" in prompt_of(server)
    assert (tmp_path / "lightserve" / "chat_history").stat().st_mode & 0o777 == 0o600


def test_the_key_is_asked_for_and_not_shown(server: Server, tmp_path: Path) -> None:
    env = {"XDG_STATE_HOME": str(tmp_path)}
    with in_terminal("chat", "--url", str(server.http.base_url), env=env) as terminal:
        terminal.wait_for("API key: ")
        terminal.type(f"{KEY}\n")
        terminal.wait_for("/help lists the commands")

        assert KEY not in terminal.raw


def run_chat(*argv: str, text: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lightserve.cli.main", "chat", *argv]
    environment = {"PYTHONPATH": str(ROOT), "HOME": "/nonexistent"} | env
    return subprocess.run(command, cwd=ROOT, input=text, capture_output=True, text=True, timeout=120, env=environment)


def test_a_pipe_gets_the_answers_alone(server: Server) -> None:
    server.engine.script = rows(*THINKING)

    run = run_chat("--url", f"{server.http.base_url}/v1/", text="one\n", LIGHTSERVE_API_KEY=KEY)

    assert (run.returncode, run.stdout, run.stderr) == (0, "(thinking) Hmm\n\nBecause\n", "")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--url", "http://127.0.0.1:9"], "no answer from a server at http://127.0.0.1:9 (Connection refused); start"),
        (["--url", "ftp://host"], "--url ftp://host: not an address such as"),
        (["--url", "http://host:port"], "--url http://host:port: Port could not be cast"),
        (["--uri", "x"], "unknown argument --uri; did you mean --url?"),
    ],
)
def test_a_server_that_is_not_there_is_one_line(argv: list[str], message: str) -> None:
    run = run_chat(*argv)

    assert run.returncode == 2
    [line] = run.stderr.splitlines()
    assert line.startswith(f"lightserve: {message}")


def test_a_wrong_key_ends_a_chat_without_a_terminal(server: Server) -> None:
    run = run_chat("--url", str(server.http.base_url), "--api_key", "wrong", text="hi\n")

    assert run.returncode == 2
    assert "key" in run.stderr
