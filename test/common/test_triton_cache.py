from __future__ import annotations

import os
from pathlib import Path

import pytest

from lightserve.common.compile.cache import use_writable_cache


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("TRITON_CACHE_DIR", "TRITON_HOME"):
        monkeypatch.setenv(name, "")  # noted, so that what the test sets is undone
    monkeypatch.setenv("HOME", str(tmp_path))


def test_a_cache_that_can_be_written_is_left_to_triton(tmp_path: Path) -> None:
    use_writable_cache("elsewhere")

    assert not os.environ["TRITON_CACHE_DIR"]
    assert list((tmp_path / ".triton" / "cache").iterdir()) == []


@pytest.mark.parametrize("name", ["HOME", "TRITON_HOME", "TRITON_CACHE_DIR"])
def test_where_nothing_can_be_written_another_is_chosen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "/dev/null/nowhere")

    use_writable_cache("elsewhere")

    assert os.environ["TRITON_CACHE_DIR"] == "elsewhere"
