"""Quantised weights: files of the operator that are wrong."""

from __future__ import annotations

from test.api.server import STOP_S
from test.faults.start_case import Start, StartCase

REFUSED = {
    "{": "not readable as JSON",
    '{"default": "int3"}': "default is int3; it must be one of",
    '{"modules": {"no_such_proj": "int8"}}': "no_such_proj is no module of this model",
}


def wrong_choices(start: Start) -> None:
    start.worker = ()  # only a real worker reads the file
    path = start.base / "choices.json"
    for text, reason in REFUSED.items():
        path.write_text(text)
        server = start.launch("--quantization_config", str(path))
        assert server.process.wait(STOP_S) == 2
        assert server.log.count("\n") == 1
        assert "--quantization_config" in server.log
        assert reason in server.log


START_CASES = [
    StartCase("--quantization_config is wrong", wrong_choices, "one line with the reason, exit code 2", within_s=120.0)
]
