"""POST /start_profile and /stop_profile in the HTTP process, with a router that replies what the test says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightserve.config import HttpConfig
from lightserve.messages.output import ProfileReply
from lightserve.messages.request import StartProfile, StopProfile
from test.httpserver.admin.test_routes import with_server
from test.httpserver.app_client import Served


def test_a_profile_is_started_and_stopped_without_a_body_too(tmp_path: Path) -> None:
    async def check(server: Served) -> None:
        server.fake.profile_reply = ProfileReply(0, path="/profiles/one.json.gz")

        started = await server.post("/start_profile")
        limited = await server.post("/start_profile", json={"max_seconds": 2.5})
        stopped = await server.post("/stop_profile")

        assert started.json() == {"status": "started", "max_seconds": 10.0}
        assert limited.json() == {"status": "started", "max_seconds": 2.5}
        assert stopped.json() == {"status": "written", "path": "/profiles/one.json.gz", "missing": None}
        assert [type(one) for one in server.fake.profile_messages] == [StartProfile, StartProfile, StopProfile]

    with_server(tmp_path, check)


@pytest.mark.parametrize("status", [400, 409, 500])
def test_the_reason_of_a_refusal_reaches_the_operator(tmp_path: Path, status: int) -> None:
    async def check(server: Served) -> None:
        server.fake.profile_reply = ProfileReply(0, status, "the disk is full")

        for path in ("/start_profile", "/stop_profile"):
            response = await server.post(path)
            assert response.status_code == status
            assert response.json()["error"]["message"] == "the disk is full"

    with_server(tmp_path, check)


@pytest.mark.parametrize("body", [{"max_seconds": 0}, {"max_seconds": 61}, {"max_seconds": "5"}, []])
def test_a_wrong_body_is_refused(tmp_path: Path, body: Any) -> None:
    async def check(server: Served) -> None:
        assert (await server.post("/start_profile", json=body)).status_code == 400
        assert not server.fake.profile_messages

    with_server(tmp_path, check)


def test_a_web_page_of_another_origin_cannot_start_a_profile(tmp_path: Path) -> None:
    async def check(server: Served) -> None:
        for path in ("/start_profile", "/stop_profile"):
            assert (await server.post(path, headers={"Origin": "http://evil.test"})).status_code == 415
        assert not server.fake.profile_messages

    with_server(tmp_path, check)


def test_a_profile_needs_an_admin_key_where_one_is_set(tmp_path: Path) -> None:
    async def check(server: Served) -> None:
        for path in ("/start_profile", "/stop_profile"):
            assert (await server.post(path, headers={"x-api-key": "client"})).status_code == 403
            assert (await server.post(path, headers={"x-api-key": "boss"})).status_code == 200

    with_server(tmp_path, check, HttpConfig(admin_key=["boss"], api_key=["client"]))
