"""The line of a request, for programs."""

from __future__ import annotations

import json

import pytest

from lightserve.httpserver.http.access_log import AccessLog
from lightserve.messages.output import Admission
from lightserve.messages.params import FinishReason
from lightserve.utils.logger import JsonFormatter


def test_a_json_line_has_the_figures_of_a_request_as_fields(log: pytest.LogCaptureFixture) -> None:
    access = AccessLog("r1", "/v1/chat/completions")
    access.prompt_tokens, access.generated_tokens = 37, 8
    access.record_admission(Admission(0.25, 30), is_first_choice=True)
    access.record_finish(FinishReason.STOP)

    access.close(None)

    [record] = log.records
    line = json.loads(JsonFormatter().format(record))
    assert (line["request_id"], line["route"], line["finish"]) == ("r1", "/v1/chat/completions", "stop")
    assert (line["prompt_tokens"], line["cached_tokens"], line["output_tokens"]) == (37, 30, 8)
    assert (line["queue_s"], line["level"]) == (0.25, "info")
    assert line["first_token_s"] <= line["total_s"]
    assert "r1 /v1/chat/completions" in line["message"]
