"""Prompts of --pinned_prefixes, which stay in the prefix cache: a worker that dies, a file that is wrong."""

from __future__ import annotations

import signal
from pathlib import Path

from test.api.server import STOP_S
from test.faults.case import Case
from test.faults.cases.processes import STEP, send_signal
from test.faults.harness import STREAMING, FaultContext
from test.faults.reactions import Reaction, same_text, streams_continue
from test.faults.start_case import Start, StartCase

PROMPTS = Path(__file__).with_name("pinned_prefixes.json")
REFUSED = {
    "{": "is neither JSON",
    "[]": "has no prompt",
    '{"support": ""}': "must be a text that is not empty",
}


def _pinned_tokens(context: FaultContext) -> float:
    return context.server.metrics()["kv_pinned_tokens"]


def lose_pinned_kv(context: FaultContext) -> None:
    context.wait_until(lambda: _pinned_tokens(context) > 0)
    send_signal("ls-worker", signal.SIGKILL)(context)


def _pinned_again(context: FaultContext) -> None:
    streams_continue(context)
    body = {"prompt": [501, 502, 503], "max_tokens": 4, "task_id": "support"}
    context.wait_until(lambda: _pinned_tokens(context) > 0)
    status, response = context.complete(body)
    assert status == 200, response
    assert response["usage"]["prompt_tokens_details"]["cached_tokens"] >= _pinned_tokens(context)


def wrong_files(start: Start) -> None:
    path = start.base / "prompts.json"
    for text, reason in REFUSED.items():
        path.write_text(text)
        server = start.launch("--pinned_prefixes", str(path))
        assert server.process.wait(STOP_S) == 2
        assert "pinned_prefixes" in server.log
        assert reason in server.log


CASES = [
    Case(
        "kill -9 ls-worker, pinned prefixes, streaming",
        lose_pinned_kv,
        Reaction("streams go on, same text; the prompts are cached again", _pinned_again, same_text),
        STREAMING,
        flags=(*STEP, "--pinned_prefixes", str(PROMPTS)),
        within_s=20.0,
        is_long=True,
        restarts=1,
    )
]
START_CASES = [
    StartCase("--pinned_prefixes is wrong", wrong_files, "an error with the reason, exit code 2", within_s=60.0)
]
