"""``lightserve doctor``: one line for each part of a machine."""

from __future__ import annotations

import socket
import subprocess
from importlib.metadata import EntryPoint, PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest

from lightserve.cli import doctor, machine
from lightserve.cli.doctor import line_of
from lightserve.cli.machine import CHECKS, Finding
from lightserve.utils import drivers
from lightserve.utils.terminal import Style
from test.model_files.test_progress import Terminal


def lines(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """Each line by its name, without the mark in front."""
    found = {}
    for line in capsys.readouterr().out.splitlines():
        name = next(name for name in CHECKS if line[4:].startswith(name))
        found[name] = line
    return found


def test_it_has_a_line_for_each_part_of_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main([]) == 0

    found = lines(capsys)
    assert list(found) == list(CHECKS)
    assert 9 <= len(found) <= 12
    assert not any("cannot be checked" in line for line in found.values())


def test_a_port_in_use_is_named_with_its_holder(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        assert doctor.main(["--port", str(port)]) == 0

    line = lines(capsys)["port"]
    assert line.startswith("!!")
    assert f"port {port} is in use" in line
    assert line.endswith(": set another --port")


def test_a_check_that_fails_itself_costs_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(port: int) -> NoReturn:
        raise RuntimeError("no such file")

    monkeypatch.setattr(doctor, "CHECKS", {"disk": broken, "port": CHECKS["port"]})

    assert doctor.main(["--port", "0"]) == 0
    assert lines(capsys)["disk"].endswith("cannot be checked (RuntimeError: no such file)")


def test_a_gpu_without_triton_cannot_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> NoReturn:
        raise PackageNotFoundError(name)

    monkeypatch.setitem(drivers.DRIVERS, "cuda", drivers.DRIVERS["cuda"]._replace(control=tmp_path))
    monkeypatch.setattr(machine, "version", absent)
    monkeypatch.setattr(doctor, "CHECKS", {"triton": machine.check_triton})

    assert doctor.main([]) == 1
    assert machine.check_triton(0).remedy.startswith("a GPU needs it: pip install 'triton>=")


def test_a_gpu_is_described_by_its_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setitem(drivers.DRIVERS, "cuda", drivers.DRIVERS["cuda"]._replace(control=tmp_path))
    answer = SimpleNamespace(stdout="NVIDIA H200, 143771 MiB, 570.1\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: answer)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "install a torch" in machine.check_gpu(0).remedy

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert machine.check_gpu(0) == Finding("NVIDIA H200, 143771 MiB, 570.1, compute capability 9.0, has fp8")
    assert machine.check_fast(0).text.endswith("--quantization fp8")


def test_a_device_of_another_package_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightserve.common.device import registry
    from test.fake_vendor.device import FakeDevice

    for name in ("cuda", "rocm"):
        absent = drivers.DRIVERS[name]._replace(control=Path("/nowhere"))
        monkeypatch.setitem(drivers.DRIVERS, name, absent)
        monkeypatch.setattr(registry.BUILT_IN[name], "unavailable_reason", lambda: "it is not here")
    assert machine.check_gpu(0).text == "none; the CPU computes"

    found = [EntryPoint("fake", f"{FakeDevice.__module__}:FakeDevice", registry.ENTRY_POINTS)]
    monkeypatch.setattr(registry, "entry_points", lambda group: found)
    assert machine.check_gpu(0) == Finding("fake: Fake 1, made of air")


@pytest.mark.parametrize(
    ("device", "expected"), [(None, True), ("rocm", True), ("npu", True), ("cuda", False), ("cpu", False)]
)
def test_kernels_are_compiled_ahead_where_the_driver_of_the_device_is_loaded(
    device: str | None, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(drivers.DRIVERS, "rocm", drivers.DRIVERS["rocm"]._replace(control=tmp_path))
    monkeypatch.setitem(drivers.DRIVERS, "cuda", drivers.DRIVERS["cuda"]._replace(control=tmp_path / "absent"))

    assert drivers.may_have_gpu(device) == expected


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"HF_ENDPOINT": "https://mirror"}, "https://mirror, no token"),
        ({"HF_TOKEN": "hf_secret"}, "https://huggingface.co, a token"),
        ({"HF_HUB_OFFLINE": "1"}, "offline (HF_HUB_OFFLINE), no token"),
    ],
)
def test_access_to_the_hub_is_what_the_environment_says(
    variables: dict[str, str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_ENDPOINT", "HF_TOKEN", "HF_HUB_OFFLINE", "HF_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    assert machine.check_hub(0).text.startswith(text)
    assert "hf_secret" not in machine.check_hub(0).text


def test_marks_have_colours_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    finding = Finding("bad", "fix it", is_fatal=True)
    assert line_of("disk", finding, Style(Terminal())) == "\x1b[31m!!\x1b[0m  disk       bad: fix it"

    monkeypatch.setenv("NO_COLOR", "1")
    assert line_of("disk", finding, Style(Terminal())) == "!!  disk       bad: fix it"
