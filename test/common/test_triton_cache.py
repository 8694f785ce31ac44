from __future__ import annotations

import os
from pathlib import Path

import pytest

from lightserve.common.compile.cache import use_writable_cache


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("TRITON_CACHE_DIR", "TRITON_HOME"):
        monkeypatch.setenv(name, "")  # so that monkeypatch undoes what the test sets
    monkeypatch.setenv("HOME", str(tmp_path))


def test_a_writable_cache_is_left_to_triton(tmp_path: Path) -> None:
    use_writable_cache("elsewhere")

    assert not os.environ["TRITON_CACHE_DIR"]
    assert list((tmp_path / ".triton" / "cache").iterdir()) == []


@pytest.mark.parametrize("name", ["HOME", "TRITON_HOME", "TRITON_CACHE_DIR"])
def test_a_read_only_cache_is_replaced_by_the_fallback(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "/dev/null/nowhere")

    use_writable_cache("elsewhere")

    assert os.environ["TRITON_CACHE_DIR"] == "elsewhere"
