"""The directory of a server's sockets: private, and removed with the server or at the next start."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from lightserve.server.run_directory import PREFIX, run_directory


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ls-test-", dir="/tmp") as folder:
        monkeypatch.setattr("tempfile.tempdir", folder)
        yield Path(folder)


def left_by_a_crash(base: Path, name: str = "dead") -> Path:
    path = base / f"{PREFIX}{name}"
    path.mkdir(mode=0o700)
    with closing(socket.socket(socket.AF_UNIX)) as sock:
        sock.bind(str(path / "router"))
    return path


def test_the_run_directory_is_short_enough_for_socket_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/tmp/" + 60 * "x")

    with run_directory() as path:
        assert len(path) < 60
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o700

    assert not os.path.exists(path)


def test_a_run_directory_is_removed_when_its_server_ends(base: Path) -> None:
    with run_directory() as path:
        (Path(path) / "tp.1.0").write_text("")
        assert list(base.iterdir()) == [Path(path)]

    assert not list(base.iterdir())


def test_the_directory_of_a_crashed_server_is_removed_at_the_next_start(base: Path) -> None:
    left = left_by_a_crash(base)
    with_kernels = left_by_a_crash(base, "of a user without a home")
    (with_kernels / "triton" / "abc").mkdir(parents=True)
    (with_kernels / "triton" / "abc" / "kernel.cubin").write_text("")
    with_responses = left_by_a_crash(base, "with stored responses")
    (with_responses / "responses").mkdir()
    (with_responses / "responses" / "responses.sqlite").write_text("")

    with run_directory():
        assert not left.exists()
        assert not with_kernels.exists()
        assert not with_responses.exists()


def test_the_directory_of_a_running_server_is_kept(base: Path) -> None:
    with run_directory() as first, run_directory():
        assert Path(first).exists()


@pytest.mark.parametrize("change", ["a file", "other mode", "a link", "other name"])
def test_a_directory_that_may_be_the_users_is_kept(base: Path, change: str) -> None:
    left = left_by_a_crash(base)
    if change == "a file":
        (left / "results.txt").write_text("precious")
    elif change == "other mode":
        left.chmod(0o755)
    elif change == "a link":
        target = left.rename(base / "elsewhere")
        left.symlink_to(target)
    else:
        left = left.rename(base / "lightserve-dead")

    with run_directory():
        assert (left / "router").is_socket()
