"""The scheduling fields of a body reach the router."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightserve.messages.params import SchedulingParams
from test.httpserver.fake_engine import spell
from test.httpserver.generate_server import Served, serve

GIVEN = {"priority": -3, "timeout": 2.5, "cache_salt": "mine", "disable_prompt_cache": True}
CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]})
COMPLETION = ("/v1/completions", {"prompt": "Hi"})


@pytest.mark.parametrize(("path", "body"), [CHAT, COMPLETION])
def test_openai_bodies(tmp_path: Path, path: str, body: dict[str, Any]) -> None:
    async def scenario(served: Served) -> None:
        await served.post(path, body)
        await served.post(path, {**body, **GIVEN, "n": 2})

        first, *both = served.fake.received
        assert first.scheduling == SchedulingParams()
        assert [req.scheduling for req in both] == [SchedulingParams(-3, 2.5, "mine", use_cache=False)] * 2
        assert [req.group for req in both] == [both[0].req_id] * 2

    serve(scenario, tmp_path, spell("hi"))


@pytest.mark.parametrize("field", ["session_id", "prompt_cache_key"])
def test_a_session_has_the_same_key_in_every_request(tmp_path: Path, field: str) -> None:
    async def scenario(served: Served) -> None:
        for name in ("a", "a", "b", "x" * 10_000, 7, {"any": "value"}, ""):
            await served.post(COMPLETION[0], {**COMPLETION[1], field: name})

        first, again, other, *odd, none = [req.scheduling.session for req in served.fake.received]
        assert first == again
        assert len({first, other, *odd}) == 5
        assert all(len(key) == 16 for key in (first, other, *odd))
        assert none == ""

    serve(scenario, tmp_path, spell("hi"))


def test_lightllm_bodies(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        await served.post("/generate", {"inputs": "Hi", "parameters": {**GIVEN, "ignore_eos": True}})

        assert served.fake.received[0].scheduling == SchedulingParams(-3, 2.5, "mine", use_cache=False)

    serve(scenario, tmp_path, spell("hi"))


@pytest.mark.parametrize(
    "bad",
    [{"priority": 1.5}, {"priority": 2**31}, {"timeout": 0}, {"timeout": True}, {"cache_salt": ""}],
)
def test_invalid_http_is_refused(tmp_path: Path, bad: dict[str, Any]) -> None:
    async def scenario(served: Served) -> None:
        response = await served.post(COMPLETION[0], {**COMPLETION[1], **bad})

        assert response.status == 400
        assert response.json["error"]["param"] == next(iter(bad))

    serve(scenario, tmp_path, spell("hi"))
