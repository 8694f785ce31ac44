"""Flags of traces and profiles that the server refuses at its start."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lightserve.config import MAX_DEBUG_REQUESTS, HttpConfig, RouterConfig
from lightserve.errors import ServerError
from lightserve.server import checks
from lightserve.utils.extras import install_command


@pytest.mark.parametrize("endpoint", ["localhost:4318", "ftp://host", "http://", "http://host:0x", "http://host:99999"])
def test_an_endpoint_that_is_no_address_is_refused(endpoint: str) -> None:
    with pytest.raises(ServerError, match="otlp_endpoint"):
        HttpConfig(otlp_endpoint=endpoint)


def test_a_missing_package_is_an_error_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "OTLP_MODULE", "opentelemetry.proto.missing")

    with pytest.raises(ServerError, match=re.escape(install_command("otlp"))):
        checks.check_otlp(HttpConfig(otlp_endpoint="http://localhost:4318"))
    checks.check_otlp(HttpConfig())


def test_a_profile_folder_that_cannot_be_written_is_an_error_at_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")

    with pytest.raises(ServerError, match="--profile_dir"):
        checks.check_profile_dir(str(tmp_path / "file"))
    checks.check_profile_dir(str(tmp_path / "new" / "folder"))
    checks.check_profile_dir(None)

    assert list((tmp_path / "new" / "folder").iterdir()) == []


@pytest.mark.parametrize("count", [-1, MAX_DEBUG_REQUESTS + 1])
def test_the_number_of_timelines_is_bounded(count: int) -> None:
    with pytest.raises(ServerError, match="debug_requests"):
        RouterConfig(debug_requests=count)
